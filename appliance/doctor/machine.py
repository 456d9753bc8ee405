"""The machine: memory, limits of this process, NUMA, kernel, container, clock."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from appliance.doctor.findings import Code, Finding, Severity
from appliance.doctor.place import held_bytes
from appliance.doctor.subject import Subject
from appliance.host import GIB, memory_info, memory_limit, mount_of, node_memory

OLDEST_KERNEL = (5, 4)
FEW_FILES = 1024
DOCKER_SHM_BYTES = 64 << 20
CLOCK_SLACK_SECONDS = 5.0

GOOD_CLOCKS = frozenset(
    {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase", "stp", "xen"}
)
"""Clock sources that are read without a system call."""

_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14
_VERSION = Path("/proc/version")
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_INIT_CGROUP = Path("/proc/1/cgroup")


def memory(subject: Subject) -> Iterator[Finding]:
    """Whether memory and the cgroup hold L1."""
    available = memory_info().get("MemAvailable", 0)
    missing = subject.arena_bytes - held_bytes(subject.arena_dir)
    if 0 < available < missing:
        yield Finding(
            area="memory",
            code=Code.MEMORY_SHORT,
            severity=Severity.PROBLEM,
            message=f"L1 needs {missing / GIB:.2f} GiB more memory and {available / GIB:.2f} GiB are available.",
            evidence="MemAvailable in /proc/meminfo, and what the arena's segments take already",
            remedy="Lower --l1-size-gb, or free memory.",
        )
    limit = memory_limit()
    if limit is not None and limit < subject.arena_bytes:
        yield Finding(
            area="memory",
            code=Code.CGROUP_LIMIT,
            severity=Severity.PROBLEM,
            message=f"L1 needs {subject.arena_bytes / GIB:.2f} GiB and this cgroup may use {limit / GIB:.2f} GiB.",
            evidence="the smallest memory limit from this process's cgroup to the root",
            remedy="Raise the memory limit of the container or unit, or lower --l1-size-gb.",
        )


def numa(subject: Subject) -> Iterator[Finding]:
    """Whether L1 fits on one node."""
    nodes = node_memory()
    if len(nodes) < 2 or mount_of(subject.arena_dir).option("mpol"):
        return
    largest = max(nodes.values())
    if subject.arena_bytes - held_bytes(subject.arena_dir) > largest:
        shown = ", ".join(f"node {node}: {free / GIB:.1f} GiB free" for node, free in nodes.items())
        yield Finding(
            area="numa",
            code=Code.NUMA_SPREAD,
            severity=Severity.NOTE,
            message="L1 is larger than the free memory of any NUMA node: it fills one node first, then the next.",
            evidence=shown,
            remedy="Mount the arena with mpol=interleave, or run one daemon and arena for each node.",
        )


def limits(subject: Subject) -> Iterator[Finding]:
    """Resource limits of this process: those of an engine where the doctor runs on its side."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and locked < subject.arena_bytes and not _may_lock_anything():
        yield Finding(
            area="limits",
            code=Code.MEMLOCK_LOW,
            severity=Severity.WARNING if subject.engine_side else Severity.NOTE,
            message="A process with these limits may not lock as much memory as L1 has: registering the arena with a "
            "GPU can fail, and every copy then goes through a bounce buffer.",
            evidence=f"RLIMIT_MEMLOCK is {locked:,} bytes, the arena has {subject.arena_bytes:,}",
            remedy="For the engines: ulimit -l unlimited; --ulimit memlock=-1 in a container; LimitMEMLOCK=infinity in "
            "a unit.",
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < FEW_FILES:
        yield Finding(
            area="limits",
            code=Code.OPEN_FILES_LOW,
            severity=Severity.WARNING,
            message="Few files may be open at once: each connection and each lock file needs one.",
            evidence=f"RLIMIT_NOFILE is {files:,}",
            remedy=f"ulimit -n {4 * FEW_FILES}; --ulimit nofile in a container; LimitNOFILE= in a unit.",
        )


def _may_lock_anything() -> bool:
    """Whether this process has CAP_IPC_LOCK, which no limit stops."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _STATUS.read_text(), flags=re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def kernel(subject: Subject) -> Iterator[Finding]:  # noqa: ARG001 - every look has the same form
    """The kernel's version and kind."""
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    if found and (int(found[1]), int(found[2])) < OLDEST_KERNEL:
        yield Finding(
            area="kernel",
            code=Code.KERNEL_OLD,
            severity=Severity.WARNING,
            message=f"The kernel is older than {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]}, the oldest that is looked after.",
            evidence=f"uname -r: {release}",
            remedy="Upgrade the kernel.",
        )
    if "gvisor" in _VERSION.read_text().lower():
        yield Finding(
            area="kernel",
            code=Code.KERNEL_SANDBOX,
            severity=Severity.WARNING,
            message="This process runs in gVisor: record locks and shared memory do not cross to other kernels.",
            evidence="/proc/version names gVisor",
            remedy="Run daemon and engines in one sandbox or without, or let engines send their pages inline "
            "(pagewarden.transport).",
        )


def container(subject: Subject) -> Iterator[Finding]:
    """Whether the arena would be the container's own."""
    mark = _container_mark()
    if not mark:
        return
    mount = mount_of(subject.arena_dir)
    if mount.point == Path("/dev/shm") and (mount.size_bytes or 0) <= DOCKER_SHM_BYTES:  # noqa: S108
        yield Finding(
            area="container",
            code=Code.CONTAINER_SHM,
            severity=Severity.WARNING,
            message="The arena is on this container's own /dev/shm: it ends with the container, and no engine in "
            "another container can map it.",
            evidence=f"{mark}; {mount.point} is a tmpfs of {(mount.size_bytes or 0) >> 20} MiB",
            remedy="Bind-mount one tmpfs directory of the host into the daemon's and the engines' containers and name "
            "it with --arena-dir, or share one container's: --ipc=container:NAME.",
        )


def _container_mark() -> str:
    for path in _CONTAINER_MARKS:
        if path.exists():
            return f"{path} exists"
    words = ("docker", "kubepods", "containerd", "libpod")
    text = _INIT_CGROUP.read_text() if os.access(_INIT_CGROUP, os.R_OK) else ""
    return next((f"{_INIT_CGROUP} names {word}" for word in words if word in text), "")


def clock(subject: Subject) -> Iterator[Finding]:
    """The clock source, and whether the wall clock moved under the daemon."""
    source = _CLOCK_SOURCE.read_text().strip() if _CLOCK_SOURCE.exists() else ""
    if source and source not in GOOD_CLOCKS:
        yield Finding(
            area="clock",
            code=Code.CLOCK_SOURCE,
            severity=Severity.WARNING,
            message="Reading the clock is a slow operation with this clock source, and the loop reads it often.",
            evidence=f"{_CLOCK_SOURCE}: {source}",
            remedy="Find out why the kernel gave up the time stamp counter (dmesg | grep -i tsc), or choose another "
            "with the kernel parameter clocksource=.",
        )
    status = subject.running
    if status is None:
        return
    moved = time.time() - (status.started_unix + status.uptime_seconds)
    if abs(moved) > CLOCK_SLACK_SECONDS:
        yield Finding(
            area="clock",
            code=Code.CLOCK_JUMPED,
            severity=Severity.WARNING,
            message="The wall clock moved against the daemon's own since its start, or this host's differs from it: "
            "times in the catalog and the logs are off by as much. Leases are not, they use the monotonic clock.",
            evidence=f"{moved:+.0f} s in {status.uptime_seconds:.0f} s of service",
            remedy="Keep the clock with NTP, and restart the daemon if its history should line up.",
        )
