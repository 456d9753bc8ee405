"""How much memory is there for a second copy of objects, while the files that they come from are still there."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.host import CGROUP_FILE, CGROUP_ROOT, existing_parent, memory_files, read_limit


def spare_memory(directory: Path, root: Path = CGROUP_ROOT, cgroup_file: Path = CGROUP_FILE) -> int:
    """Bytes that may be written to the mount of ``directory`` beside all that is there, in the mount and every cgroup."""
    stats = os.statvfs(existing_parent(directory))
    spare = [stats.f_bavail * stats.f_frsize]
    for limit_file, used_file in memory_files(root, cgroup_file):
        limit, used = read_limit(limit_file), read_limit(used_file)
        if limit is not None and used is not None:
            spare.append(limit - used)
    return max(0, min(spare))
