"""Chunk sizes, windows, turns of replicas, and what geometry is refused."""

from __future__ import annotations

import dataclasses
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from appliance.errors import UnsupportedGeometry
from appliance.geometry import (
    MAX_CHUNK_TOKENS,
    MAX_SHARDS,
    GroupKind,
    ObjectGroup,
    check_groups,
    last_usable_chunk,
    negotiate_chunk_tokens,
    writes_chunk,
)


def group(
    block_tokens: int, *, index: int = 0, context_shards: int = 1, kind: GroupKind = GroupKind.ATTENTION
) -> ObjectGroup:
    window = 100 if kind is GroupKind.SLIDING else 0
    return ObjectGroup(
        index, f"g{index}", kind, block_tokens, 1, 1, context_shards=context_shards, window_tokens=window
    )


@pytest.mark.parametrize(
    "asked, groups, chunk_tokens",
    [
        (256, [group(768)], 768),
        (1000, [group(768)], 1536),
        (256, [group(944)], 944),
        (1000, [group(944)], 1888),
        (256, [group(1888)], 1888),
        (256, [group(1536, context_shards=8)], 12288),
        (256, [group(256), group(64), group(8), group(4)], 256),
        (257, [group(256), group(64), group(8), group(4)], 512),
        (256, [group(16)], 256),
        (250, [group(16)], 256),
        (1, [group(16)], 16),
        (256, [group(640)], 640),
        (641, [group(640)], 1280),
        (256, [group(1536, context_shards=8), group(768)], 12288),
        (256, [group(96), group(64)], 384),
    ],
)
def test_negotiated_chunk_size(asked, groups, chunk_tokens):
    assert negotiate_chunk_tokens(asked, groups) == chunk_tokens


@given(
    st.integers(1, 5000),
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4)), min_size=1, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_negotiated_chunk_size_is_the_smallest_that_fits_all(asked, sizes):
    groups = [group(block, context_shards=shards) for block, shards in sizes]
    chunk = negotiate_chunk_tokens(asked, groups)
    unit = math.lcm(*(block * shards for block, shards in sizes))
    assert chunk >= asked
    assert all(chunk % each.unit_tokens == 0 for each in groups)
    assert chunk == unit or chunk - unit < asked
    assert all(each.blocks_per_object(chunk) * each.unit_tokens == chunk for each in groups)


def test_units_that_hardly_ever_meet_are_refused():
    with pytest.raises(UnsupportedGeometry, match="meet only every"):
        negotiate_chunk_tokens(256, [group(9973), group(9967)])
    assert negotiate_chunk_tokens(MAX_CHUNK_TOKENS, [group(1)]) == MAX_CHUNK_TOKENS


@pytest.mark.parametrize(
    "window_tokens, chunk_tokens, chunks",
    [
        (1, 256, 1),
        (2, 256, 1),
        (257, 256, 1),
        (258, 256, 2),
        (512, 256, 2),
        (513, 256, 2),
        (514, 256, 3),
        (1024, 768, 2),
    ],
)
def test_window_in_chunks(window_tokens, chunk_tokens, chunks):
    sliding = dataclasses.replace(group(16, kind=GroupKind.SLIDING), window_tokens=window_tokens)
    assert sliding.window_chunks(chunk_tokens) == chunks
    # The next token sees the W - 1 tokens before it.
    assert chunks * chunk_tokens >= window_tokens - 1
    assert chunks == 1 or (chunks - 1) * chunk_tokens < window_tokens - 1


def test_what_other_kinds_need():
    assert group(16).window_chunks(256) == 0
    assert group(16, kind=GroupKind.RECURRENT).window_chunks(256) == 1
    assert group(768, kind=GroupKind.RECURRENT).blocks_per_object(1536) == 1
    assert group(768).blocks_per_object(1536) == 2


@pytest.mark.parametrize(
    "prompt_tokens, chunk_tokens, chunks",
    [(0, 16, 0), (1, 16, 0), (16, 16, 0), (17, 16, 1), (32, 16, 1), (33, 16, 2)],
)
def test_one_token_is_always_left(prompt_tokens, chunk_tokens, chunks):
    assert last_usable_chunk(prompt_tokens, chunk_tokens) == chunks


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_replicas_take_turns(replicas):
    turns = [[writes_chunk(replica, replicas, chunk) for replica in range(replicas)] for chunk in range(24)]
    assert all(sum(turn) == 1 for turn in turns), "each chunk is stored by exactly one replica"
    written = [sum(turn[replica] for turn in turns) for replica in range(replicas)]
    assert max(written) - min(written) == 0, "no replica is the only writer"


@pytest.mark.parametrize(
    "changes",
    [
        {"index": 1},
        {"block_tokens": 0},
        {"context_shards": 0},
        {"replicas": 0},
        {"shards": 0},
        {"shards": MAX_SHARDS + 1},
        {"window_tokens": 5},
        {"kind": GroupKind.SLIDING},
        {"kind": GroupKind.RECURRENT, "window_tokens": 1},
    ],
)
def test_groups_that_cannot_be_served(changes):
    with pytest.raises(UnsupportedGeometry, match=r"[Gg]roup"):
        check_groups([dataclasses.replace(group(16), **changes)])


def test_number_of_groups():
    with pytest.raises(UnsupportedGeometry):
        check_groups([])
    check_groups([group(16, index=i) for i in range(64)])
    with pytest.raises(UnsupportedGeometry):
        check_groups([group(16, index=i) for i in range(65)])
