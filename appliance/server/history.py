"""What happened, on its way to the catalog: collected during one turn of the loop, handed over at its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.catalog.events import (
    EngineEnded,
    EngineSeen,
    FingerprintSeen,
    GroupShape,
    HistoryEvent,
    LeaseEnded,
    ObjectsForgotten,
    ObjectsRemoved,
    ObjectsStored,
    RemovedObject,
    StoredObject,
)
from appliance.engines import Engine
from appliance.fingerprint import Fingerprint
from appliance.geometry import ObjectGroup
from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Removal
from appliance.l1.segment import HeadRecord
from appliance.l1.store import Reserved
from appliance.leases import LeaseEnding
from appliance.sessions import Session


@dataclass(slots=True)
class History:
    """Observes the store and the leases. ``submit`` never blocks; what it refuses is counted by the catalog."""

    submit: Callable[[HistoryEvent], bool]
    extent_bytes: int
    clock: Callable[[], float]
    evicted_entries: Counter[str] = field(default_factory=Counter)
    evicted_bytes: Counter[str] = field(default_factory=Counter)
    _stored: list[StoredObject] = field(default_factory=list)
    _removed: list[RemovedObject] = field(default_factory=list)

    def stored(self, reserved: Reserved, record: HeadRecord) -> None:
        """See :class:`StoreObserver`."""
        now = time.time()
        self._stored.append(
            StoredObject(
                namespace=reserved.index.namespace.hex(),
                chunk_key=record.key,
                group_index=record.group,
                shard=record.shard,
                bytes=record.length,
                checksum=record.checksum,
                chunk_index=record.chunk_index,
                salt_digest=record.salt.hex() if any(record.salt) else "",
                stored_unix=now,
                last_used_unix=now,
            )
        )

    def removed(self, index: NamespaceIndex, row: int, group: int, cause: Removal, extents: int) -> None:
        """See :class:`StoreObserver`."""
        entry = index.entry(row, group)
        size = extents * self.extent_bytes
        name = cause.name.lower()
        self.evicted_entries[name] += 1
        self.evicted_bytes[name] += size
        if cause is Removal.CLEARED:
            return  # a clear is one row, and forgets all object rows at once
        now = self.clock()
        self._removed.append(
            RemovedObject(
                namespace=index.namespace.hex(),
                chunk_key=index.key_of(row),
                group_index=group,
                bytes=size,
                cause=name,
                age_seconds=max(0.0, now - index.stored_at.view[entry]),
                idle_seconds=max(0.0, now - index.used_at.view[entry]),
                removed_unix=time.time(),
            )
        )

    def flush(self) -> None:
        """Hand over what this turn of the loop collected, removals last: a removed object was stored before."""
        if self._stored:
            self.submit(ObjectsStored(tuple(self._stored)))
            self._stored.clear()
        if self._removed:
            self.submit(ObjectsRemoved(tuple(self._removed)))
            self._removed.clear()

    def forget_objects(self, namespace: str | None) -> None:
        """Nothing of a namespace (or of any) is in the cache now."""
        self.flush()
        self.submit(ObjectsForgotten(namespace))

    def lease_ended(self, ending: LeaseEnding) -> None:
        """A lease ended."""
        lease = ending.lease
        self.submit(
            LeaseEnded(
                lease_id=str(lease.lease_id),
                engine_id=lease.engine_id,
                session_id=lease.session.hex(),
                namespace=lease.index.namespace.hex(),
                request_id=lease.request,
                cause=ending.cause.value,
                chunks=lease.hit_chunks,
                bytes=lease.bytes_held,
                age_seconds=ending.age_seconds,
                renewals=lease.renewals,
                ended_unix=time.time(),
            )
        )

    def fingerprint_seen(
        self, fingerprint: Fingerprint, groups: list[ObjectGroup], chunk_tokens: int
    ) -> None:
        """A namespace was settled."""
        shapes = tuple(
            GroupShape(
                name=group.name,
                kind=group.kind.value,
                shards=group.shards,
                replicas=group.replicas,
                window_chunks=group.window_chunks(chunk_tokens),
                object_bytes=int(fingerprint.record["groups"][group.index]["page_bytes"]),
            )
            for group in groups
        )
        self.submit(
            FingerprintSeen(fingerprint.namespace, fingerprint.model, fingerprint.record, shapes, time.time())
        )

    def engine_seen(self, engine: Engine, session: Session) -> None:
        """An engine is settled or still there."""
        if engine.fingerprint is None or engine.registration is None:
            return
        record = engine.fingerprint.record
        self.submit(
            EngineSeen(
                engine_id=engine.engine_id,
                session_id=session.session_id.hex(),
                model=engine.fingerprint.model,
                namespace=engine.fingerprint.namespace,
                host=session.host,
                pid=session.pid,
                engine_version=str(record["engine"]["version"]),
                ranks=engine.registration.world_size,
                chunk_tokens=int(record["chunk_tokens"]),
                block_tokens=engine.registration.groups[0].block_tokens,
                first_seen_unix=engine.first_seen_unix,
                last_seen_unix=time.time(),
            )
        )

    def engine_ended(self, session: Session, cause: str) -> None:
        """The scheduler's session of an engine ended."""
        self.submit(EngineEnded(session.engine_id, session.session_id.hex(), cause, time.time()))
