"""What the daemon hands to the catalog's writer.

*History events* are written behind, in batches, in the order they were submitted; a newer event may replace a waiting
older one (``coalesced_with``), and under overload they are dropped with a counter. *Control rows* are durable before
they are acknowledged.

Events are built on the daemon's loop thread, so they only hold values: whatever costs time (JSON, flattening a
record) happens in the writer thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from appliance.catalog.accounts import AccountRow, AuditEntry

EngineState = Literal["live", "suspect"]
ObjectState = Literal["committed", "quarantined"]
RestartMode = Literal["cold", "warm"]
ClearScope = Literal["all", "namespace"]
GroupKindName = Literal["attention", "sliding", "recurrent"]


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """The base of all history events.

    ``sheddable`` events are refused once the queue is half full, so that they never crowd out the others.
    """

    sheddable: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """How much of the queue's capacity the event takes, in table rows."""
        return 1

    @property
    def identity(self) -> Hashable | None:
        """Events of one identity follow each other; ``None`` stands alone and never coalesces."""
        return None

    def coalesced_with(self, older: HistoryEvent) -> HistoryEvent | None:  # noqa: ARG002
        """The event that stands for both, where ``older`` is the last waiting one of the same identity.

        ``None`` means that both must be written.
        """
        return None


@dataclass(frozen=True, slots=True)
class EngineSeen(HistoryEvent):
    """An engine's session is registered or still there. The latest one per session wins."""

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
    first_seen_unix: float
    last_seen_unix: float
    state: EngineState = "live"

    @property
    def identity(self) -> Hashable:
        """One engine session."""
        return ("engine", self.engine_id, self.session_id)

    def coalesced_with(self, older: HistoryEvent) -> HistoryEvent | None:
        """This event with the older one's first sighting; an end that waits in between is never overwritten."""
        if not isinstance(older, EngineSeen):
            return None
        return replace(self, first_seen_unix=min(self.first_seen_unix, older.first_seen_unix))


@dataclass(frozen=True, slots=True)
class EngineEnded(HistoryEvent):
    """An engine's session is over; an engine that the catalog has never seen is ignored."""

    engine_id: str
    session_id: str
    cause: str
    ended_unix: float

    @property
    def identity(self) -> Hashable:
        """One engine session."""
        return ("engine", self.engine_id, self.session_id)


class GroupShape(NamedTuple):
    """One object group of a namespace, in the order of the engine's cache groups.

    ``window_chunks`` is 0 where every chunk is needed and 1 where only the boundary is; ``object_bytes`` is the size
    of one shard's object.
    """

    name: str
    kind: GroupKindName
    shards: int
    replicas: int
    window_chunks: int
    object_bytes: int


@dataclass(frozen=True, slots=True)
class FingerprintSeen(HistoryEvent):
    """A namespace was registered. ``record`` is the fingerprint's record; it must not change afterwards."""

    namespace: str
    model: str
    record: Mapping[str, Any]
    groups: tuple[GroupShape, ...]
    seen_unix: float

    @property
    def identity(self) -> Hashable:
        """One namespace: the record behind it never changes, so the latest sighting says it all."""
        return ("fingerprint", self.namespace)

    def coalesced_with(self, older: HistoryEvent) -> HistoryEvent | None:
        """This event: the record of a namespace is the same every time."""
        return self if isinstance(older, FingerprintSeen) else None


class StoredObject(NamedTuple):
    """One committed object. ``checksum`` is an unsigned 64-bit integer, ``salt_digest`` is empty without a salt."""

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
    state: ObjectState = "committed"


@dataclass(frozen=True, slots=True)
class ObjectsStored(HistoryEvent):
    """Objects were committed (or changed: a row with the same key is replaced)."""

    objects: tuple[StoredObject, ...]

    @property
    def rows(self) -> int:
        """One per object."""
        return len(self.objects)


class UsedObject(NamedTuple):
    """The last use of one (chunk, group) over all its shards."""

    namespace: str
    chunk_key: bytes
    group_index: int
    last_used_unix: float


@dataclass(frozen=True, slots=True)
class ObjectsUsed(HistoryEvent):
    """Objects were read. The first to be dropped under load: it only refreshes a time."""

    sheddable: ClassVar[bool] = True

    objects: tuple[UsedObject, ...]

    @property
    def rows(self) -> int:
        """One per (chunk, group)."""
        return len(self.objects)


class RemovedObject(NamedTuple):
    """One (chunk, group) that left the cache; ``bytes`` is summed over its shards."""

    namespace: str
    chunk_key: bytes
    group_index: int
    bytes: int
    cause: str
    age_seconds: float
    idle_seconds: float
    removed_unix: float


@dataclass(frozen=True, slots=True)
class ObjectsRemoved(HistoryEvent):
    """Objects were evicted, cleared or quarantined away: one row in ``evictions`` each, and no row in ``objects``."""

    objects: tuple[RemovedObject, ...]

    @property
    def rows(self) -> int:
        """One per (chunk, group)."""
        return len(self.objects)


@dataclass(frozen=True, slots=True)
class ObjectsForgotten(HistoryEvent):
    """All object rows of a namespace (or of all, with ``None``) go at once, without rows in ``evictions``.

    Submitted after a clear, and at start before the arena's own tables are projected again.
    """

    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded(HistoryEvent):
    """One lease ended; ``bytes`` and ``chunks`` are what it held, ``age_seconds`` how long."""

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
class RestartRecorded(HistoryEvent):
    """The daemon started. Engine sessions that the catalog still calls live belong to an earlier boot and are ended.

    ``gates`` maps each gate in order to what it said; ``clean_stop`` says whether the run before had set the clean
    flag.
    """

    boot_id: str
    started_unix: float
    mode: RestartMode
    reason: str
    gates: Mapping[str, Any]
    clean_stop: bool

    @property
    def identity(self) -> Hashable:
        """One boot."""
        return ("restart", self.boot_id)

    def coalesced_with(self, older: HistoryEvent) -> HistoryEvent | None:
        """This event: it is the fuller account of the same boot."""
        return self if isinstance(older, RestartRecorded) else None


@dataclass(frozen=True, slots=True)
class AccessSeen(HistoryEvent):
    """API tokens and logins were used; only refreshes times, so it goes first under load."""

    sheddable: ClassVar[bool] = True

    token_ids: tuple[str, ...]
    login_ids: tuple[str, ...]
    seen_unix: float

    @property
    def rows(self) -> int:
        """One per token and login."""
        return len(self.token_ids) + len(self.login_ids)


@dataclass(frozen=True, slots=True)
class AuditNoted(HistoryEvent):
    """Something to be audited that changed nothing, such as a login that failed."""

    entry: AuditEntry


@dataclass(frozen=True, slots=True)
class SettingChanged:
    """A setting was changed at run time. ``scope`` is empty (everywhere) or a namespace.

    ``value`` is a plain JSON value; ``None`` takes the change back, so that the daemon's own default holds again.
    """

    name: str
    scope: str
    value: Any
    changed_unix: float
    changed_by: str
    audit: AuditEntry | None = None


@dataclass(frozen=True, slots=True)
class ClearRecorded:
    """A clear was carried out in memory. ``namespace`` is empty exactly when ``scope`` is ``all``."""

    epoch: int
    scope: ClearScope
    namespace: str
    requested_by: str
    cleared_unix: float
    removed_objects: int
    removed_bytes: int
    audit: AuditEntry | None = None


ControlRow = SettingChanged | ClearRecorded | AccountRow
"""What must be durable before it is acknowledged."""
