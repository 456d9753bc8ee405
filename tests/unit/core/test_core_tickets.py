"""What the bulk thread may touch, and that memory comes back exactly when it has let go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from appliance.errors import InvalidField, LeaseEnded, ReservationEnded, UnknownSession
from appliance.l1.extents import Run
from appliance.l1.segment import Segment
from appliance.protocol.arena_layout import SegmentLayout, word_of
from appliance.protocol.base import Grant
from appliance.protocol.liveness import INLINE_ATTACH_IDS
from appliance.reservations import Reservation, ReservationState
from appliance.server.bulk import BulkServer, bind_bulk
from appliance.tickets import ReadTicket, TicketTable, WriteTicket
from tests.support.bulk import BulkPeer
from tests.support.core_store import EXTENT, World, attention, chain

KEYS = chain(1, 2)
SESSION, OTHER = b"s" * 16, b"o" * 16
INLINE = INLINE_ATTACH_IDS + 5
BOOT = b"b" * 16


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def tickets(world: World) -> TicketTable:
    table = world.reservations.tickets
    table.open_session(SESSION)
    return table


def reserved(world: World, length: int = EXTENT, attach_id: int = INLINE) -> Reservation:
    index = world.namespace(1, attention(0))
    grant, reservation = world.reserve(index, KEYS, 0, 0, length=length, attach_id=attach_id, session=SESSION)
    assert grant is Grant.GRANTED
    assert reservation is not None
    return reservation


def states(world: World) -> tuple[int, int, int]:
    account = world.arena.account()
    return account.reserved // EXTENT, account.limbo // EXTENT, account.occupied // EXTENT


@pytest.mark.parametrize(
    "cause", [state for state in ReservationState if state not in ("writing", "committed")]
)
def test_an_idle_writer_leaves_no_limbo_however_its_reservation_ends(
    world: World, tickets: TicketTable, cause: ReservationState
) -> None:
    reservation = reserved(world)
    assert world.reservations.end(reservation.reservation_id, cause)
    assert states(world) == (0, 0, 0)
    with pytest.raises(ReservationEnded):
        tickets.begin_write(SESSION, reservation.reservation_id, 0, 1)


@pytest.mark.parametrize(
    "cause", [state for state in ReservationState if state not in ("writing", "committed")]
)
def test_a_write_under_way_keeps_the_memory_until_the_bulk_thread_has_let_go(
    world: World, tickets: TicketTable, cause: ReservationState
) -> None:
    reservation = reserved(world)
    ticket = tickets.begin_write(SESSION, reservation.reservation_id, 0, EXTENT)
    assert world.reservations.end(reservation.reservation_id, cause)
    assert states(world) == (0, 1, 0)
    # Nothing that the client says, or that is believed of it, may free what the daemon itself is writing.
    assert not world.reservations.stopped(INLINE, reservation.reservation_id)
    assert world.reservations.all_stopped(INLINE) == 0
    assert states(world) == (0, 1, 0)
    assert tickets.end_write(ticket, EXTENT), "the bulk thread must be told to let go"
    assert world.reservations.let_go(ticket.attach_id, ticket.reservation_id)
    assert states(world) == (0, 0, 0)
    assert not world.reservations.limbo_bytes["e"]
    assert not world.reservations.let_go(ticket.attach_id, ticket.reservation_id)


def test_a_commit_needs_every_byte_and_no_write_under_way(world: World, tickets: TicketTable) -> None:
    for arrived, busy in ((0, False), (EXTENT - 1, False), (EXTENT, True)):
        reservation = reserved(world)
        ticket = tickets.begin_write(SESSION, reservation.reservation_id, 0, max(1, arrived))
        tickets.end_write(ticket, arrived)
        if busy:
            tickets.begin_write(SESSION, reservation.reservation_id, 0, 1)
        assert world.reservations.commit(SESSION, reservation.reservation_id, 1) is None
        assert states(world) == (0, int(busy), 0)
        if busy:
            assert tickets.end_write(ticket, EXTENT)
            assert world.reservations.let_go(ticket.attach_id, ticket.reservation_id)
    reservation = reserved(world)
    tickets.end_write(tickets.begin_write(SESSION, reservation.reservation_id, 0, EXTENT), EXTENT)
    assert world.reservations.commit(SESSION, reservation.reservation_id, 1) is reservation
    assert states(world) == (0, 0, 1)
    with pytest.raises(ReservationEnded):
        tickets.begin_write(SESSION, reservation.reservation_id, 0, 1)


def test_only_the_sessions_own_reservation_within_its_bounds_and_without_a_gap(
    world: World, tickets: TicketTable
) -> None:
    reservation = reserved(world, length=EXTENT + 10)
    number = reservation.reservation_id
    with pytest.raises(UnknownSession):
        tickets.begin_write(OTHER, number, 0, 1)
    tickets.open_session(OTHER)
    for session, wrong in ((OTHER, number), (SESSION, number + 1)):
        with pytest.raises(ReservationEnded):
            tickets.begin_write(session, wrong, 0, 1)
    for offset, length in ((1, 1), (0, EXTENT + 11), (2**40, 1)):
        with pytest.raises(InvalidField):
            tickets.begin_write(SESSION, number, offset, length)
    assert not tickets.end_write(tickets.begin_write(SESSION, number, 0, EXTENT), EXTENT)
    again = tickets.begin_write(SESSION, number, 100, 10)  # sent twice: harmless
    assert not tickets.end_write(again, 110)
    assert again.arrived == EXTENT
    assert not tickets.end_write(tickets.begin_write(SESSION, number, EXTENT, 10), EXTENT + 10)
    assert tickets.finish_write(number)


def test_a_write_of_a_process_with_a_lock_has_no_ticket(world: World, tickets: TicketTable) -> None:
    reservation = reserved(world, attach_id=7)
    with pytest.raises(ReservationEnded):
        tickets.begin_write(SESSION, reservation.reservation_id, 0, 1)
    assert world.reservations.end(reservation.reservation_id, ReservationState.EXPIRED)
    assert states(world) == (0, 1, 0)
    assert world.reservations.stopped(7, reservation.reservation_id)
    assert states(world) == (0, 0, 0)


def test_reads_end_with_the_lease_the_session_and_the_load(world: World, tickets: TicketTable) -> None:
    ticket = ReadTicket(world.arena.spaces[0].segment, ((3, 1),), EXTENT, word=9)

    def readable(lease: int, session: bytes = SESSION) -> bool:
        try:
            return tickets.read(session, lease, 0, 1) is ticket
        except LeaseEnded:
            return False

    tickets.open_session(OTHER)
    for lease in (1, 2, 3):
        tickets.grant_reads(SESSION, lease, {(0, 1): ticket})
    tickets.grant_reads(OTHER, 1, {(0, 1): ticket})
    assert readable(1)
    assert not readable(2, OTHER)
    tickets.withdraw_reads(SESSION, 1)
    assert not readable(1)
    assert readable(1, OTHER)
    tickets.lease_ended(2)
    assert not readable(2)
    assert readable(3)
    tickets.close_session(SESSION)
    with pytest.raises(UnknownSession):
        tickets.read(SESSION, 3, 0, 1)
    assert not tickets._reads.keys() - {1}, "tickets of ended leases would pile up"


# --- the bytes of an object ------------------------------------------------------------------------------------------


def test_a_stream_is_written_and_read_across_its_runs(world: World) -> None:
    segment = world.arena.spaces[0].segment
    runs: tuple[Run, ...] = ((5, 1), (2, 2), (40, 1))
    stream = bytes(range(256)) * (4 * EXTENT // 256)
    for offset in range(0, len(stream), 1000):
        segment.write_data(runs, offset, memoryview(stream[offset : offset + 1000]))
    for offset, length in ((0, len(stream)), (EXTENT - 1, 2), (EXTENT, EXTENT), (3 * EXTENT - 5, EXTENT)):
        assert segment.read_data(runs, offset, length) == stream[offset : offset + length]
    assert segment.read_bytes(5, EXTENT) == stream[:EXTENT]
    assert segment.read_bytes(40, EXTENT) == stream[3 * EXTENT :]
    with pytest.raises(AssertionError):
        segment.write_data(runs, 4 * EXTENT - 1, memoryview(b"xy"))


class HaltingSegment(Segment):
    """A segment whose writes wait until they may go on, as one on a struggling host would."""

    def __init__(self, directory: Path) -> None:
        made = Segment.create(directory, 0, b"n" * 16, SegmentLayout(16, EXTENT), BOOT)
        super().__init__(made.path, made._fd, 0, made.nonce, made.shape)
        self.populate(0, 16)
        self.writing = threading.Event()
        self.go_on = threading.Event()

    def write_data(self, runs: object, offset: int, data: memoryview) -> None:
        self.writing.set()
        assert self.go_on.wait(20)
        super().write_data(runs, offset, data)  # type: ignore[arg-type]


@contextmanager
def served(
    tickets: TicketTable, let_go: Callable[[WriteTicket], None]
) -> Iterator[tuple[BulkServer, BulkPeer]]:
    """A bulk thread on a real socket, and a peer of it in the session."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = bind_bulk(context, "tcp://127.0.0.1:*")
    endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    port = int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])
    server = BulkServer(router, port, BOOT, tickets, let_go)
    server.start()
    peer = BulkPeer(port, BOOT, SESSION)
    try:
        yield server, peer
    finally:
        peer.close()
        assert server.stop(10)
        context.term()


