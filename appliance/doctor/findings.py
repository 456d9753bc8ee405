"""What the doctor says: findings with a stable code, evidence and a remedy, and the report of all of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict


class Severity(StrEnum):
    """How bad a finding is. A *problem* will keep the cache from working; a *warning* costs hits or speed."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def rank(self) -> int:
        """For comparing: the worst is the highest."""
        return list(Severity).index(self)


class Code(StrEnum):
    """Every finding there is; docs/doctor.md explains each."""

    OK = "ok"
    NOT_LOOKED_AT = "not_looked_at"
    ARENA_NOT_MEMORY = "arena_not_memory"
    ARENA_HUGETLBFS = "arena_hugetlbfs"
    ARENA_MOUNT_SMALL = "arena_mount_small"
    ARENA_MOUNT_READ_ONLY = "arena_mount_read_only"
    ARENA_SMALL_PAGES = "arena_small_pages"
    ARENA_SWAPPABLE = "arena_swappable"
    ARENA_EXPOSED = "arena_exposed"
    ARENA_UNWRITABLE = "arena_unwritable"
    ARENA_IN_USE = "arena_in_use"
    ARENA_LEFT_OVER = "arena_left_over"
    MEMORY_SHORT = "memory_short"
    CGROUP_LIMIT = "cgroup_limit"
    NUMA_SPREAD = "numa_spread"
    MEMLOCK_LOW = "memlock_low"
    OPEN_FILES_LOW = "open_files_low"
    PORT_TAKEN = "port_taken"
    LISTENER_EXPOSED = "listener_exposed"
    KERNEL_OLD = "kernel_old"
    KERNEL_SANDBOX = "kernel_sandbox"
    CONTAINER_SHM = "container_shm"
    CLOCK_SOURCE = "clock_source"
    CLOCK_JUMPED = "clock_jumped"
    CATALOG_UNREADABLE = "catalog_unreadable"
    CATALOG_UNWRITABLE = "catalog_unwritable"
    CATALOG_DISK_FULL = "catalog_disk_full"
    CATALOG_IN_MEMORY = "catalog_in_memory"
    CATALOG_ON_NETWORK = "catalog_on_network"
    CATALOG_STATE = "catalog_state"
    DAEMON_UNREACHABLE = "daemon_unreachable"
    DAEMON_NOT_READY = "daemon_not_ready"
    DAEMON_VERSION = "daemon_version"
    LOOP_TROUBLE = "loop_trouble"
    LEASES_EXPIRED = "leases_expired"
    LOADS_FAILED = "loads_failed"
    ENGINE_REFUSED = "engine_refused"
    ENGINE_WAITING = "engine_waiting"
    ENGINE_DEVIATES = "engine_deviates"
    ENGINE_INLINE = "engine_inline"
    ARENA_UNREACHABLE = "arena_unreachable"
    LOCK_NOT_SEEN = "lock_not_seen"
    BULK_UNREACHABLE = "bulk_unreachable"
    NO_NUMBA = "no_numba"
    VLLM_UNREACHABLE = "vllm_unreachable"
    VLLM_NO_CONNECTOR = "vllm_no_connector"
    VLLM_NO_PREFIX_CACHING = "vllm_no_prefix_caching"
    VLLM_MAMBA_MODE = "vllm_mamba_mode"
    VLLM_BLOCK_SIZE = "vllm_block_size"


class Finding(BaseModel):
    """One finding: what area was looked at, what was seen there, and what to do about it."""

    area: str
    code: Code
    severity: Severity
    message: str
    evidence: str = ""
    remedy: str = ""


_EXAMPLE: dict[str, Any] = {
    "worst": "warning",
    "running": True,
    "endpoint": "127.0.0.1:6555",
    "host": "gpu-1",
    "engine_side": False,
    "findings": [
        {
            "area": "mount",
            "code": "arena_swappable",
            "severity": "warning",
            "message": "Swap is on and the arena's mount may be swapped: a hit could wait for a disk.",
            "evidence": "/srv/arena is on /srv/arena, tmpfs (rw,size=64g)",
            "remedy": "Mount it with noswap, or turn swap off with swapoff -a.",
        }
    ],
}


class Report(BaseModel):
    """All findings, the worst first. ``running`` says whether a daemon answered at ``endpoint``."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    worst: Severity
    running: bool
    endpoint: str
    host: str
    engine_side: bool
    findings: list[Finding]


def report_of(
    findings: list[Finding], *, running: bool, endpoint: str, host: str, engine_side: bool
) -> Report:
    """The report of findings in any order."""
    ordered = sorted(findings, key=lambda finding: -finding.severity.rank)
    worst = ordered[0].severity if ordered else Severity.OK
    return Report(
        worst=worst, running=running, endpoint=endpoint, host=host, engine_side=engine_side, findings=ordered
    )
