"""Every finding about the machine, provoked for real: mounts, files, limits, sockets, namespaces, locks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.catalog.database import open_for_daemon
from appliance.doctor.findings import Code, Severity
from appliance.doctor.run import examine
from appliance.doctor.subject import Subject
from appliance.doctor.text import report_text
from tests.integration._doctor import MIB, absent, elsewhere, flags, found, mounted, place, provoked, subject

__all__ = ["place", "subject"]  # fixtures

NOBODY = 65534
GIB = 1 << 30


@contextmanager
def as_nobody() -> Iterator[None]:
    """Files are judged as another user would."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_nothing_is_wrong_with_a_machine_that_fits(subject: Subject):
    report = examine(subject)
    assert report.worst.rank <= Severity.NOTE.rank, report_text(report)
    assert {finding.area for finding in report.findings} >= {"mount", "arena", "memory", "ports", "catalog"}
    assert not report.running


# --- the arena's mount ------------------------------------------------------------------------------------------------


def test_a_disk(subject: Subject):
    on_disk = replace(subject, arena_dir=Path(__file__).parent / "arena")
    provoked(on_disk, Code.ARENA_NOT_MEMORY, Severity.PROBLEM, "--arena-dir")


def test_a_mount_of_huge_pages_alone(subject: Subject):
    with mounted("hugetlbfs", "rw") as directory:
        with pytest.raises(OSError, match="Invalid argument"):
            (directory / "file").write_bytes(b"x")  # which is why
        provoked(
            replace(subject, arena_dir=directory), Code.ARENA_HUGETLBFS, Severity.PROBLEM, "huge=within_size"
        )


def test_a_small_mount(subject: Subject):
    with mounted("tmpfs", "size=8m") as directory:
        small = replace(subject, arena_dir=directory / "arena")
        provoked(small, Code.ARENA_MOUNT_SMALL, Severity.PROBLEM, "0.01 GiB", "remount,size=")
        (directory / "arena").mkdir()
        held = directory / "arena" / "segment-x-0000.arena"
        held.write_bytes(bytes(5 * MIB))
        fits = replace(small, l1_bytes=4 * MIB)
        absent(fits, Code.ARENA_MOUNT_SMALL)  # it takes over what is held
        held.rename(directory / "arena" / "somebody-elses")
        provoked(fits, Code.ARENA_MOUNT_SMALL, Severity.PROBLEM)


def test_a_mount_that_cannot_be_written(subject: Subject):
    with mounted("tmpfs", "size=64m,ro") as directory:
        finding = provoked(
            replace(subject, arena_dir=directory), Code.ARENA_MOUNT_READ_ONLY, Severity.PROBLEM, "remount,rw"
        )
        assert str(directory) in finding.evidence


def test_small_pages_under_a_large_l1(subject: Subject):
    with mounted("tmpfs", "size=64g") as directory:
        large = replace(subject, arena_dir=directory, l1_bytes=16 * GIB)
        provoked(large, Code.ARENA_SMALL_PAGES, Severity.NOTE, "huge=within_size")
        absent(replace(large, l1_bytes=GIB), Code.ARENA_SMALL_PAGES)
    with mounted("tmpfs", "size=64g,huge=within_size") as directory:
        absent(replace(large, arena_dir=directory), Code.ARENA_SMALL_PAGES)


def test_swap(subject: Subject, tmp_path: Path):
    swaps = tmp_path / "swaps"
    swaps.write_text("Filename Type Size Used Priority\n/dev/vda2 partition 1048572 0 -2\n")
    report = elsewhere(f"mount --bind {swaps} /proc/swaps", *flags(subject))
    assert found(report, Code.ARENA_SWAPPABLE).severity is Severity.WARNING
    fixed = "mount -t tmpfs -o size=64m,noswap tmpfs /mnt\n"
    report = elsewhere(
        f"{fixed} mount --bind {swaps} /proc/swaps", *flags(replace(subject, arena_dir=Path("/mnt")))
    )
    assert Code.ARENA_SWAPPABLE not in {finding.code for finding in report.findings}


# --- the arena's directory --------------------------------------------------------------------------------------------


def test_a_directory_that_everybody_may_write(subject: Subject):
    subject.arena_dir.chmod(0o777)
    provoked(subject, Code.ARENA_EXPOSED, Severity.PROBLEM, "chmod o-w", "mode 777")