def test_the_bulk_thread_says_when_a_withdrawn_write_has_ended(tmp_path: Path) -> None:
    segment = HaltingSegment(tmp_path)
    tickets = TicketTable()
    tickets.open_session(SESSION)
    tickets.grant_write(WriteTicket(SESSION, INLINE, 77, segment, ((4, 1),), 100))
    let_go: list[int] = []
    with served(tickets, lambda ticket: let_go.append(ticket.reservation_id)) as (server, peer):
        peer.send("put", {"reservation": 77, "offset": 0}, b"x" * 100)
        assert segment.writing.wait(20)
        assert not tickets.withdraw_write(77), "a write is under way"
        assert let_go == []
        segment.go_on.set()
        reply, _ = peer.receive()
        assert reply.error is None
        assert let_go == [77]
        reply, _ = peer.ask("put", {"reservation": 77, "offset": 0}, b"y" * 100)
        assert isinstance(reply.error, ReservationEnded)
        assert segment.read_bytes(4, 100) == b"x" * 100, "nothing is written after the withdrawal"
        assert (server.status().frames_in, server.status().refusals) == (1, 1)
    segment.close()


def test_a_write_that_fails_is_answered_and_let_go(tmp_path: Path) -> None:
    segment = HaltingSegment(tmp_path)
    segment.go_on.set()
    segment.close()  # every write fails from here on
    tickets = TicketTable()
    tickets.open_session(SESSION)
    tickets.grant_write(WriteTicket(SESSION, INLINE, 77, segment, ((4, 1),), 100))
    with served(tickets, lambda _: None) as (server, peer):
        reply, _ = peer.ask("put", {"reservation": 77, "offset": 0}, b"x" * 100)
        assert reply.error is not None
        assert reply.error.code == "internal"
        assert server.pulse.errors == 1, "shown in health"
        assert not tickets.finish_write(77), "what was not written must not be committed"
        assert tickets.withdraw_write(77), "nothing is under way"


