"""Read leases: a hold on exactly the objects of one lookup."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from appliance.l1.index import NamespaceIndex
from appliance.l1.store import Store

UNNAMED_HEARTBEATS = 3
"""Heartbeats of its session that may pass without naming a lease before it counts as forgotten by its owner."""

RECENT_ENDS = 256


class LeaseState(StrEnum):
    """The life of a lease.

    ::

        GRANTED ──named──► HELD ──┐
           │                │  ▲  │ named again
           │ not named      │  └──┘
           ▼                ▼
        ORPHANED         RELEASED | EXPIRED | ORPHANED | SESSION_ENDED | UNDELIVERED
    """

    GRANTED = "granted"
    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"
    ORPHANED = "orphaned"
    SESSION_ENDED = "session_ended"
    UNDELIVERED = "undelivered"


_LIVE = frozenset({LeaseState.GRANTED, LeaseState.HELD})
_ENDED = frozenset(LeaseState) - _LIVE
TRANSITIONS: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.GRANTED: _ENDED | {LeaseState.HELD},
    LeaseState.HELD: _ENDED - {LeaseState.UNDELIVERED} | {LeaseState.HELD},
    **dict.fromkeys(_ENDED, frozenset()),
}


@dataclass(slots=True)
class Lease:
    """One lease. ``entries`` are distinct (chunk, group) entries of ``index``; times are of the lease clock."""

    lease_id: int
    session: bytes
    engine_id: str
    request: str
    index: NamespaceIndex
    hit_chunks: int
    entries: NDArray[np.int64]
    bytes_held: int
    granted_at: float
    deadline: float
    state: LeaseState = LeaseState.GRANTED
    renewals: int = 0
    unnamed: int = 0


@dataclass(frozen=True, slots=True)
class LeaseEnding:
    """How a lease ended; ``age_seconds`` is how long it was held."""

    lease: Lease
    cause: LeaseState
    age_seconds: float
    ended_at: float


@dataclass(slots=True)
class LeaseTable:
    """All live leases, and every way one ends. ``on_end`` is told of each ending, once."""

    store: Store
    clock: Callable[[], float]
    on_end: Callable[[LeaseEnding], None]
    first_id: int
    live: dict[int, Lease] = field(default_factory=dict)
    by_session: dict[bytes, set[int]] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    recent: deque[LeaseEnding] = field(default_factory=lambda: deque(maxlen=RECENT_ENDS))
    _next: int = 0

    def grant(
        self,
        session: bytes,
        engine_id: str,
        request: str,
        index: NamespaceIndex,
        hit_chunks: int,
        entries: NDArray[np.int64],
        ttl_seconds: float,
    ) -> Lease:
        """Hold ``entries`` for a session."""
        self.store.hold(index, entries)
        now = self.clock()
        lease_id = self.first_id + self._next
        self._next += 1
        extents = int(index.extents.array[entries].sum())
        lease = Lease(
            lease_id=lease_id,
            session=session,
            engine_id=engine_id,
            request=request,
            index=index,
            hit_chunks=hit_chunks,
            entries=entries,
            bytes_held=extents * self.store.arena.extent_bytes,
            granted_at=now,
            deadline=now + ttl_seconds,
        )
        self.live[lease_id] = lease
        self.by_session.setdefault(session, set()).add(lease_id)
        return lease

    def heard(
        self, session: bytes, named: Iterable[int], ttl_of: Callable[[NamespaceIndex], float]
    ) -> list[int]:
        """A heartbeat named these leases: they are renewed, the session's others counted as unnamed.

        Returns the named ones that are not held by this session any more.
        """
        mine = self.by_session.get(session, set())
        gone = []
        named_set = set(named)
        now = self.clock()
        for lease_id in named_set:
            if lease_id not in mine:
                gone.append(lease_id)
                continue
            lease = self.live[lease_id]
            lease.state = self._checked(lease, LeaseState.HELD)
            lease.unnamed = 0
            lease.renewals += 1
            lease.deadline = now + ttl_of(lease.index)
        for lease_id in [unnamed for unnamed in mine if unnamed not in named_set]:
            lease = self.live[lease_id]
            lease.unnamed += 1
            if lease.unnamed >= UNNAMED_HEARTBEATS:
                self.end(lease_id, LeaseState.ORPHANED)
        return sorted(gone)

    def end(self, lease_id: int, cause: LeaseState) -> bool:
        """End a lease; ``False`` if it had ended already, which harms nobody."""
        lease = self.live.pop(lease_id, None)
        if lease is None:
            return False
        lease.state = self._checked(lease, cause)
        mine = self.by_session[lease.session]
        mine.discard(lease_id)
        if not mine:
            del self.by_session[lease.session]
        self.store.unhold(lease.index, lease.entries)
        ending = LeaseEnding(lease, cause, self.clock() - lease.granted_at, self.clock())
        self.ended[cause.value] += 1
        self.recent.append(ending)
        self.on_end(ending)
        return True

    def end_session(self, session: bytes) -> int:
        """End all leases of a session."""
        return sum(
            self.end(lease_id, LeaseState.SESSION_ENDED)
            for lease_id in list(self.by_session.get(session, ()))
        )

    def expire(self) -> int:
        """End leases whose TTL has passed."""
        now = self.clock()
        due = [lease.lease_id for lease in self.live.values() if lease.deadline <= now]
        return sum(self.end(lease_id, LeaseState.EXPIRED) for lease_id in due)

    @staticmethod
    def _checked(lease: Lease, to: LeaseState) -> LeaseState:
        assert to in TRANSITIONS[lease.state], (
            f"lease {lease.lease_id} went from {lease.state} to {to}: a hold would leak"
        )
        return to
