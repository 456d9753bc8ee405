"""Which blocks make which objects."""

import pytest
from vllm_stand_ins import ATTENTION, CHUNK, RECURRENT, SLIDING

from appliance.geometry import GroupKind, ObjectGroup
from connector.vllm.plans import UnusableTable, load_items, save_items

KEYS = [bytes([number]) * 32 for number in range(1, 5)]
ROOT = bytes(32)


def test_blocks_that_the_request_has_already_are_not_written() -> None:
    items = load_items([ATTENTION], [[1, 2, 3, 4, 5, 6]], chunk_tokens=CHUNK, local_tokens=12, hit_chunks=3)
    assert [(item.chunk, item.block_ids) for item in items] == [(1, (0, 4)), (2, (5, 6))]


def test_a_state_is_taken_at_the_boundary_alone() -> None:
    items = load_items(
        [RECURRENT], [[], [0, 0, 0, 0, 0, 8]], chunk_tokens=CHUNK, local_tokens=0, hit_chunks=3
    )
    assert [(item.chunk, item.block_ids) for item in items] == [(2, (8,))]


def test_a_window_needs_its_last_chunks_and_no_null_block_is_asked_for() -> None:
    table = [0, 0, 0, 4, 5, 6]
    items = load_items([SLIDING], [[], table], chunk_tokens=CHUNK, local_tokens=0, hit_chunks=3)
    assert [(item.chunk, item.block_ids) for item in items] == [(2, (5, 6))]


@pytest.mark.parametrize(
    "tables", [[[1, 2, 3], [0, 0, 0, 9]], [[1, 0, 3, 4], [0, 0, 0, 9]], [[1, 2, 3, 4], []]]
)
def test_a_table_that_lacks_a_block_is_refused(tables: list[list[int]]) -> None:
    with pytest.raises(UnusableTable):
        load_items([ATTENTION, RECURRENT], tables, chunk_tokens=CHUNK, local_tokens=0, hit_chunks=2)


def test_a_manager_block_over_context_ranks_covers_more_tokens() -> None:
    shared = ObjectGroup(0, "attention-0", GroupKind.ATTENTION, 4, shards=2, replicas=1, context_shards=2)
    items = load_items([shared], [[1, 2]], chunk_tokens=CHUNK, local_tokens=0, hit_chunks=2)
    assert [item.block_ids for item in items] == [(1,), (2,)]


def test_saved_objects_carry_their_parent() -> None:
    items = list(save_items([ATTENTION], [[1, 2, 3, 4]], KEYS[:2], ROOT, chunk_tokens=CHUNK, first_chunk=0))
    assert [(item.key, item.parent, item.block_ids) for item in items] == [
        (KEYS[0], ROOT, (1, 2)),
        (KEYS[1], KEYS[0], (3, 4)),
    ]


def test_a_chunk_that_a_window_has_partly_left_is_not_saved() -> None:
    tables = [[1, 2, 3, 4], [0, 6, 7, 8]]
    items = save_items([ATTENTION, SLIDING], tables, KEYS[:2], ROOT, chunk_tokens=CHUNK, first_chunk=0)
    assert [(item.group, item.chunk) for item in items] == [(0, 0), (0, 1), (1, 1)]
