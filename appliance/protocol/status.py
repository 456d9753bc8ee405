"""The daemon's account of itself: the result of ``status``, read by the web process, the CLI and the metrics.

Ages and remaining times are in seconds, measured by the daemon's clocks when the document was made.
"""

from __future__ import annotations

from typing import Any

from appliance.protocol.base import Lenient
from appliance.protocol.messages import Difference


class Gate(Lenient):
    """One condition of readiness; ``reason`` says in a sentence why it is open or closed."""

    name: str
    open: bool
    reason: str


class LoopStatus(Lenient):
    """One background loop: when it last went round, and what it survived."""

    name: str
    idle_seconds: float
    errors: int
    last_error: str = ""


class L1Status(Lenient):
    """The arena's bytes.

    ``free + occupied + reserved + limbo + draining == populated`` always holds. ``leased`` and ``pinned`` are parts of
    ``occupied``; ``draining`` was removed from the index and waits for its last reader.
    """

    capacity_bytes: int
    populated_bytes: int
    free_bytes: int
    occupied_bytes: int
    reserved_bytes: int
    limbo_bytes: int
    draining_bytes: int
    leased_bytes: int
    pinned_bytes: int
    objects: int
    chunks: int
    extent_bytes: int
    segments: int
    watermark_bytes: int
    policy: str
    arena_dir: str


class PolicyShadow(Lenient):
    """What an eviction policy would have hit, on the prompts that the shadows follow."""

    policy: str
    active: bool
    default: bool
    prompts: int
    asked_chunks: int
    hit_chunks: int


class RetentionStatus(Lenient):
    """The eviction policy and its rivals on the live traffic.

    ``share`` is the part of first chunks whose prompts are followed, ``since_seconds`` how long ago counting began.
    """

    share: float = 1.0
    since_seconds: float = 0.0
    policies: list[PolicyShadow] = []


class GroupUsage(Lenient):
    """What one object group of one namespace occupies; all bytes are in whole extents, as in the arena.

    Since the daemon started: ``stored_bytes``, of which ``read_bytes`` were read again at least once; ``evicted_bytes``, and
    ``regret_bytes`` that a later prompt would have loaded.
    """

    namespace: str
    model: str
    group: int
    name: str
    kind: str
    shards: int
    replicas: int
    objects: int
    bytes: int
    leased_bytes: int
    reserved_bytes: int
    stored_bytes: int = 0
    read_bytes: int = 0
    evicted_bytes: int = 0
    regret_bytes: int = 0


class NamespaceStatus(Lenient):
    """One fingerprint and the engines that have it."""

    namespace: str
    model: str
    chunk_tokens: int
    engines: list[str]
    chunks: int
    bytes: int
    read_lease_ttl_seconds: float
    write_ttl_seconds: float
    session_ttl_seconds: float
    fields: dict[str, Any]


class Refusal(Lenient):
    """Two namespaces of one model that do not share, and why; ``lookups`` would have hit across."""

    model: str
    engine_id: str
    namespace: str
    other_namespace: str
    other_engines: list[str]
    differences: list[Difference]
    lookups: int


class EngineStatus(Lenient):
    """One serving instance."""

    engine_id: str
    state: str
    reason: str
    model: str
    namespace: str
    chunk_tokens: int
    block_tokens: list[int]
    world_size: int
    ranks_attached: list[int]
    host: str
    pid: int
    client: str
    heartbeat_age_seconds: float
    lookups: int
    asked_tokens: int
    hit_tokens: int
    loads: int
    load_failures: int
    bytes_loaded: int
    bytes_stored: int
    objects_stored: int
    leases: int
    reserved_bytes: int
    limbo_bytes: int
    notices: list[str]
    transport: str = ""
    planned_block_size: int = 0
    deviation: str = ""


class LeaseStatus(Lenient):
    """One read hold."""

    lease: int
    engine_id: str
    request: str
    namespace: str
    chunks: int
    objects: int
    bytes: int
    age_seconds: float
    remaining_seconds: float
    renewals: int


class LeaseEndStatus(Lenient):
    """A lease that ended lately."""

    lease: int
    engine_id: str
    request: str
    namespace: str
    cause: str
    chunks: int
    bytes: int
    age_seconds: float
    ended_ago_seconds: float


class InlineStatus(Lenient):
    """The bulk socket: page bytes of clients that share no memory with the daemon. Counted since the start."""

    port: int = 0
    sessions: int = 0
    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    refusals: int = 0
    stalls: int = 0
    stalled_peers: int = 0
    answers_dropped: int = 0


class TtlStatus(Lenient):
    """One TTL, everywhere or for one namespace: what holds, what was configured, and whether it was changed since."""

    name: str
    namespace: str
    value_seconds: float
    configured_seconds: float
    changed: bool


class CatalogStatus(Lenient):
    """The catalog writer's health."""

    state: str
    reason: str
    path: str
    queued: int
    written: int
    dropped: int
    last_commit_age_seconds: float | None = None


class RestartGate(Lenient):
    """One gate of a restart, in the order in which they were met: ``outcome`` is passed, failed or skipped."""

    name: str
    outcome: str
    reason: str
    facts: dict[str, int] = {}


class RestartStatus(Lenient):
    """How this boot began: warm or cold, and why.

    ``left_behind`` counts objects of the boot before that were not taken back, by cause; ``seconds`` is the time from
    the first gate to the last object.
    """

    mode: str
    reason: str
    clean_stop: bool
    objects: int
    limbo_objects: int
    left_behind: dict[str, int]
    seconds: float
    gates: list[RestartGate]


class DaemonStatus(Lenient):
    """Everything at one moment."""

    version: str
    boot: str
    phase: str
    ready: bool
    uptime_seconds: float
    started_unix: float
    gates: list[Gate]
    l1: L1Status
    groups: list[GroupUsage]
    namespaces: list[NamespaceStatus]
    refusals: list[Refusal]
    engines: list[EngineStatus]
    leases: list[LeaseStatus]
    leases_total: int
    lease_ends: list[LeaseEndStatus]
    lease_end_causes: dict[str, int]
    reservation_end_causes: dict[str, int]
    evictions: dict[str, int]
    evicted_bytes: dict[str, int]
    miss_reasons: dict[str, int]
    counters: dict[str, int]
    retention: RetentionStatus = RetentionStatus()
    inline: InlineStatus = InlineStatus()
    catalog: CatalogStatus
    restart: RestartStatus | None = None
    loops: list[LoopStatus]
    settings: dict[str, Any]
    setting_sources: dict[str, str] = {}
    ttls: list[TtlStatus] = []
    ttls_version: str = ""
