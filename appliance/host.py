"""What this machine says of itself under /proc and /sys: mounts, memory, limits of the cgroup, nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_FILE = Path("/proc/self/cgroup")
_UNIFIED_FILES = ("memory.max", "memory.current")
_LEGACY_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_MOUNTINFO = Path("/proc/self/mountinfo")
_MEMINFO = Path("/proc/meminfo")
_SWAPS = Path("/proc/swaps")
_NODES = Path("/sys/devices/system/node")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount: where, of which kind, and its options (those of the mount and of the filesystem together)."""

    point: Path
    kind: str
    options: frozenset[str]

    @property
    def size_bytes(self) -> int | None:
        """The ``size=`` option of a tmpfs, where it is a number."""
        value = self.option("size")
        found = re.fullmatch(r"(\d+)([kmg]?)", value)
        return int(found[1]) * _UNITS[found[2]] if found else None

    def option(self, name: str) -> str:
        """The value of an option, empty where it is not set."""
        return next((each.split("=", 1)[1] for each in self.options if each.startswith(f"{name}=")), "")


def mount_of(path: Path) -> Mount:
    """The mount that holds ``path``, or will hold it once it is made."""
    place = existing_parent(path).resolve()
    best = Mount(Path("/"), "unknown", frozenset())
    for line in _MOUNTINFO.read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        point = Path(re.sub(r"\\(\d{3})", lambda escaped: chr(int(escaped[1], 8)), fields[4]))
        if place.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            options = (
                {*fields[5].split(","), *kind[2].split(",")} if len(kind) > 2 else set(fields[5].split(","))
            )
            best = Mount(point, kind[0], frozenset(options))
    return best


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Bytes that may still be written on the mount of ``path``."""
    stats = os.statvfs(existing_parent(path))
    return stats.f_bavail * stats.f_frsize


def memory_info() -> dict[str, int]:
    """The entries of /proc/meminfo, in bytes (counts of pages as they are)."""
    found = {}
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def swap_is_on() -> bool:
    """Whether memory may be swapped to a disk."""
    return len(_SWAPS.read_text().splitlines()) > 1


def node_memory() -> dict[int, int]:
    """Free bytes of each NUMA node; empty where the kernel shows none."""
    free = {}
    for path in sorted(_NODES.glob("node[0-9]*/meminfo")):
        found = re.search(r"MemFree:\s+(\d+) kB", path.read_text())
        if found:
            free[int(path.parent.name.removeprefix("node"))] = int(found[1]) * 1024
    return free


def memory_limit(root: Path = CGROUP_ROOT, cgroup_file: Path = CGROUP_FILE) -> int | None:
    """The smallest memory limit on the way from this process's cgroup to the root; ``None`` if there is none."""
    limits = [read_limit(limit_file) for limit_file, _ in memory_files(root, cgroup_file)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def memory_files(root: Path = CGROUP_ROOT, cgroup_file: Path = CGROUP_FILE) -> Iterator[tuple[Path, Path]]:
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
