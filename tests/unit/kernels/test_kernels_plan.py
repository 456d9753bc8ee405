import numpy as np
import pytest

from kernels import Direction, ExtentError, Spans, StreamRuns, extents_needed, plan_object
from kernels.spans import read_only_column

BASE = 1 << 30
PLACE = {"extent_bytes": 4096, "data_base_address": BASE, "extent_limit": 100}


def runs_of(*rows):
    address, length, offset = (read_only_column(column, np.uint64, "x") for column in zip(*rows, strict=True))
    return StreamRuns(address, length, offset)


def rows_of(spans):
    columns = (spans.engine_address, spans.arena_address, spans.length_bytes, spans.stream_offset)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_run_is_cut_where_its_extents_part():
    spans = plan_object(runs_of((1000, 10000, 0)), [(7, 1), (3, 2)], object_index=4, **PLACE)
    assert rows_of(spans) == [
        (1000, BASE + 7 * 4096, 4096, 0),
        (5096, BASE + 3 * 4096, 5904, 4096),
    ]
    assert spans.object_index.tolist() == [4, 4]


def test_a_cut_in_the_padding_makes_no_span():
    runs = runs_of((1000, 4000, 0), (90000, 100, 4096))
    assert rows_of(plan_object(runs, [(9, 1), (2, 1)], **PLACE)) == [
        (1000, BASE + 9 * 4096, 4000, 0),
        (90000, BASE + 2 * 4096, 100, 4096),
    ]


def test_spare_extents_are_left_alone():
    assert rows_of(plan_object(runs_of((1000, 64, 0)), [(9, 1), (2, 5)], **PLACE)) == [
        (1000, BASE + 9 * 4096, 64, 0)
    ]


def test_extents_too_short_are_refused_with_both_sizes():
    with pytest.raises(ExtentError, match="hold 4096 bytes, the object's stream has 4097"):
        plan_object(runs_of((1000, 4097, 0)), [(0, 1)], **PLACE)
    with pytest.raises(ExtentError, match="hold 0 bytes"):
        plan_object(runs_of((1000, 1, 0)), [], **PLACE)


@pytest.mark.parametrize("extents", [[(99, 2)], [(-1, 3)], [(5, 0), (6, 2)], [(0, 2), (100, 1)]])
def test_extents_outside_the_segment_are_refused(extents):
    with pytest.raises(ExtentError, match="outside a segment of 100 extents"):
        plan_object(runs_of((1000, 64, 0)), extents, **PLACE)


@pytest.mark.parametrize(
    "change", [{"extent_bytes": 4160}, {"extent_bytes": 0}, {"data_base_address": BASE + 8}]
)
def test_sizes_that_would_break_line_alignment_are_refused(change):
    with pytest.raises(ValueError, match="multiple"):
        plan_object(runs_of((1000, 64, 0)), [(0, 1)], **(PLACE | change))


def test_extents_needed_rounds_up():
    assert [extents_needed(size, 4096) for size in (1, 4096, 4097)] == [1, 1, 2]


def good():
    return {
        "engine_address": [64, 128],
        "arena_address": [4096, 8192],
        "length_bytes": [3, 5],
        "stream_offset": [0, 64],
        "object_index": [0, 2],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"length_bytes": [3]},
        {"length_bytes": [3, 0]},
        {"stream_offset": [0, 4]},
        {"object_index": [0, -1]},
        {"engine_address": [0, 64]},
        {"arena_address": [64, 2**64 - 2]},
        {"arena_address": [64, -64]},
        {"length_bytes": [1.5, 2.0]},
        {"object_index": [0, 2**31]},
        {"stream_offset": [[0, 8]]},
    ],
)
def test_spans_that_would_copy_wrongly_are_refused(change):
    with pytest.raises(ValueError, match=r"span|column|stream_offset|object_index|address|length_bytes"):
        Spans(**(good() | change))


def test_spans_keep_their_columns_from_being_changed():
    lengths = np.array([3, 5], dtype=np.uint64)
    spans = Spans(**(good() | {"length_bytes": lengths}))
    with pytest.raises(ValueError, match="read-only"):
        spans.length_bytes[0] = 9
    lengths[0] = 4  # the caller's own array stays writable


def test_spans_concatenate_slice_and_count():
    spans = Spans(**good())
    both = Spans.concatenate([spans, Spans.empty(), spans])
    assert (len(both), both.total_bytes, both.object_count) == (4, 16, 3)
    assert rows_of(both.rows(1, 3)) == [rows_of(spans)[1], rows_of(spans)[0]]
    assert (len(Spans.concatenate([])), Spans.empty().total_bytes, Spans.empty().object_count) == (0, 0, 0)


def test_direction_names_the_source():
    spans = Spans(**good())
    source, destination = spans.ends(Direction.STORE)
    assert (source.tolist(), destination.tolist()) == ([64, 128], [4096, 8192])
    source, destination = spans.ends(Direction.LOAD)
    assert (source.tolist(), destination.tolist()) == ([4096, 8192], [64, 128])
