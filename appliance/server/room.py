"""Is there room for L1? Asked before anything is created, so that a start that cannot work changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.errors import ArenaTooSmall
from appliance.protocol.arena_layout import SegmentLayout

GIB = 1 << 30
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def check_room(directory: Path, layout: SegmentLayout) -> None:
    """Refuse an arena that its mount or the cgroup cannot hold.

    Memory that earlier segment files in ``directory`` take is counted as free: they are taken over or removed.

    Raises:
        ArenaTooSmall: naming what is there, what was asked, and the remedy.
    """
    asked = layout.file_bytes
    mount = _existing_parent(directory)
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


def memory_limit(root: Path = _CGROUP_ROOT, cgroup_file: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest memory limit on the way from this process's cgroup to the root; ``None`` if there is none."""
    limits = []
    for line in cgroup_file.read_text().splitlines() if cgroup_file.exists() else []:
        _, controllers, path = line.split(":", 2)
        base, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        place = base / path.lstrip("/")
        while place.is_relative_to(base):
            limits.append(_read_limit(place / name))
            if place == base:
                break
            place = place.parent
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _existing_parent(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
