"""What the default policy keeps of chains, units and owners equals what a walk over the whole index finds."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from appliance.geometry import GroupKind, ObjectGroup
from appliance.l1.eviction.namespace_returns import NamespaceReturns
from appliance.l1.eviction.returns import ExpectedReturns
from appliance.l1.keys_only import KeysOnlyCache
from tests.support.core_store import CHUNK, Clock, attention, chain, recurrent, sliding

MODELS = {
    "attention": ([attention(0)], [2]),
    "hybrid": ([attention(0), recurrent(1)], [2, 9]),
    "two of each": ([attention(0), attention(1), recurrent(2), recurrent(3)], [1, 2, 3, 4]),
    "windowed": ([attention(0), sliding(1, 2, 2), recurrent(2)], [2, 1, 5]),
}

PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=9),
        st.sampled_from([0.0, 0.5, 30.0, 4000.0]),
    ),
    min_size=1,
    max_size=25,
)


def cache_of(model: str, capacity: int, clock: Clock) -> tuple[KeysOnlyCache, NamespaceReturns]:
    groups, sizes = MODELS[model]
    policy = ExpectedReturns(clock)
    cache = KeysOnlyCache(policy, groups, CHUNK, capacity_extents=capacity, entry_extents=sizes)
    return cache, policy._spaces[0]


def serves(cache: KeysOnlyCache, row: int) -> bool:
    index = cache.index
    return any(index.present.view[index.entry(row, group)] for group in index.others)


def has_attention(cache: KeysOnlyCache, row: int) -> bool:
    index = cache.index
    return any(index.present.view[index.entry(row, group)] for group in index.attention)


def check_chains(cache: KeysOnlyCache, space: NamespaceReturns) -> None:
    index, chains = cache.index, space.chains
    for row in index.rows():
        assert bool(chains.has_attention.view[row]) == has_attention(cache, row)
        if not chains.attention_only:
            assert bool(chains.serves.view[row]) == serves(cache, row)
        children = [child for child in index.children(row) if has_attention(cache, child)]
        if has_attention(cache, row):
            assert chains.continued.view[row] == len(children)
        is_leaf = has_attention(cache, row) and not children
        is_state = bool(chains.serves.view[row]) and not chains.attention_only
        assert bool(chains.places.view[row]) == (is_leaf or is_state)
        if (is_leaf or is_state) and chains.is_measured(row):
            check_figures(cache, space, row)


def check_figures(cache: KeysOnlyCache, space: NamespaceReturns, row: int) -> None:
    """Against a plain walk: up to a row that serves or forks for the unit, to one that serves for the gain."""
    index, chains = cache.index, space.chains
    path = [row]
    while index.parent_of(path[-1]) >= 0:
        path.append(index.parent_of(path[-1]))
    serving = next((each for each in path[1:] if chains.serves.view[each]), None)
    depth = index.chunk_index.view
    gain = depth[row] - depth[serving] if serving is not None else depth[row] + 1
    assert chains.figures(np.array([row])).gain_chunks.tolist() == [gain]
    if chains.is_leaf(row):
        above = path[1:]
        stops = [
            at for at, each in enumerate(above) if chains.serves.view[each] or chains.continued.view[each] > 1
        ]
        assert chains.unit(row) == path[: 1 + (stops[0] if stops else len(above))]
    else:
        assert chains.unit(row) == ()


def check_owners(cache: KeysOnlyCache, space: NamespaceReturns) -> None:
    chains, memory = space.chains, space.memory
    owned = {boundary: row for row, each in space._owned.items() for boundary in each}
    assert len(owned) == sum(map(len, space._owned.values())), (
        "a boundary has two owners: it would count twice"
    )
    for boundary in memory._ids.values():
        owner, row = memory.owner.view[boundary] - 1, memory.row.view[boundary] - 1
        assert owned.get(boundary, -1) == owner
        if owner >= 0:
            assert chains.serves.view[owner]
        if row >= 0:
            assert space.boundary.view[row] == boundary + 1
            assert cache.index.key_of(row) in memory._ids
            if owner >= 0:
                assert chains.serving_at(row) == owner, "prompts fall back to the nearest row that serves"


def check_accounts(cache: KeysOnlyCache, capacity: int) -> None:
    index = cache.index
    present = index.present.array != 0
    assert cache.used_extents == int(index.extents.array.sum()) <= capacity
    assert not index.extents.array[~present].any()
    by_group = present.reshape(-1, index.group_count).sum(axis=0)
    assert [totals.objects for totals in index.totals] == by_group.tolist()
    assert cache.stored_entries - cache.evicted_entries == int(by_group.sum())
    rows = set(index.rows())
    assert rows == set(np.flatnonzero(present.reshape(-1, index.group_count).any(axis=1)).tolist())
    assert index.row_count == len(rows) == index.rows_made - len(index.free_rows())
    assert not index.holds.array.any()


@given(st.sampled_from(sorted(MODELS)), st.integers(10, 80), PROMPTS)
@settings(max_examples=80)
def test_chains_units_owners_and_accounts_are_what_a_walk_finds(model, capacity, prompts):
    clock = Clock()
    cache, space = cache_of(model, capacity, clock)
    for chunks, pause_seconds in prompts:
        clock.advance(pause_seconds)
        cache.serve(chain(*chunks), clock())
        check_chains(cache, space)
        check_owners(cache, space)
        check_accounts(cache, capacity)
        present = np.flatnonzero(cache.index.present.array)
        assert cache.policy.covers(cache.index, present).all(), "an entry that can never be evicted"


@given(st.sampled_from(sorted(MODELS)), PROMPTS)
@settings(max_examples=40)
def test_what_an_index_holds_already_is_taken_over(model, prompts):
    clock = Clock()
    cache, _ = cache_of(model, 60, clock)
    for chunks, _ in prompts:
        cache.serve(chain(*chunks), clock())
    policy = ExpectedReturns(clock)
    policy.add_namespace(cache.index)
    cache.policy = policy
    check_chains(cache, policy._spaces[0])
    check_owners(cache, policy._spaces[0])
    present = np.flatnonzero(cache.index.present.array)
    assert policy.covers(cache.index, present).all()
    left = set(present.tolist())
    clock.advance(1000.0)
    for _, entries in policy.candidates(1):
        taken = [entry for entry in entries.tolist() if entry in left]
        left.difference_update(taken)
        cache._evict(np.array(taken, dtype=np.int64))
    assert not left, "what was there before must all be evictable"


def oracle(stored: dict[tuple[bytes, int], int], keys: list[bytes], groups: list[ObjectGroup]) -> int:
    """The hit, by trying every length."""
    for hit in range(len(keys), 0, -1):
        needed = []
        for group in groups:
            first = 0 if group.kind is GroupKind.ATTENTION else max(0, hit - group.window_chunks(CHUNK))
            needed += [(keys[chunk], group.index) for chunk in range(first, hit)]
        if all(each in stored for each in needed):
            return hit
    return 0


@given(st.sampled_from(sorted(MODELS)), st.integers(10, 80), PROMPTS)
@settings(max_examples=50)
def test_a_hit_is_what_the_stored_entries_allow(model, capacity, prompts):
    clock = Clock()
    cache, _ = cache_of(model, capacity, clock)
    index, groups = cache.index, list(cache.index.groups)
    for chunks, pause_seconds in prompts:
        clock.advance(pause_seconds)
        keys = chain(*chunks)
        stored = {
            (index.key_of(row), group.index): row
            for row in index.rows()
            for group in groups
            if index.present.view[index.entry(row, group.index)]
        }
        assert cache.serve(keys, clock()) == oracle(stored, keys, groups)