class ReusedSegment(HaltingSegment):
    """A segment whose extents are freed between a reader's bytes and its look at the commit word."""

    def read_data(self, runs: object, offset: int, length: int) -> bytearray:
        data = super().read_data(runs, offset, length)  # type: ignore[arg-type]
        self.write_freed(4, 10, was_writing=False)
        return data


def test_bytes_of_memory_that_was_freed_while_it_was_read_are_not_passed_on(tmp_path: Path) -> None:
    word = word_of(9, committed=True)
    get = {"lease": 3, "group": 0, "chunk": 1, "word": word, "offset": 0, "length": 100}
    for number, (kind, expected) in enumerate(((HaltingSegment, None), (ReusedSegment, LeaseEnded))):
        directory = tmp_path / str(number)
        directory.mkdir()
        segment = kind(directory)
        segment._write(word.to_bytes(8, "little"), segment.shape.record_offset(4))
        tickets = TicketTable()
        tickets.open_session(SESSION)
        tickets.grant_reads(SESSION, 3, {(0, 1): ReadTicket(segment, ((4, 1),), 100, word)})
        with served(tickets, lambda _: None) as (_, peer):
            reply, data = peer.ask("get", get)
            assert type(reply.error) is (expected or type(None))
            assert len(data) == (0 if expected else 100)
        segment.close()
