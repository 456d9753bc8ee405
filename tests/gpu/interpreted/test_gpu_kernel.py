"""The Triton kernel in interpreter mode equals the reference bit for bit. The interpreter is slow: few, odd cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import Direction, Spans, finish, reference_backend, triton_copy
from kernels.pointer_table import pointer_table
from kernels.triton_copy import triton_backend
from tests.property.test_kernels_copy import EXTENT, GUARD, cases

TRITON, REFERENCE = triton_backend(torch.device("cpu")), reference_backend()
SLOW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BLOCK_BYTES = 8 * triton_copy.BLOCK_WORDS

lengths = st.one_of(
    st.integers(1, 80),
    st.integers(BLOCK_BYTES - 20, BLOCK_BYTES + 20),
    st.sampled_from([2048, 2049, 4096, 32_768, 32_769, 70_001]),
)


def test_the_kernel_is_interpreted():
    assert type(triton_copy.copy_kernel).__name__ == "InterpretedFunction"


@SLOW
@given(cases())
def test_gather_and_scatter_of_pages_through_scattered_extents(case):
    """Padded pages, several kernel blocks a block, several layers, extents in any order."""
    original = case.engine.copy()
    results = []
    for backend in (TRITON, REFERENCE):
        arena, start = case.arena()
        spans = case.plan(arena.ctypes.data + start)
        stored = backend.copy_spans_checksummed(spans, Direction.STORE, 1)
        np.testing.assert_array_equal(case.engine, original)
        end = start + case.extent_count * EXTENT
        assert (np.concatenate((arena[:start], arena[end:])) == GUARD).all(), (
            "bytes beside the arena were written"
        )
        case.engine[:] = GUARD
        loaded = backend.copy_spans_checksummed(spans, Direction.LOAD, 1)
        np.testing.assert_array_equal(case.engine, np.where(case.is_cache, original, np.uint8(GUARD)))
        case.engine[:] = original
        assert loaded.tolist() == stored.tolist()
        results.append((stored.tolist(), arena[start:end].copy()))
    (triton_sum, triton_arena), (reference_sum, reference_arena) = results
    assert triton_sum == reference_sum
    # Padding in the arena included: neither may write it.
    np.testing.assert_array_equal(triton_arena, reference_arena)
    length = case.group.object_stream_bytes(len(case.blocks))
    assert finish(triton_sum, length)[0] == finish(reference_sum, length)[0]


@settings(SLOW, max_examples=60)
@given(st.data())
def test_any_alignment_and_length(data):
    length = data.draw(lengths)
    shift = data.draw(st.sampled_from([0, 8, 1, 4, 15]))
    source_at = data.draw(st.integers(0, 8)) * 16 + shift
    target_at = data.draw(st.integers(0, 8)) * 16 + data.draw(st.sampled_from([shift, 0, 8, 3]))
    offset = 8 * data.draw(st.integers(0, 2**58))
    direction = data.draw(st.sampled_from(Direction))
    source = np.random.default_rng(length).integers(0, 256, length + 256, dtype=np.uint8)
    source_at += -source.ctypes.data % 16
    written, sums = [], []
    for backend in (TRITON, REFERENCE):
        target = np.full(length + 256, GUARD, dtype=np.uint8)
        begin = target_at + -target.ctypes.data % 16
        ends = [source.ctypes.data + source_at], [target.ctypes.data + begin]
        engine, arena = ends if direction is Direction.STORE else reversed(ends)
        spans = Spans(engine, arena, [length], [offset], [0])
        sums.append(int(backend.copy_spans_checksummed(spans, direction, 1)[0]))
        expected = np.full(length + 256, GUARD, dtype=np.uint8)
        expected[begin : begin + length] = source[source_at : source_at + length]
        np.testing.assert_array_equal(target, expected)
        target[:] = GUARD
        backend.copy_spans(spans, direction)
        np.testing.assert_array_equal(target, expected)
        written.append(target)
    assert sums[0] == sums[1]


@SLOW
@given(seed=st.integers(0, 2**32), objects=st.integers(1, 5))
def test_many_rows_in_any_order_give_each_object_its_own_sum(seed, objects):
    random = np.random.default_rng(seed)
    count = triton_copy.PROGRAMS + int(random.integers(1, 40))
    sizes = random.integers(1, 100, count)
    source = random.integers(0, 256, count * 112, dtype=np.uint8)
    target = np.zeros_like(source)
    place = np.arange(count, dtype=np.uint64) * np.uint64(112)
    spans = Spans(
        place + np.uint64(source.ctypes.data),
        place + np.uint64(target.ctypes.data),
        sizes.astype(np.uint64),
        place,
        random.integers(0, objects, count).astype(np.int32),
    )
    expected = REFERENCE.copy_spans_checksummed(spans, Direction.STORE, objects)
    wanted = target.copy()
    target[:] = 0
    table = np.ascontiguousarray(pointer_table(spans, Direction.STORE)[:, random.permutation(count)])
    sums = np.zeros(objects, dtype=np.int64)
    triton_copy.launch(torch.from_numpy(table), count, torch.from_numpy(sums), programs=7)
    assert sums.view(np.uint64).tolist() == expected.tolist()
    np.testing.assert_array_equal(target, wanted)


def test_no_spans_and_too_many_objects():
    assert TRITON.copy_spans_checksummed(Spans.empty(), Direction.LOAD, 3).tolist() == [0, 0, 0]
    memory = np.zeros(64, dtype=np.uint8)
    spans = Spans([memory.ctypes.data], [memory.ctypes.data + 32], [8], [0], [4])
    with pytest.raises(ValueError, match="5 objects for 4 sums"):
        TRITON.copy_spans_checksummed(spans, Direction.STORE, 4)
