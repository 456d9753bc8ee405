"""Pieces of the arena: registered when they have memory, used only while registered, mapped until unregistered."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.client.device.pinning import TRANSITIONS, PieceState, PinnedArena
from kernels import Spans
from tests.support.device import DEVICE_OFFSET, PIECE, HostRuntime, MemorySegment, bytes_of, registered
from tests.support.waiting import eventually


@pytest.fixture
def runtime():
    return HostRuntime()


@pytest.fixture
def arena(runtime):
    made = PinnedArena(runtime, piece_bytes=PIECE, settle_seconds=0.01)
    yield made
    runtime.refuse_unregistration = ""
    assert made.close(10.0)


def test_every_state_has_its_transitions_and_all_lead_to_released():
    assert set(TRANSITIONS) == set(PieceState)
    for state in PieceState:
        seen, waiting = set(), {state}
        while waiting:
            each = waiting.pop()
            seen.add(each)
            waiting |= TRANSITIONS[each] - seen
        assert PieceState.RELEASED in seen


def test_pieces_are_registered_in_order_as_memory_comes(arena, runtime):
    segment = MemorySegment(5, populated=2 * PIECE + 100)
    arena.adopt(segment)
    registered(arena, 2)
    assert sorted(runtime.registered) == [segment.data_address, segment.data_address + PIECE]
    segment.populated = 4 * PIECE
    registered(arena, 4)
    segment.populated = 5 * PIECE
    registered(arena, 5)
    addresses = [entry[1] for entry in runtime.log if entry[0] == "register"]
    assert addresses == sorted(addresses)


def test_memory_that_may_still_be_taken_back_is_not_pinned(arena, runtime):
    segment = MemorySegment(4, populated=PIECE)
    readings = iter([PIECE, 3 * PIECE, PIECE, PIECE, PIECE])
    last = [PIECE]

    def populated_bytes():
        last[0] = next(readings, last[0])
        return last[0]

    segment.populated_bytes = populated_bytes
    arena.adopt(segment)
    eventually(lambda: next(readings, None) is None, "all readings were taken")
    registered(arena, 1)


def test_the_last_piece_may_be_short(arena, runtime):
    segment = MemorySegment(3)
    segment.data_bytes = segment.populated = 2 * PIECE + 512
    arena.adopt(segment)
    eventually(lambda: arena.registered_bytes == 2 * PIECE + 512, "all three")
    assert runtime.registered[segment.data_address + 2 * PIECE] == 512


def test_a_refused_registration_is_tried_again_and_bounces_until_then(arena, runtime, monkeypatch):
    monkeypatch.setattr("connector.client.device.pinning.FIRST_RETRY_SECONDS", 0.01)
    arena._retry_seconds = 0.01
    runtime.refuse_registration = "no pinned memory left"
    segment = MemorySegment(2)
    arena.adopt(segment)
    eventually(lambda: sum(entry[0] == "register" for entry in runtime.log) >= 2, "two tries")
    with arena.use(segment.span(0, 100)) as routed:
        assert not routed.direct.any()
    runtime.refuse_registration = ""
    registered(arena, 2)


def test_what_a_copy_uses_stays_registered_until_it_has_ended(arena, runtime):
    segment = MemorySegment(3)
    arena.adopt(segment)
    registered(arena, 3)
    with arena.use(segment.span(PIECE + 5, 10)) as routed:
        assert routed.direct.all()
        arena.retire(segment)
        # The thread has nothing to do but this, so it has had its chance when a later use is refused.
        with arena.use(segment.span(0, 10)) as later:
            assert not later.direct.any(), "a new copy would keep a retired segment for ever"
        threading.Event().wait(0.05)
        assert len(runtime.registered) == 3, "unpinned under a copy"
    eventually(lambda: not runtime.registered, "unregistered after the copy")


def test_a_segment_stays_mapped_until_it_is_unregistered(arena, runtime):
    segment = MemorySegment(2)
    gone = weakref.ref(segment)
    arena.adopt(segment)
    registered(arena, 2)
    with arena.use(segment.span(0, 10)):
        arena.retire(segment)
        del segment
        gc.collect()
        assert gone() is not None, "unmapped while the device may reach into it"
    eventually(lambda: gc.collect() is not None and gone() is None, "let go of")
    assert not runtime.registered


def test_a_segment_that_cannot_be_unregistered_stays_mapped_for_good(arena, runtime):
    segment = MemorySegment(1)
    gone = weakref.ref(segment)
    arena.adopt(segment)
    registered(arena, 1)
    runtime.refuse_unregistration = "the driver says no"
    arena.retire(segment)
    del segment
    eventually(lambda: arena.registered_bytes == 0, "tried")
    threading.Event().wait(0.05)
    gc.collect()
    assert gone() is not None


def test_retired_before_it_was_registered(arena, runtime):
    segment = MemorySegment(2, populated=0)
    gone = weakref.ref(segment)
    arena.adopt(segment)
    arena.retire(segment)
    del segment
    eventually(lambda: gc.collect() is not None and gone() is None, "let go of")
    assert not [entry for entry in runtime.log if entry[0] == "register"]


@pytest.mark.parametrize("refused", ["", "no pinned memory left"])
def test_retired_while_it_is_being_registered(arena, runtime, refused):
    segment = MemorySegment(2)
    gone = weakref.ref(segment)

    def retire():
        runtime.on_register = None
        runtime.refuse_registration = refused
        arena.retire(gone())

    runtime.on_register = retire
    arena.adopt(segment)
    del segment
    eventually(lambda: gc.collect() is not None and gone() is None, "let go of")
    assert not runtime.registered
    assert len([entry for entry in runtime.log if entry[0] == "register"]) == 1


def test_close_unregisters_everything_and_takes_nothing_new(runtime):
    arena = PinnedArena(runtime, piece_bytes=PIECE, settle_seconds=0.01)
    arena.adopt(MemorySegment(3))
    registered(arena, 3)
    assert arena.close(10.0)
    assert not runtime.registered
    arena.adopt(MemorySegment(1))
    assert arena.close(10.0)
    assert not runtime.registered


def test_close_waits_no_longer_than_it_may(runtime):
    arena = PinnedArena(runtime, piece_bytes=PIECE, settle_seconds=0.01)
    segment = MemorySegment(1)
    arena.adopt(segment)
    registered(arena, 1)
    with arena.use(segment.span(0, 8)):
        assert not arena.close(0.05)
    eventually(lambda: not runtime.registered, "unregistered once the copy has ended")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_spans_are_cut_where_pieces_end_and_nothing_else_changes(data):
    runtime = HostRuntime()
    arena = PinnedArena(runtime, piece_bytes=PIECE, settle_seconds=0.0)
    segments = [MemorySegment(data.draw(st.integers(1, 4))) for _ in range(2)]
    elsewhere = np.zeros(4 * PIECE, dtype=np.uint8)
    for segment in segments:
        arena._adopted.append(_adopted(arena, segment, data))
    rows = []
    for number in range(data.draw(st.integers(0, 5))):
        where = data.draw(st.sampled_from([*segments, None]))
        base, size = (
            (where.data_address, where.data_bytes) if where else (elsewhere.ctypes.data, elsewhere.nbytes)
        )
        start = 8 * data.draw(st.integers(0, size // 8 - 1))
        length = data.draw(st.integers(1, size - start))
        rows.append((1 << 40, base + start, length, 8 * number, number))
    spans = Spans(*zip(*rows, strict=True)) if rows else Spans.empty()
    with arena.use(spans) as routed:
        seen = bytes_of(routed.spans)
        assert seen == bytes_of(spans), "other bytes, another order or another place in the stream"
        for row in range(len(routed.spans)):
            address, length = int(routed.spans.arena_address[row]), int(routed.spans.length_bytes[row])
            piece = piece_of(arena, address)
            last = piece_of(arena, address + length - 1)
            assert piece is last, "a span lies in two pieces"
            usable = piece is not None and piece.state is PieceState.REGISTERED
            assert bool(routed.direct[row]) == usable
            assert int(routed.device_address[row]) == (address + DEVICE_OFFSET if usable else 0)


def _adopted(arena, segment, data):
    from connector.client.device.pinning import _Adopted, _Piece

    pieces = [
        _Piece(segment.data_address + start, PIECE, data.draw(st.sampled_from(PieceState)), DEVICE_OFFSET)
        for start in range(0, segment.data_bytes, PIECE)
    ]
    return _Adopted(segment, pieces, PIECE)


def piece_of(arena, address):
    for adopted in arena._adopted:
        for piece in adopted.pieces:
            if piece.address <= address < piece.address + piece.length_bytes:
                return piece
    return None
