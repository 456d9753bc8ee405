"""Write reservations: memory that one worker may write until it commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Removal
from appliance.l1.store import Reserved, Store, Wanted
from appliance.protocol.base import Grant
from appliance.protocol.liveness import is_inline
from appliance.tickets import TicketTable, WriteTicket


class ReservationState(StrEnum):
    """The life of a reservation; all but WRITING are ends.

    ::

        WRITING ──► COMMITTED                               the object can be found
           │
           ├──────► ABORTED | UNDELIVERED                   the writer says it has stopped: memory is free
           │
           └──────► EXPIRED | CLEARED | SESSION_ENDED       key free at once, memory in limbo until the writer
                                                            acknowledges or is proven dead
    """

    WRITING = "writing"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNDELIVERED = "undelivered"
    EXPIRED = "expired"
    CLEARED = "cleared"
    SESSION_ENDED = "session_ended"


WRITER_STOPPED = frozenset({ReservationState.ABORTED, ReservationState.UNDELIVERED})
_REMOVALS = {
    ReservationState.EXPIRED: Removal.WRITE_EXPIRED,
    ReservationState.SESSION_ENDED: Removal.WRITE_EXPIRED,
    ReservationState.CLEARED: Removal.CLEARED,
    ReservationState.ABORTED: Removal.NONE,
    ReservationState.UNDELIVERED: Removal.NONE,
}


@dataclass(slots=True)
class Reservation:
    """One reservation; ``deadline`` is on the lease clock."""

    reservation_id: int
    session: bytes
    engine_id: str
    attach_id: int
    reserved: Reserved
    deadline: float
    state: ReservationState = ReservationState.WRITING


@dataclass(slots=True)
class ReservationTable:
    """All live reservations, and those in limbo whose writer has yet to say that it stopped.

    Reserved and limbo bytes of one engine never exceed ``engine_limit_bytes``. An inline client writes through the bulk
    thread, which gets a ticket with each reservation: when that has let go, its memory is free whatever the client does.
    """

    store: Store
    clock: Callable[[], float]
    first_id: int
    engine_limit_bytes: int
    live: dict[int, Reservation] = field(default_factory=dict)
    by_session: dict[bytes, set[int]] = field(default_factory=dict)
    revoked: dict[int, dict[int, Reservation]] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    reserved_bytes: Counter[str] = field(default_factory=Counter)
    limbo_bytes: Counter[str] = field(default_factory=Counter)
    tickets: TicketTable = field(default_factory=TicketTable)
    _next: int = 0

    def reserve(
        self, session: bytes, engine_id: str, index: NamespaceIndex, wanted: Wanted, ttl_seconds: float
    ) -> tuple[Grant, Reservation | None]:
        """Memory for one object, or why there is none."""
        size = self.store.arena.extents_of(wanted.length) * self.store.arena.extent_bytes
        if self.reserved_bytes[engine_id] + self.limbo_bytes[engine_id] + size > self.engine_limit_bytes:
            return Grant.OVER_LIMIT, None
        grant, reserved = self.store.reserve(index, wanted)
        if reserved is None:
            return grant, None
        reservation = Reservation(
            reservation_id=self.first_id + self._next,
            session=session,
            engine_id=engine_id,
            attach_id=wanted.attach_id,
            reserved=reserved,
            deadline=self.clock() + ttl_seconds,
        )
        self._next += 1
        self.live[reservation.reservation_id] = reservation
        self.by_session.setdefault(session, set()).add(reservation.reservation_id)
        self.reserved_bytes[engine_id] += self._size(reservation)
        if is_inline(wanted.attach_id):
            self.tickets.grant_write(self._ticket(reservation))
        return grant, reservation

    def commit(self, session: bytes, reservation_id: int, checksum: int) -> Reservation | None:
        """Make a reservation an object; ``None`` if it has ended (the sender has stopped writing, so limbo ends).

        An inline one whose bytes have not all arrived ends here.
        """
        reservation = self.live.get(reservation_id)
        if reservation is None or reservation.session != session:
            return None
        if is_inline(reservation.attach_id) and not self.tickets.finish_write(reservation_id):
            self.end(reservation_id, ReservationState.ABORTED)
            return None
        self._forget(reservation, ReservationState.COMMITTED)
        self.store.commit(reservation.reserved, checksum)
        return reservation

    def end(self, reservation_id: int, cause: ReservationState) -> bool:
        """End a reservation without an object; ``False`` if it had ended already."""
        reservation = self.live.get(reservation_id)
        if reservation is None:
            return False
        if is_inline(reservation.attach_id):
            stopped = self.tickets.withdraw_write(reservation_id)
        else:
            stopped = cause in WRITER_STOPPED
        self._forget(reservation, cause)
        self.store.end_reservation(reservation.reserved, _REMOVALS[cause], writer_stopped=stopped)
        if not stopped:
            self.revoked.setdefault(reservation.attach_id, {})[reservation_id] = reservation
            self.limbo_bytes[reservation.engine_id] += self._size(reservation)
        return True

    def owned_by(self, session: bytes, reservation_id: int) -> bool:
        """Whether the live reservation is this session's."""
        return reservation_id in self.by_session.get(session, ())

    def revocations(self, attach_id: int) -> list[int]:
        """Reservations of a writer that ended under it and that it has not acknowledged."""
        return sorted(self.revoked.get(attach_id, ()))

    def stopped(self, attach_id: int, reservation_id: int) -> bool:
        """The writer says that its copies for this reservation have stopped: its memory leaves limbo.

        Of an inline client's only the bulk thread can say that.
        """
        return not is_inline(attach_id) and self.let_go(attach_id, reservation_id)

    def let_go(self, attach_id: int, reservation_id: int) -> bool:
        """Nothing writes into this reservation any more: its memory leaves limbo."""
        pending = self.revoked.get(attach_id, {})
        reservation = pending.pop(reservation_id, None)
        if reservation is None:
            return False
        if not pending:
            self.revoked.pop(attach_id, None)
        self.limbo_bytes[reservation.engine_id] -= self._size(reservation)
        self.store.arena.leave_limbo(reservation.reserved.placement.address, attach_id)
        return True

    def all_stopped(self, attach_id: int) -> int:
        """Nothing of this writer is in flight (it says so, or is proven dead): all its limbo is free.

        Returns the extents that were in limbo. An inline client's are the bulk thread's to free.
        """
        if is_inline(attach_id):
            return 0
        revoked = self.revoked.get(attach_id, {})
        extents = sum(each.reserved.extents for each in revoked.values())
        for reservation_id in list(revoked):
            self.stopped(attach_id, reservation_id)
        return extents + self.store.arena.leave_limbo_of(attach_id)

    def end_session(self, session: bytes, cause: ReservationState = ReservationState.SESSION_ENDED) -> int:
        """End all reservations of a session."""
        return sum(self.end(each, cause) for each in list(self.by_session.get(session, ())))

    def end_namespace(self, index: NamespaceIndex | None, cause: ReservationState) -> int:
        """End all reservations in a namespace, or everywhere."""
        ids = [r.reservation_id for r in self.live.values() if index is None or r.reserved.index is index]
        return sum(self.end(each, cause) for each in ids)

    def expire(self) -> int:
        """End reservations whose TTL has passed."""
        now = self.clock()
        due = [r.reservation_id for r in self.live.values() if r.deadline <= now]
        return sum(self.end(each, ReservationState.EXPIRED) for each in due)

    def _forget(self, reservation: Reservation, state: ReservationState) -> None:
        assert reservation.state is ReservationState.WRITING, (
            "a reservation ended twice: its memory would be freed twice"
        )
        reservation.state = state
        del self.live[reservation.reservation_id]
        mine = self.by_session[reservation.session]
        mine.discard(reservation.reservation_id)
        if not mine:
            del self.by_session[reservation.session]
        self.reserved_bytes[reservation.engine_id] -= self._size(reservation)
        self.ended[state.value] += 1

    def _ticket(self, reservation: Reservation) -> WriteTicket:
        placement = reservation.reserved.placement
        return WriteTicket(
            session=reservation.session,
            attach_id=reservation.attach_id,
            reservation_id=reservation.reservation_id,
            segment=self.store.arena.spaces[placement.segment].segment,
            runs=placement.runs,
            length=reservation.reserved.record.length,
        )

    def _size(self, reservation: Reservation) -> int:
        return reservation.reserved.extents * self.store.arena.extent_bytes
