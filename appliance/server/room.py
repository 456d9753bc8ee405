"""Is there room for L1? Asked before anything is created, so that a start that cannot work changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.errors import ArenaTooSmall
from appliance.host import GIB, existing_parent, memory_limit
from appliance.protocol.arena_layout import SegmentLayout


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
