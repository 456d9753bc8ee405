"""The arena's place: its mount, who may write there, and what an earlier daemon left."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from appliance.doctor.findings import Code, Finding, Severity
from appliance.doctor.subject import Subject
from appliance.host import GIB, Mount, existing_parent, free_bytes, mount_of, swap_is_on
from appliance.protocol.liveness import is_locked

LARGE_L1_BYTES = 8 * GIB
DAEMON_LOCK = "daemon.lock"


def mount(subject: Subject) -> Iterator[Finding]:
    """Kind, size and options of the mount."""
    found = mount_of(subject.arena_dir)
    seen = f"{subject.arena_dir} is on {found.point}, {found.kind} ({_options(found)})"
    if found.kind == "hugetlbfs":
        yield _finding(
            Code.ARENA_HUGETLBFS,
            Severity.PROBLEM,
            "The arena's directory is on hugetlbfs, which knows no write(2): the daemon cannot keep its tables there.",
            seen,
            f"Mount a tmpfs with huge pages instead: mount -t tmpfs -o huge=within_size,size={_gib(subject)}G tmpfs "
            f"{found.point}.",
        )
        return
    if found.kind != "tmpfs":
        yield _finding(
            Code.ARENA_NOT_MEMORY,
            Severity.PROBLEM,
            f"The arena's directory is on {found.kind}: pages would be written to a disk, or to no file at all.",
            seen,
            "Choose a directory on a tmpfs with --arena-dir, such as /dev/shm/pagewarden.",
        )
        return
    if "ro" in found.options:
        yield _finding(
            Code.ARENA_MOUNT_READ_ONLY,
            Severity.PROBLEM,
            "The arena's mount is read-only.",
            seen,
            f"Remount it: mount -o remount,rw {found.point}; in a container, mount the volume without :ro.",
        )
    yield from _room(subject, found)
    if found.option("huge") in ("", "never") and subject.l1_bytes >= LARGE_L1_BYTES:
        yield _finding(
            Code.ARENA_SMALL_PAGES,
            Severity.NOTE,
            "A large L1 stands in pages of 4 KiB: populating it and registering it with a GPU takes longer.",
            seen,
            f"mount -o remount,huge=within_size {found.point}",
        )
    if swap_is_on() and "noswap" not in found.options:
        yield _finding(
            Code.ARENA_SWAPPABLE,
            Severity.WARNING,
            "Swap is on and the arena's mount may be swapped: a hit could wait for a disk.",
            f"{seen}; /proc/swaps names a swap area",
            "Mount it with noswap (Linux 6.4 and newer), or turn swap off with swapoff -a.",
        )


def _room(subject: Subject, found: Mount) -> Iterator[Finding]:
    free = free_bytes(subject.arena_dir) + held_bytes(subject.arena_dir)
    if free < subject.arena_bytes:
        yield _finding(
            Code.ARENA_MOUNT_SMALL,
            Severity.PROBLEM,
            f"L1 needs {subject.arena_bytes / GIB:.2f} GiB and its mount has {free / GIB:.2f} GiB for it.",
            f"statvfs({existing_parent(subject.arena_dir)}) and the segments there",
            f"Enlarge it (mount -o remount,size={_gib(subject)}G {found.point}; --shm-size in a container), or lower "
            "--l1-size-gb.",
        )


def arena(subject: Subject) -> Iterator[Finding]:
    """The directory itself: permissions, lock, left-over segments."""
    directory = subject.arena_dir
    if not directory.is_dir():
        parent = existing_parent(directory)
        if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
            yield _unwritable(
                parent, f"{directory} does not exist, and user {os.geteuid()} may not write {parent}"
            )
        return
    status = directory.stat()
    mode = f"mode {stat.S_IMODE(status.st_mode):03o}, owner {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        yield _finding(
            Code.ARENA_EXPOSED,
            Severity.PROBLEM,
            "Everybody may write the arena's directory, and so change cached bytes.",
            f"{directory}: {mode}",
            f"chmod o-w {directory}",
            area="arena",
        )
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        yield _unwritable(directory, f"{directory}: {mode}; this is user {os.geteuid()}")
        return
    if subject.running is None:
        yield from _before_a_start(subject)


def _before_a_start(subject: Subject) -> Iterator[Finding]:
    directory = subject.arena_dir
    if is_locked(directory / DAEMON_LOCK):
        yield _finding(
            Code.ARENA_IN_USE,
            Severity.PROBLEM,
            f"Another daemon holds the arena's directory, and none answers at {subject.host}:{subject.port}.",
            f"{directory / DAEMON_LOCK} is locked",
            "Stop that daemon, give this one another --arena-dir, or ask the doctor with that daemon's --port.",
            area="arena",
        )
        return
    sizes = {path.name: path.stat().st_size for path in sorted(directory.glob("segment-*.arena"))}
    others = {name: size for name, size in sizes.items() if size != subject.arena_bytes}
    if others or len(sizes) > 1:
        name, size = next(iter((others or sizes).items()))
        yield _finding(
            Code.ARENA_LEFT_OVER,
            Severity.NOTE,
            "Segments of an earlier arena with another size are there: the next start replaces them, and begins empty.",
            f"{name} has {size:,} bytes, L1 as set has {subject.arena_bytes:,}",
            "Nothing, or start with the --l1-size-gb and --extent-kib of before.",
            area="arena",
        )


def held_bytes(directory: Path) -> int:
    """Memory that segments in the directory take already: the daemon takes them over or removes them."""
    if not os.access(directory, os.R_OK | os.X_OK, effective_ids=True) or not directory.is_dir():
        return 0
    return sum(path.stat().st_blocks * 512 for path in directory.glob("segment-*.arena"))


def _unwritable(place: Path, seen: str) -> Finding:
    return _finding(
        Code.ARENA_UNWRITABLE,
        Severity.PROBLEM,
        "This user may not write the arena's directory.",
        seen,
        f"Run the daemon and its engines as the owner of {place}, or give the user write access.",
        area="arena",
    )


def _finding(
    code: Code, severity: Severity, message: str, evidence: str, remedy: str, *, area: str = "mount"
) -> Finding:
    return Finding(area=area, code=code, severity=severity, message=message, evidence=evidence, remedy=remedy)


def _options(found: Mount) -> str:
    return ",".join(sorted(found.options)) or "no options"


def _gib(subject: Subject) -> int:
    return -(-subject.arena_bytes // GIB) + 1
