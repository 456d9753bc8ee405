"""The rows that the read-only view returns, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One session of an engine; ``ended_unix`` and ``end_cause`` are ``None`` while it is live or suspect."""

    engine_id: str
    session_id: str
    model: str
    namespace: str
    host: str
    pid: int
    engine_version: str
    ranks: int
    chunk_tokens: int
    block_tokens: int
    state: str
    first_seen_unix: float
    last_seen_unix: float
    ended_unix: float | None
    end_cause: str | None


@dataclass(frozen=True, slots=True)
class FingerprintRecord:
    """One namespace that was ever registered; ``record`` is the whole fingerprint."""

    namespace: str
    model: str
    record: dict[str, Any]
    first_seen_unix: float
    last_seen_unix: float


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One object group of a namespace."""

    namespace: str
    group_index: int
    name: str
    kind: str
    shards: int
    replicas: int
    window_chunks: int
    object_bytes: int


@dataclass(frozen=True, slots=True)
class LeaseEndRecord:
    """How one lease ended."""

    end_id: int
    lease_id: str
    engine_id: str
    session_id: str
    namespace: str
    request_id: str
    cause: str
    chunks: int
    bytes: int
    age_seconds: float
    renewals: int
    ended_unix: float


@dataclass(frozen=True, slots=True)
class EvictionRecord:
    """One (chunk, group) that left the cache."""

    eviction_id: int
    namespace: str
    group_index: int
    chunk_key: bytes
    bytes: int
    cause: str
    age_seconds: float
    idle_seconds: float
    evicted_unix: float


@dataclass(frozen=True, slots=True)
class SettingRecord:
    """The value in force of a setting that was changed; ``scope`` is empty or a namespace."""

    name: str
    scope: str
    value: Any
    changed_unix: float
    changed_by: str


@dataclass(frozen=True, slots=True)
class SettingChangeRecord:
    """One change of a setting; ``None`` stands for the daemon's own default."""

    change_id: int
    name: str
    scope: str
    before: Any
    after: Any
    changed_unix: float
    changed_by: str


@dataclass(frozen=True, slots=True)
class ClearRecord:
    """One acknowledged clear; ``namespace`` is empty where ``scope`` is ``all``."""

    clear_id: int
    epoch: int
    scope: str
    namespace: str
    requested_by: str
    cleared_unix: float
    removed_objects: int
    removed_bytes: int


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """One start of the daemon."""

    boot_id: str
    started_unix: float
    mode: str
    reason: str
    gates: dict[str, Any]
    clean_stop: bool


class ObjectKey(NamedTuple):
    """Where a page of objects ended, within one namespace."""

    chunk_key: bytes
    group_index: int
    shard: int


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """One stored object as last projected from the arena; ``checksum`` is an unsigned 64-bit integer."""

    namespace: str
    chunk_key: bytes
    group_index: int
    shard: int
    bytes: int
    checksum: int
    chunk_index: int
    salt_digest: str
    stored_unix: float
    last_used_unix: float
    state: str

    @property
    def key(self) -> ObjectKey:
        """The cursor that starts the next page after this object."""
        return ObjectKey(self.chunk_key, self.group_index, self.shard)


@dataclass(frozen=True, slots=True)
class GroupTotal:
    """What one object group of a namespace holds."""

    namespace: str
    group_index: int
    objects: int
    bytes: int