def test_a_directory_of_somebody_else(subject: Subject):
    with as_nobody():
        report = examine(subject)
        missing = examine(replace(subject, arena_dir=Path("/sys/fs/arena")))
    assert "owner 0" in found(report, Code.ARENA_UNWRITABLE).evidence
    assert "does not exist" in found(missing, Code.ARENA_UNWRITABLE).evidence


HOLDER = """
import sys
from pathlib import Path
from appliance.protocol.liveness import take_lock
lock = take_lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_that_another_daemon_holds(subject: Subject):
    lock = subject.arena_dir / "daemon.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        provoked(subject, Code.ARENA_IN_USE, Severity.PROBLEM, "daemon.lock")
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait(30)
    absent(subject, Code.ARENA_IN_USE)


def test_segments_of_another_size(subject: Subject):
    (subject.arena_dir / "segment-00-0000.arena").write_bytes(b"x" * 100)
    provoked(subject, Code.ARENA_LEFT_OVER, Severity.NOTE, "100 bytes")


# --- memory and limits -------------------------------------------------------------------------------------------------


def test_more_than_the_machine_has(subject: Subject):
    provoked(replace(subject, l1_bytes=1 << 50), Code.MEMORY_SHORT, Severity.PROBLEM, "MemAvailable")


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup that allows 256 MiB."""
    v1 = Path("/sys/fs/cgroup/memory")
    base, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v1.parent, "memory.max")
    group = base / f"pagewarden-doctor-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(256 * MIB))
    except OSError:
        pytest.skip("this process may not make a cgroup")
    yield group
    group.rmdir()


def test_a_cgroup_that_allows_less(subject: Subject, small_cgroup: Path):
    large = replace(subject, l1_bytes=GIB)
    report = elsewhere(f"echo $$ > {small_cgroup / 'cgroup.procs'}", *flags(large))
    assert "0.25 GiB" in found(report, Code.CGROUP_LIMIT).message


def test_nodes_that_are_smaller_than_l1(subject: Subject, tmp_path: Path):
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "meminfo").write_text(f"Node {node} MemFree:   8192 kB\n")
    script = f"mount --bind {tmp_path} /sys/devices/system/node"
    report = elsewhere(script, *flags(subject))
    assert "node 1: 0.0 GiB free" in found(report, Code.NUMA_SPREAD).evidence
    interleaved = "mount -t tmpfs -o size=64m,mpol=interleave:0 tmpfs /mnt\n"
    report = elsewhere(f"{interleaved} {script}", *flags(replace(subject, arena_dir=Path("/mnt"))))
    assert Code.NUMA_SPREAD not in {finding.code for finding in report.findings}


def test_low_limits(subject: Subject):
    shell = "exec setpriv --inh-caps=-ipc_lock --bounding-set=-ipc_lock sh -c 'ulimit -l 64; ulimit -n 200; exec \"$@\"' -"
    script = (
        f'set -- {sys.executable} -m appliance.cli doctor --json {" ".join(flags(subject))}\n{shell} "$@"'
    )
    report = elsewhere(script)
    assert "65,536 bytes" in found(report, Code.MEMLOCK_LOW).evidence
    assert found(report, Code.MEMLOCK_LOW).severity is Severity.NOTE  # the daemon itself locks nothing
    assert "200" in found(report, Code.OPEN_FILES_LOW).evidence


# --- kernel, container, clock -------------------------------------------------------------------------------------------


def test_an_old_kernel(subject: Subject):
    command = f"{sys.executable} -m appliance.cli doctor --json {' '.join(flags(subject))}"
    report = elsewhere(f"exec setarch --uname-2.6 {command}")
    assert "2.6." in found(report, Code.KERNEL_OLD).evidence


def test_a_sandbox(subject: Subject, tmp_path: Path):
    version = tmp_path / "version"
    version.write_text("Linux version 4.4.0 (gVisor) #1 SMP\n")
    report = elsewhere(f"mount --bind {version} /proc/version", *flags(subject))
    assert found(report, Code.KERNEL_SANDBOX).severity is Severity.WARNING


