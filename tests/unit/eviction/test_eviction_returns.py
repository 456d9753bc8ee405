"""The default policy: which snapshots it wishes for, what it keeps, and that it can always give everything back."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from appliance.geometry import ObjectGroup
from appliance.l1.eviction import DEFAULT_POLICY, EvictionPolicy, Prompt, make_policy
from appliance.l1.eviction.returns import ExpectedReturns
from appliance.l1.keys_only import KeysOnlyCache
from appliance.lookup import entries_of, find
from appliance.settings import Settings
from tests.support.core_store import CHUNK, EXTENT, Clock, World, attention, chain, recurrent

HYBRID = [attention(0), recurrent(1)]


@pytest.fixture
def world() -> Iterator[World]:
    made = World(segments=(24,), policy="RETURNS")
    yield made
    made.close()


class Cache:
    """A keys-only cache of one model, with its clock."""

    def __init__(
        self, capacity: int, groups: list[ObjectGroup], sizes: list[int], policy: str = "RETURNS"
    ) -> None:
        self.clock = Clock()
        self.policy: EvictionPolicy = make_policy(policy, self.clock)
        self.keys_only = KeysOnlyCache(
            self.policy, groups, CHUNK, capacity_extents=capacity, entry_extents=sizes
        )

    def serve(self, *chunks: int) -> int:
        return self.keys_only.serve(chain(*chunks), self.clock())

    def wishes(self, *chunks: int) -> list[int]:
        """What would be wished for, were this prompt to come next."""
        keys = chain(*chunks)
        index = self.keys_only.index
        rows = index.rows_of(keys)
        present = index.present.array.reshape(-1, index.group_count)
        reach = [row >= 0 and bool(present[row, 0]) for row in rows.tolist()]
        depth = reach.index(False) if False in reach else len(reach)
        hits = [at + 1 for at in range(depth) if present[rows[at], -1]]
        return sorted(self.policy.asked(index, Prompt(keys, rows, max(hits, default=0), depth)))

    def states(self, *chunks: int) -> list[int]:
        """Boundaries of a prompt at which a state is stored."""
        index = self.keys_only.index
        rows = index.rows_of(chain(*chunks)).tolist()
        return [
            at + 1
            for at, row in enumerate(rows)
            if row >= 0 and index.present.view[index.entry(row, index.group_count - 1)]
        ]


def test_it_is_the_default():
    assert Settings().eviction_policy == DEFAULT_POLICY == ExpectedReturns.name


# --- snapshots -------------------------------------------------------------------------------------------------


def test_where_prompts_part_a_snapshot_is_wished_for():
    cache = Cache(1000, HYBRID, [1, 20])
    cache.serve(*range(40))
    assert cache.serve(*range(25), 90, 91) < 25, "attention reached 25, and there was no state"
    assert 25 in cache.states(*range(25))
    assert cache.serve(*range(25), 80, 81, 82) == 25


def test_the_end_of_a_prompt_is_stored_without_being_named():
    cache = Cache(1000, HYBRID, [1, 20])
    cache.serve(1, 2, 3)
    assert 3 in cache.states(1, 2, 3)
    assert cache.serve(1, 2, 3, 4, 5) == 3


def test_a_boundary_is_remembered_when_its_bytes_have_gone():
    cache = Cache(100, HYBRID, [1, 20])
    cache.serve(*range(10))
    for number in range(12):
        cache.clock.advance(1000.0)
        cache.serve(*range(1000 + 100 * number, 1020 + 100 * number))
    assert cache.keys_only.index.find(chain(*range(10))[-1]) == -1, "it was evicted"
    assert 10 in cache.wishes(*range(10), 50, 51, 52)


def test_nothing_is_wished_for_before_what_can_be_loaded():
    cache = Cache(1000, HYBRID, [1, 20])
    cache.serve(*range(20))
    assert [wish for wish in cache.wishes(*range(20), 50, 51) if wish <= 20] == []


def test_a_prompt_that_is_edited_near_its_end_hits_where_it_was_edited():
    cache = Cache(3000, HYBRID, [1, 20])
    for number in range(20):
        base = range(10_000 + 100 * number, 10_040 + 100 * number)
        cache.clock.advance(5.0)
        assert cache.serve(*base) == 0
        cache.clock.advance(5.0)
        assert cache.serve(*base[:-2], 1, 2) == 38


def test_snapshots_to_which_nobody_comes_back_are_not_wished_for_any_more():
    cache = Cache(3000, HYBRID, [1, 20])
    prompt = [*range(30), *range(40_000, 40_010)]
    cache.serve(*range(30))
    assert cache.wishes(*prompt) == [32, 36, 38, 39]
    for number in range(500):
        cache.clock.advance(5.0)
        assert cache.serve(*range(30), *range(10_000 + 10 * number, 10_010 + 10 * number)) == 30
    assert cache.wishes(*prompt) == []


def test_a_model_of_attention_only_wishes_for_nothing_but_the_fork():
    cache = Cache(1000, [attention(0)], [1])
    cache.serve(*range(30))
    assert cache.wishes(*range(20), 90, 91) in ([], [20])


# --- what is kept --------------------------------------------------------------------------------------------------


def traffic(seed: int, *, requests: int) -> Iterator[tuple[float, list[int]]]:
    """Conversations under a few system prompts, among prompts that never come again. Seconds since the last one."""
    generator = random.Random(seed)
    systems = [[9_000_000 + 10 * number + at for at in range(4)] for number in range(3)]
    talks: list[list[int]] = []
    fresh = 0
    for _ in range(requests):
        pause = generator.expovariate(0.5)
        if talks and generator.random() < 0.45:
            talk = generator.choice(talks[-12:])
        elif generator.random() < 0.3:
            talk = list(generator.choice(systems))
            talks.append(talk)
        else:
            talk = []
        added = generator.randint(2, 9)
        talk.extend(range(fresh, fresh + added))
        fresh += added
        yield pause, list(talk)


def hit_chunks(policy: str, groups: list[ObjectGroup], sizes: list[int], capacity: int, seed: int) -> int:
    cache = Cache(capacity, groups, sizes, policy)
    hits = 0
    for pause, chunks in traffic(seed, requests=700):
        cache.clock.advance(pause)
        hits += cache.serve(*chunks)
    return hits


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_on_a_hybrid_it_hits_far_more_than_lru(seed):
    ours = hit_chunks("RETURNS", HYBRID, [1, 6], 600, seed)
    assert ours > 1.5 * hit_chunks("LRU", HYBRID, [1, 6], 600, seed)


def test_on_attention_only_it_hits_no_less_than_lru():
    groups, seeds = [attention(0)], range(6)
    ours = sum(hit_chunks("RETURNS", groups, [1], 300, seed) for seed in seeds)
    assert ours >= sum(hit_chunks("LRU", groups, [1], 300, seed) for seed in seeds)


def test_the_same_traffic_evicts_the_same():
    first = hit_chunks("RETURNS", HYBRID, [1, 6], 400, 5)
    assert first == hit_chunks("RETURNS", HYBRID, [1, 6], 400, 5) > 0


# --- through the store ---------------------------------------------------------------------------------------------


def test_what_is_held_stays_and_all_else_can_go(world):
    index = world.namespace(1, attention(0), recurrent(1))
    held, other = chain(1, 2, 3), chain(7, 8, 9)
    world.put_chain(index, held)
    world.put_chain(index, other)
    found = find(index, world.store.ghosts, held, 3 * CHUNK + 1)
    entries = entries_of(index, found.rows, found.reach.hit)
    world.store.hold(index, entries)
    world.store.evict_down_to(0, at_most=1000)
    assert np.flatnonzero(index.present.array).tolist() == sorted(entries.tolist())
    assert not world.store.make_room(24)
    world.store.unhold(index, entries)
    assert world.store.make_room(24)
    assert world.arena.account().occupied == 0


def test_below_a_leaf_that_cannot_go_room_is_found_all_the_same(world):
    """A writer holds the last chunk: what it continues can be given up, and is, before a writer is refused."""
    index = world.namespace(1, attention(0, shards=2))
    keys = chain(1, 2, 3)
    world.put_chain(index, keys[:2])
    world.put(index, keys, 2, 0, 0)
    grant, reservation = world.reserve(index, keys, 2, 0, 1)
    assert reservation is not None, grant
    world.store.evict_down_to(0, at_most=1000)
    assert world.arena.account().occupied == EXTENT, "only the shard beside the one being written"


def test_a_chunk_that_is_gone_takes_what_continues_it_first(world):
    index = world.namespace(1, attention(0), recurrent(1))
    keys = chain(1, 2, 3, 4)
    world.put_chain(index, keys)
    world.store.policy.demoted(index, index.entries_behind(index.find(keys[2])))
    world.clock.advance(1000.0)
    first = [entry for _, batch in world.store.policy.candidates(1) for entry in batch.tolist()][:4]
    rows = [index.find(keys[3]), index.find(keys[2])]
    assert first == [
        index.entry(rows[0], 1),
        index.entry(rows[0], 0),
        index.entry(rows[1], 1),
        index.entry(rows[1], 0),
    ]


def test_a_prompt_that_is_being_stored_is_not_evicted_chunk_by_chunk(world):
    """Its last chunk, where its boundary is, comes last; until then nothing says what the chunks are good for."""
    index = world.namespace(1, attention(0), recurrent(1))
    world.put_chain(index, chain(1, 2, 3))
    world.clock.advance(100.0)
    keys = chain(5, 6, 7, 8)
    world.store.policy.asked(index, Prompt(keys, index.rows_of(keys), 0, 0))
    for chunk in range(3):
        world.put(index, keys, chunk, 0)
    world.store.evict_down_to(3 * EXTENT, at_most=1000)
    assert [index.find(key) >= 0 for key in keys] == [True, True, True, False]
    assert index.find(chain(1)[0]) == -1


def test_takes_over_what_another_policy_kept(world):
    index = world.namespace(1, attention(0), recurrent(1))
    world.put_chain(index, chain(1, 2, 3))
    fork = chain(1, 2, 5, 6)
    for chunk in (2, 3):
        world.put(index, fork, chunk, 0)
    world.put(index, fork, 3, 1)
    policy = make_policy("RETURNS", world.clock)
    policy.add_namespace(index)
    present = np.flatnonzero(index.present.array)
    assert policy.covers(index, present).all()
    world.store.policy = policy
    world.clock.advance(1000.0)
    world.store.evict_down_to(0, at_most=1000)
    assert world.arena.account().occupied == 0
