"""The copy engine without a GPU: direct, bounced and mixed batches, their order, and what an error means."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import UnsupportedGeometry
from connector.client.device.bounce import SLOT_ALIGNMENT_BYTES, rounds
from connector.client.device.choice import HostCopies, copies_for
from connector.client.device.engine import DeviceCopies
from connector.client.device.pinning import PinnedArena
from connector.client.device.runtime import PinnedMemory
from kernels import Direction, Spans, reference_backend
from kernels.pointer_table import Column, pointer_table, run_table
from tests.support.device import PIECE, HostRuntime, MemorySegment, bytes_of, registered

PAGES = 300_000


class Setup:
    """A device with pages of its own, and a segment of which `populated` bytes are registered."""

    def __init__(self, pieces, populated, **runtime):
        self.runtime = HostRuntime(**runtime)
        self.arena = PinnedArena(self.runtime, piece_bytes=PIECE, settle_seconds=0.01)
        self.copies = DeviceCopies(self.runtime, self.arena)
        self.segment = MemorySegment(pieces, populated)
        self.pages = np.random.default_rng(1).integers(0, 256, PAGES, dtype=np.uint8)
        self.runtime.own(self.pages)
        self.copies.mapped(self.segment)
        registered(self.arena, populated // PIECE)
        self.runtime.log.clear()

    @property
    def data(self):
        return self.segment.data

    def spans(self, rows):
        """Rows of (page start, arena start, length, stream offset, object)."""
        page, place, length, offset, owner = (np.array(column) for column in zip(*rows, strict=True))
        return Spans(page + self.pages.ctypes.data, place + self.segment.data_address, length, offset, owner)


@pytest.fixture
def make():
    made = []

    def build(*args, **kwargs):
        made.append(Setup(*args, **kwargs))
        return made[-1]

    yield build
    for each in made:
        each.copies.close()


def expected_sums(setup, spans, count):
    scratch = setup.data.copy()
    sums = reference_backend().copy_spans_checksummed(spans, Direction.STORE, count)
    stored = setup.data.copy()
    setup.data[:] = scratch
    return sums, stored


@pytest.mark.parametrize("populated", [0, 20 * PIECE, 50 * PIECE], ids=["bounced", "mixed", "direct"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_store_and_a_load_are_those_of_the_reference(populated, seed):
    setup = Setup(50, populated)
    random = np.random.default_rng(seed)
    rows, place, page = [], 0, 0
    count = int(random.integers(1, 4))
    for _ in range(int(random.integers(1, 12))):
        length = int(random.choice([1, 7, 64, 4096, 5000, 33_000])) + int(random.integers(0, 40))
        place = -(-place // 64) * 64 + 64 * int(random.integers(0, 3))
        page += int(random.integers(0, 20))
        if place + length > setup.segment.data_bytes or page + length > PAGES:
            break
        rows.append(
            (page, place, length, 8 * int(random.integers(0, 1 << 40)), int(random.integers(0, count)))
        )
        place += length
        page += length
    spans = setup.spans(rows or [(0, 0, 100, 0, 0)])
    sums, stored = expected_sums(setup, spans, count)
    backend = setup.copies.backend
    assert backend.copy_spans_checksummed(spans, Direction.STORE, count).tolist() == sums.tolist()
    np.testing.assert_array_equal(setup.data, stored)
    original = setup.pages.copy()
    for start, length in ((row[0], row[2]) for row in rows):
        setup.pages[start : start + length] = 0
    assert backend.copy_spans_checksummed(spans, Direction.LOAD, count).tolist() == sums.tolist()
    np.testing.assert_array_equal(setup.pages, original)
    backend.copy_spans(spans, Direction.LOAD)
    np.testing.assert_array_equal(setup.pages, original)
    setup.copies.close()


def test_direct_copies_use_no_buffer_and_wait_once(make):
    setup = make(4, 4 * PIECE)
    setup.copies.backend.copy_spans_checksummed(
        setup.spans([(0, 0, 4000, 0, 0), (4000, 5000 // 64 * 64, 9000, 0, 1)]), Direction.STORE, 2
    )
    kinds = [entry[0] for entry in setup.runtime.log]
    assert kinds == ["launch", "synchronized"]


def test_a_buffer_is_filled_again_only_after_its_round_has_ended(make):
    setup = make(60, 0)
    spans = setup.spans([(0, 0, 240_000, 0, 0)])
    for direction in Direction:
        setup.runtime.log.clear()
        setup.copies.backend.copy_spans_checksummed(spans, direction, 1)
        kinds = [entry[0] for entry in setup.runtime.log if entry[0] != "register"]
        assert kinds == ["launch", "synchronized"] * 2 + ["synchronized"]


def test_an_error_is_raised_only_when_nothing_is_in_flight(make, monkeypatch):
    setup = make(60, 2 * PIECE)
    lane = setup.runtime.lanes[Direction.STORE]
    launch, calls = lane.launch, []

    def second_fails(table):
        calls.append(table)
        if len(calls) == 2:
            assert lane.queued == 1, "the first launch has not run yet"
            raise RuntimeError("out of memory")
        launch(table)

    monkeypatch.setattr(lane, "launch", second_fails)
    spans = setup.spans([(0, 0, 5000, 0, 0), (5000, 10 * PIECE, 5000, 0, 1)])
    with pytest.raises(RuntimeError, match="out of memory"):
        setup.copies.backend.copy_spans_checksummed(spans, Direction.STORE, 2)
    assert lane.queued == 0, "the caller would hand the memory on while a kernel writes it"
    monkeypatch.undo()
    sums, _ = expected_sums(setup, spans, 2)
    again = setup.copies.backend.copy_spans_checksummed(spans, Direction.STORE, 2)
    assert again.tolist() == sums.tolist()


def test_a_piece_is_used_until_the_event_and_not_longer(make):
    setup = make(4, 4 * PIECE)
    during = []

    def retire(_direction):
        setup.runtime.on_run = None
        setup.copies.retired(setup.segment)
        during.append(len(setup.runtime.registered))

    setup.runtime.on_run = retire
    setup.copies.backend.copy_spans(setup.spans([(0, 0, 4 * PIECE, 0, 0)]), Direction.STORE)
    assert during == [4]
    np.testing.assert_array_equal(setup.data, setup.pages[: 4 * PIECE])


def test_spans_of_more_objects_than_sums_are_refused(make):
    setup = make(1, PIECE)
    with pytest.raises(ValueError, match="objects"):
        setup.copies.backend.copy_spans_checksummed(setup.spans([(0, 0, 8, 0, 3)]), Direction.STORE, 3)


def test_no_spans_give_zero_sums(make):
    setup = make(1, PIECE)
    for direction in Direction:
        assert setup.copies.backend.copy_spans_checksummed(Spans.empty(), direction, 2).tolist() == [0, 0]


@pytest.mark.parametrize("wrong", ["bytes", "sums"])
def test_a_device_that_copies_wrongly_is_refused_before_anything_is_stored(wrong):
    def run(table, sums):
        run_table(table, sums)
        if wrong == "sums":
            sums[0] += 1
        else:
            np.frombuffer(
                (np.ctypeslib.ctypes.c_uint8 * 1).from_address(int(table[Column.DESTINATION, -1])),
                dtype=np.uint8,
            )[:] ^= 1

    with pytest.raises(UnsupportedGeometry, match="reference"):
        DeviceCopies(HostRuntime(run_table=run))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rounds_hold_every_byte_once_and_slots_never_overlap(data):
    size = 256 * data.draw(st.integers(1, 12))
    bounce = PinnedMemory(1 << 40, 1 << 41, size)
    rows = [
        (1 << 42, (1 << 43) + 10_000 * n, data.draw(st.integers(1, 3000)), 8 * n, n)
        for n in range(data.draw(st.integers(0, 6)))
    ]
    spans = Spans(*zip(*rows, strict=True)) if rows else Spans.empty()
    whole = []
    for each in rounds(spans, bounce):
        device, host = each.device_side, each.host_side
        end = 0
        assert len(device) > 0
        for row in range(len(device)):
            slot = int(device.arena_address[row]) - bounce.device_address
            assert slot == int(host.engine_address[row]) - bounce.host_address
            assert slot % SLOT_ALIGNMENT_BYTES == 0
            assert slot >= end
            end = slot + int(device.length_bytes[row])
        assert end <= size
        whole.append(
            Spans(
                device.engine_address,
                host.arena_address,
                device.length_bytes,
                device.stream_offset,
                device.object_index,
            )
        )
    assert sorted(bytes_of(Spans.concatenate(whole))) == sorted(bytes_of(spans))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_table_does_what_its_spans_say(data):
    row_bytes = 16 * data.draw(st.integers(1, 40))
    source = np.random.default_rng(0).integers(0, 256, 9000, dtype=np.uint8)
    lengths = [data.draw(st.integers(1, 2000)) for _ in range(data.draw(st.integers(0, 4)))]
    at = 0
    rows = []
    for number, length in enumerate(lengths):
        rows.append((at, length, 8 * data.draw(st.integers(0, 2**59)), number % 2))
        at += length
    outcomes = []
    for tabled in (True, False):
        target = np.zeros(9000, dtype=np.uint8)
        spans = (
            Spans(
                [source.ctypes.data + start for start, *_ in rows],
                [target.ctypes.data + start for start, *_ in rows],
                [length for _, length, *_ in rows],
                [offset for *_, offset, _ in rows],
                [owner for *_, owner in rows],
            )
            if rows
            else Spans.empty()
        )
        if tabled:
            sums = np.zeros(2, dtype=np.int64)
            table = pointer_table(spans, Direction.STORE, row_bytes=row_bytes)
            assert (table[Column.LENGTH] <= row_bytes).all()
            run_table(table, sums)
            outcomes.append((target, sums.view(np.uint64).tolist()))
        else:
            sums = reference_backend().copy_spans_checksummed(spans, Direction.STORE, 2)
            outcomes.append((target, sums.tolist()))
    np.testing.assert_array_equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


class Device:
    """As much of a torch device as the choice looks at."""

    def __init__(self, kind, index=None):
        self.type, self.index = kind, index

    def __str__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"


def test_cpu_tensors_get_the_cpu_backend():
    copies = copies_for([Device("cpu"), Device("cpu")])
    assert isinstance(copies, HostCopies)
    assert copies.mark(Direction.STORE) is None
    assert copies.backend.name in {"numba", "numpy"}


@pytest.mark.parametrize(
    "devices, message",
    [
        ([Device("xpu", 0)], "xpu:0"),
        ([Device("meta")], "meta"),
        ([Device("cuda", 0), Device("cuda", 1)], "2 devices"),
        ([Device("cuda", 0), Device("cpu")], "2 devices"),
        ([], "none"),
    ],
)
def test_other_devices_are_refused(devices, message):
    with pytest.raises(UnsupportedGeometry, match=message) as refused:
        copies_for(devices)
    assert refused.value.remedy


def test_a_device_without_its_kernel_is_refused():
    import importlib.util

    if importlib.util.find_spec("triton") is not None:
        pytest.skip("this environment has Triton")
    with pytest.raises(UnsupportedGeometry, match="missing") as refused:
        copies_for([Device("cuda", 0)])
    assert "Triton" in refused.value.remedy
