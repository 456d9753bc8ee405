"""Random page geometry, extents and alignment: the compiled copy equals the reference bit for bit."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import (
    Direction,
    GroupPages,
    PageMap,
    Spans,
    finish,
    load_backend,
    plan_object,
    reference_backend,
)

EXTENT = 4096
GUARD = 0xA5
NUMBA, REFERENCE = load_backend(), reference_backend()
LIMITS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

lengths = st.one_of(
    st.integers(1, 200), st.integers(4000, 4300), st.integers(5000, 13000), st.sampled_from([64, 4096, 8192])
)


def test_the_compiled_backend_is_what_is_tested():
    assert (NUMBA.name, REFERENCE.name) == ("numba", "numpy")


@dataclass
class Case:
    """Engine memory, one group over it, the blocks of one object and where its extents lie."""

    engine: np.ndarray
    group: GroupPages
    blocks: list[int]
    is_cache: np.ndarray  # bytes of `engine` that belong to the object
    extents: list[tuple[int, int]]
    extent_count: int

    def arena(self):
        memory = np.full(self.extent_count * EXTENT + 3 * 64, GUARD, dtype=np.uint8)
        start = -memory.ctypes.data % 64 + 64
        return memory, start

    def plan(self, arena_start_address):
        return plan_object(
            self.group.stream_runs(self.blocks),
            self.extents,
            extent_bytes=EXTENT,
            data_base_address=arena_start_address,
            extent_limit=self.extent_count,
        )


@st.composite
def cases(draw):
    seed = draw(st.integers(0, 2**32))
    block_count = draw(st.integers(2, 5))
    shapes = []
    for _ in range(draw(st.integers(1, 3))):
        end, runs = 0, []
        for _ in range(draw(st.integers(1, 3))):
            offset = end + draw(st.integers(0, 70))
            runs.append((offset, draw(lengths)))
            end = sum(runs[-1])
        pages_per_block = draw(st.integers(1, 3))
        shapes.append(
            (draw(st.integers(0, 80)), pages_per_block, end + draw(st.integers(0, 90)), tuple(runs))
        )
    sizes = [lead + stride * per_block * block_count + 64 for lead, per_block, stride, _ in shapes]
    engine = np.random.default_rng(seed).integers(0, 256, sum(sizes), dtype=np.uint8)
    blocks = draw(st.lists(st.integers(0, block_count - 1), min_size=1, max_size=block_count, unique=True))
    is_cache = np.zeros(len(engine), dtype=bool)
    layers, start = [], 0
    for (lead, per_block, stride, runs), size in zip(shapes, sizes, strict=True):
        base = start + lead
        layers.append(PageMap(engine.ctypes.data + base, per_block, stride, runs, per_block * block_count))
        for kernel_block in (block * per_block + k for block in blocks for k in range(per_block)):
            for offset, length in runs:
                first = base + kernel_block * stride + offset
                is_cache[first : first + length] = True
        start += size
    group = GroupPages(tuple(layers))
    needed = -(-group.object_stream_bytes(len(blocks)) // EXTENT)
    order = draw(st.permutations(range(needed + 2)))[:needed]
    return Case(engine, group, blocks, is_cache, [(first, 1) for first in order], needed + 2)


@LIMITS
@given(cases())
def test_store_and_load_through_scattered_extents(case):
    results = []
    original = case.engine.copy()
    for backend in (NUMBA, REFERENCE):
        arena, start = case.arena()
        spans = case.plan(arena.ctypes.data + start)
        assert spans.total_bytes == int(case.is_cache.sum())
        stored = backend.copy_spans_checksummed(spans, Direction.STORE, 1)
        np.testing.assert_array_equal(case.engine, original)

        # The same bytes, written without a checksum, and the sum read back from the stream in one buffer.
        again, again_start = case.arena()
        backend.copy_spans(case.plan(again.ctypes.data + again_start), Direction.STORE)
        np.testing.assert_array_equal(
            arena[start:-128], again[again_start : again_start + len(arena) - start - 128]
        )
        runs = case.group.stream_runs(case.blocks)
        stream = np.concatenate([arena[start + first * EXTENT :][:EXTENT] for first, _ in case.extents])
        rows = np.stack([runs.stream_offset, runs.length_bytes], axis=1)
        assert backend.checksum_bytes(stream, rows) == int(stored[0])

        case.engine[:] = GUARD
        loaded = backend.copy_spans_checksummed(spans, Direction.LOAD, 1)
        assert loaded.tolist() == stored.tolist()
        np.testing.assert_array_equal(case.engine, np.where(case.is_cache, original, np.uint8(GUARD)))
        case.engine[:] = GUARD
        backend.copy_spans(spans, Direction.LOAD)
        np.testing.assert_array_equal(case.engine, np.where(case.is_cache, original, np.uint8(GUARD)))
        case.engine[:] = original
        end = start + case.extent_count * EXTENT
        guards = np.concatenate((arena[:start], arena[end:]))
        assert (guards == GUARD).all(), "bytes beside the arena were written"
        results.append((stored.tolist(), arena[start:end].copy()))
    (numba_sum, numba_arena), (reference_sum, reference_arena) = results
    assert numba_sum == reference_sum
    # Padding in the arena included: neither backend may write it.
    np.testing.assert_array_equal(numba_arena, reference_arena)
    length = case.group.object_stream_bytes(len(case.blocks))
    assert finish(numba_sum, length)[0] == finish(reference_sum, length)[0]


@LIMITS
@given(st.data())
def test_any_alignment_and_length(data):
    length = data.draw(lengths)
    source_at, target_at = data.draw(st.integers(0, 130)), data.draw(st.integers(0, 130))
    offset = 8 * data.draw(st.integers(0, 2**58))
    direction = data.draw(st.sampled_from(Direction))
    source = np.random.default_rng(length).integers(0, 256, source_at + length + 64, dtype=np.uint8)
    sums, written = [], []
    for backend in (NUMBA, REFERENCE):
        for checksummed in (True, False):
            target = np.full(target_at + length + 64, GUARD, dtype=np.uint8)
            ends = [source.ctypes.data + source_at], [target.ctypes.data + target_at]
            engine, arena = ends if direction is Direction.STORE else reversed(ends)
            spans = Spans(engine, arena, [length], [offset], [0])
            if checksummed:
                sums.append(int(backend.copy_spans_checksummed(spans, direction, 1)[0]))
            else:
                backend.copy_spans(spans, direction)
            written.append(target)
    expected = np.full(target_at + length + 64, GUARD, dtype=np.uint8)
    expected[target_at : target_at + length] = source[source_at : source_at + length]
    for target in written:
        np.testing.assert_array_equal(target, expected)
    assert len(set(sums)) == 1


@LIMITS
@given(st.data())
def test_sum_does_not_depend_on_how_the_stream_is_cut_or_ordered(data):
    length = data.draw(st.integers(1, 9000))
    source = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    target = np.zeros(length, dtype=np.uint8)
    cuts = sorted(
        {8 * cut for cut in data.draw(st.lists(st.integers(1, max(1, (length - 1) // 8)), max_size=12))}
    )
    edges = [0, *(cut for cut in cuts if cut < length), length]
    pieces = data.draw(st.permutations(list(pairwise(edges))))
    spans = Spans(
        [source.ctypes.data + start for start, _ in pieces],
        [target.ctypes.data + start for start, _ in pieces],
        [end - start for start, end in pieces],
        [start for start, _ in pieces],
        [0] * len(pieces),
    )
    whole = REFERENCE.checksum_bytes(source, [(0, length)])
    for backend in (NUMBA, REFERENCE):
        target[:] = 0
        assert int(backend.copy_spans_checksummed(spans, Direction.STORE, 1)[0]) == whole
        np.testing.assert_array_equal(target, source)


@LIMITS
@given(st.data())
def test_a_changed_word_of_any_value_is_seen(data):
    length = data.draw(st.integers(1, 3000))
    source = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    at = data.draw(st.integers(0, (length - 1) // 8)) * 8
    word = data.draw(st.binary(min_size=8, max_size=8))[: length - at]
    changed = source.copy()
    changed[at : at + len(word)] = np.frombuffer(word, dtype=np.uint8)
    same = bool((changed == source).all())
    for backend in (NUMBA, REFERENCE):
        sums = {backend.checksum_bytes(memory, [(0, length)]) for memory in (source, changed)}
        assert len(sums) == (1 if same else 2)


@pytest.mark.parametrize("backend", [NUMBA, REFERENCE], ids=lambda backend: backend.name)
@settings(max_examples=100, deadline=None)
@given(first=st.integers(0, 40), second=st.integers(0, 40), words=st.integers(1, 20))
def test_swapped_pages_are_seen(backend, first, second, words):
    pages = np.random.default_rng(words).integers(0, 2**64, (41, words), dtype=np.uint64)
    swapped = pages.copy()
    swapped[[first, second]] = pages[[second, first]]
    sums = {backend.checksum_bytes(memory.tobytes(), [(0, memory.nbytes)]) for memory in (pages, swapped)}
    assert len(sums) == (1 if first == second else 2)
