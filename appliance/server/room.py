"""Is there room for L1? Asked before anything is created, so that a start that cannot work changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from appliance.errors import ArenaTooSmall
from appliance.protocol.arena_layout import SegmentLayout

GIB = 1 << 30
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_FILE = Path("/proc/self/cgroup")
_UNIFIED_FILES = ("memory.max", "memory.current")
_LEGACY_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def check_room(directory: Path, layout: SegmentLayout) -> None:
    """Refuse an arena that its mount or the cgroup cannot hold.

    Memory that earlier segment files in ``directory`` take is counted as free: they are taken over or removed.

    Raises:
        ArenaTooSmall: naming what is there, what was asked, and the remedy.
    """
    asked = layout.file_bytes
    mount = existing_parent(directory)
    stats = os.statvfs(mount)
    mine = (
        sum(path.stat().st_blocks * 512 for path in directory.glob("segment-*.arena"))
        if directory.is_dir()
        else 0
    )
    free = stats.f_bavail * stats.f_frsize + mine
    if free < asked:
        raise ArenaTooSmall(
            f"L1 needs {asked / GIB:.2f} GiB but the mount of {directory} has {free / GIB:.2f} GiB free.",
            remedy=f"Enlarge it (mount -o remount,size=…G {mount}; --shm-size in a container) or lower --l1-size-gb.",
            asked_bytes=asked,
            free_bytes=free,
        )
    limit = memory_limit()
    if limit is not None and limit < asked:
        raise ArenaTooSmall(
            f"L1 needs {asked / GIB:.2f} GiB but this process's cgroup may use {limit / GIB:.2f} GiB of memory.",
            remedy="Raise the memory limit of the container or unit, or lower --l1-size-gb.",
            asked_bytes=asked,
            limit_bytes=limit,
        )


def memory_limit(root: Path = CGROUP_ROOT, cgroup_file: Path = CGROUP_FILE) -> int | None:
    """The smallest memory limit on the way from this process's cgroup to the root; ``None`` if there is none."""
    limits = [read_limit(limit_file) for limit_file, _ in memory_files(root, cgroup_file)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def memory_files(root: Path, cgroup_file: Path) -> Iterator[tuple[Path, Path]]:
    """Files of the limit and the use of memory, of each cgroup from this process's own up to the root."""
    for line in cgroup_file.read_text().splitlines() if cgroup_file.exists() else []:
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if controllers else root
        limit, used = _LEGACY_FILES if controllers else _UNIFIED_FILES
        if controllers and "memory" not in controllers.split(","):
            continue
        place = base / path.lstrip("/")
        while place.is_relative_to(base):
            yield place / limit, place / used
            if place == base:
                break
            place = place.parent


def read_limit(path: Path) -> int | None:
    """The number in a file of a cgroup; ``None`` where there is none, or one that means no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
