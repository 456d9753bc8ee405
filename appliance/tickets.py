"""Tickets: what the bulk thread may write and read in the arena right now, granted and withdrawn by the loop.

The one thing that the loop and the bulk thread share. The lock is held for a few dictionary operations and never while
bytes move, so the loop waits for no disk, no peer and no copy. A write that is under way when its ticket is withdrawn
makes the withdrawal answer *not yet*: the memory goes to limbo, and the bulk thread says when it has let go.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from appliance.errors import InvalidField, LeaseEnded, ReservationEnded, UnknownSession
from appliance.l1.extents import Run
from appliance.l1.segment import Segment


@dataclass(slots=True)
class WriteTicket:
    """The stream of one reservation: ``arrived`` of its ``length`` bytes are in place without a gap."""

    session: bytes
    attach_id: int
    reservation_id: int
    segment: Segment
    runs: tuple[Run, ...]
    length: int
    arrived: int = 0
    busy: bool = False
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class ReadTicket:
    """One located object. It is that object as long as the word of its head record is ``word``."""

    segment: Segment
    runs: tuple[Run, ...]
    length: int
    word: int

    @property
    def head(self) -> int:
        """The extent whose record has the commit word."""
        return self.runs[0][0]


Reads = Mapping[tuple[int, int], ReadTicket]
"""Read tickets of one session under one lease, by group and chunk."""


class TicketTable:
    """All tickets of all inline sessions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: set[bytes] = set()
        self._writes: dict[int, WriteTicket] = {}
        self._reads: dict[int, dict[bytes, Reads]] = {}

    # --- the loop --------------------------------------------------------------------------------------------------

    def open_session(self, session: bytes) -> None:
        """A session has attached as inline."""
        with self._lock:
            self._sessions.add(session)

    def close_session(self, session: bytes) -> None:
        """It may read nothing any more; its writes end with their reservations."""
        with self._lock:
            self._sessions.discard(session)
            for lease in [lease for lease, readers in self._reads.items() if session in readers]:
                self._forget_reads(lease, session)

    @property
    def session_count(self) -> int:
        """Inline sessions."""
        return len(self._sessions)

    def grant_write(self, ticket: WriteTicket) -> None:
        """The session may write the stream of a reservation."""
        with self._lock:
            self._writes[ticket.reservation_id] = ticket

    def withdraw_write(self, reservation_id: int) -> bool:
        """Nothing more is written for a reservation.

        ``False`` if a write is under way: the bulk thread gets ``True`` from :meth:`end_write` and has to tell.
        """
        with self._lock:
            ticket = self._writes.pop(reservation_id, None)
            if ticket is None:
                return True
            ticket.withdrawn = True
            return not ticket.busy

    def finish_write(self, reservation_id: int) -> bool:
        """The writer commits: whether all bytes are there and none is being written. If so, the ticket is gone."""
        with self._lock:
            ticket = self._writes.get(reservation_id)
            if ticket is None or ticket.busy or ticket.arrived < ticket.length:
                return False
            del self._writes[reservation_id]
            return True

    def grant_reads(self, session: bytes, lease: int, tickets: Reads) -> None:
        """The session may read these objects under a lease."""
        with self._lock:
            self._reads.setdefault(lease, {})[session] = tickets

    def withdraw_reads(self, session: bytes, lease: int) -> None:
        """The session has done with a lease."""
        with self._lock:
            self._forget_reads(lease, session)

    def lease_ended(self, lease: int) -> None:
        """Nobody reads under a lease any more."""
        with self._lock:
            self._reads.pop(lease, None)

    def _forget_reads(self, lease: int, session: bytes) -> None:
        readers = self._reads.get(lease, {})
        readers.pop(session, None)
        if not readers:
            self._reads.pop(lease, None)

    # --- the bulk thread ---------------------------------------------------------------------------------------------

    def begin_write(self, session: bytes, reservation_id: int, offset: int, length: int) -> WriteTicket:
        """A write of so many bytes begins; it ends with :meth:`end_write`.

        Raises:
            UnknownSession, ReservationEnded: there is no such ticket. InvalidField: it would leave a gap, or pass the end.
        """
        with self._lock:
            self._check_session(session)
            ticket = self._writes.get(reservation_id)
            if ticket is None or ticket.session != session:
                raise ReservationEnded(f"Reservation {reservation_id} has ended, or is another session's.")
            if offset > ticket.arrived:
                raise InvalidField(
                    f"The field 'offset' is {offset}, but only {ticket.arrived} bytes of the stream have arrived.",
                    field="offset",
                )
            if offset + length > ticket.length:
                raise InvalidField(
                    f"The field 'offset' is {offset} with {length} bytes, but the stream has {ticket.length}.",
                    field="offset",
                )
            assert not ticket.busy, "two writes into one reservation: the withdrawal would wait for one only"
            ticket.busy = True
            return ticket

    def end_write(self, ticket: WriteTicket, end: int) -> bool:
        """The write is over and its bytes up to ``end`` are in place; whether the ticket was withdrawn meanwhile."""
        with self._lock:
            ticket.busy = False
            ticket.arrived = max(ticket.arrived, end)
            return ticket.withdrawn

    def read(self, session: bytes, lease: int, group: int, chunk: int) -> ReadTicket:
        """The ticket of a located object.

        Raises:
            UnknownSession: it ended. LeaseEnded: the lease did, or the object was not located under it by this session.
        """
        with self._lock:
            self._check_session(session)
            found = self._reads.get(lease, {}).get(session, {}).get((group, chunk))
        if found is None:
            raise LeaseEnded(
                f"Lease {lease} has ended, or chunk {chunk} of group {group} was not located under it.",
                lease=lease,
                chunks=[chunk],
            )
        return found

    def _check_session(self, session: bytes) -> None:
        if session not in self._sessions:
            raise UnknownSession("The daemon holds no such inline session.", remedy="Say hello again.")