def test_a_containers_own_shared_memory(subject: Subject):
    inside = replace(subject, arena_dir=Path("/dev/shm/pagewarden"))
    script = "mount -t tmpfs -o size=64m shm /dev/shm\nmount -t tmpfs tmpfs /run\ntouch /run/.containerenv"
    report = elsewhere(script, *flags(inside))
    finding = found(report, Code.CONTAINER_SHM)
    assert "env exists" in finding.evidence  # that of docker comes first where it is there
    assert "64 MiB" in finding.evidence
    report = elsewhere(f"{script}\nmount -o remount,size=8g /dev/shm", *flags(inside))
    assert Code.CONTAINER_SHM not in {finding.code for finding in report.findings}


def test_a_slow_clock(subject: Subject, tmp_path: Path):
    source = tmp_path / "source"
    source.write_text("acpi_pm\n")
    place = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    if not Path(place).exists():
        pytest.skip("this kernel shows no clock source")
    report = elsewhere(f"mount --bind {source} {place}", *flags(subject))
    assert "acpi_pm" in found(report, Code.CLOCK_SOURCE).evidence


def test_a_look_that_fails_hides_no_other(subject: Subject, tmp_path: Path):
    strange = tmp_path / "meminfo"
    strange.write_bytes(b"\xff\xfe")
    subject.arena_dir.chmod(0o777)
    report = elsewhere(f"mount --bind {strange} /proc/meminfo", *flags(subject))
    finding = found(report, Code.NOT_LOOKED_AT)
    assert (finding.area, finding.severity) == ("memory", Severity.WARNING)
    assert "UnicodeDecodeError" in finding.evidence
    found(report, Code.ARENA_EXPOSED)


# --- ports ----------------------------------------------------------------------------------------------------------------


def test_a_port_that_somebody_has(subject: Subject):
    for name, flag in (("port", "--port"), ("http_port", "--http-port"), ("bulk_port", "--bulk-port")):
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = replace(subject, **{name: other.getsockname()[1]})
            provoked(taken, Code.PORT_TAKEN, Severity.PROBLEM, "EADDRINUSE", flag)
            if name == "http_port":
                absent(replace(taken, web=False), Code.PORT_TAKEN)


def test_an_address_that_others_reach(subject: Subject):
    outside = replace(subject, host="0.0.0.0")
    provoked(outside, Code.LISTENER_EXPOSED, Severity.PROBLEM, "refuse to start")
    provoked(replace(outside, insecure=True), Code.LISTENER_EXPOSED, Severity.WARNING, "is given")


# --- the catalog ------------------------------------------------------------------------------------------------------------


def test_a_catalog_that_is_none(subject: Subject):
    subject.catalog.write_bytes(b"not a database" * 1000)
    provoked(subject, Code.CATALOG_UNREADABLE, Severity.PROBLEM, "no SQLite database")


def test_a_catalog_that_is_damaged_where_nobody_looked_yet(subject: Subject):
    open_for_daemon(subject.catalog).dispose()
    absent(subject, Code.CATALOG_UNREADABLE)
    size = subject.catalog.stat().st_size
    with subject.catalog.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xa5" * (size // 2))
    provoked(subject, Code.CATALOG_UNREADABLE, Severity.PROBLEM, "-wal")


def test_a_catalog_of_somebody_else(subject: Subject):
    subject.catalog.parent.chmod(0o700)
    with as_nobody():
        report = examine(subject)
    assert "65534" in found(report, Code.CATALOG_UNWRITABLE).evidence


def test_a_catalog_in_memory_on_a_full_disk(subject: Subject):
    with mounted("tmpfs", "size=8m") as directory:
        moved = replace(subject, catalog=directory / "state" / "catalog.db")
        provoked(moved, Code.CATALOG_IN_MEMORY, Severity.WARNING, "reboot")
        provoked(moved, Code.CATALOG_DISK_FULL, Severity.WARNING, "8 MiB free")


def test_a_catalog_on_a_network(subject: Subject, tmp_path: Path):
    info = tmp_path / "mountinfo"
    info.write_text(
        f"20 1 0:1 / / rw - ext4 /dev/vda rw\n21 20 0:2 / /dev/shm rw - tmpfs tmpfs rw,size=24g\n"
        f"22 20 0:3 / {subject.catalog.parent} rw - nfs4 server:/share rw\n"
    )
    report = elsewhere(f"mount --bind {info} /proc/$$/mountinfo", *flags(subject))
    assert "nfs4" in found(report, Code.CATALOG_ON_NETWORK).evidence
