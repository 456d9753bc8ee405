"""What became of stored bytes is counted, and what other policies would have hit is measured on the prompts themselves."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest

from appliance.l1.eviction import POLICIES, Prompt, make_policy
from appliance.l1.removals import Removal
from appliance.lookup import entries_of, find
from appliance.retention import RetentionLedger, regretted_groups
from appliance.shadows import ShadowBoard
from tests.support.core_store import CHUNK, World, attention, chain, recurrent

FOREVER = 60.0


@pytest.fixture
def world() -> Iterator[World]:
    made = World(segments=(24,), policy="RETURNS")
    yield made
    made.close()


@pytest.fixture
def ledger(world: World) -> RetentionLedger:
    made = RetentionLedger(world.observer)
    world.store.observer = made
    return made


def prompt_of(world: World, index, keys) -> Prompt:
    found = find(index, world.store.ghosts, keys, len(keys) * CHUNK + 1)
    return Prompt(keys, found.rows, found.reach.hit, found.reach.attention)


def evict(world: World, index, keys, chunk: int, group: int) -> None:
    world.store.remove(index, index.find(keys[chunk]), group, Removal.EVICTED)


# --- the ledger --------------------------------------------------------------------------------------------------


def test_bytes_are_read_again_once(world, ledger):
    index = world.namespace(1, attention(0), recurrent(1))
    keys = chain(1, 2, 3)
    world.put_chain(index, keys)
    found = find(index, world.store.ghosts, keys, 3 * CHUNK + 1)
    entries = entries_of(index, found.rows, found.reach.hit)
    ledger.read(index, entries)
    ledger.read(index, entries)
    states, tokens = ledger.of(index)[1], ledger.of(index)[0]
    assert (tokens.stored, tokens.read) == (3, 3)
    assert (states.stored, states.read) == (3, 1), "a hit reads one state, and one only"
    evict(world, index, keys, 2, 1)
    world.put(index, keys, 2, 1)
    ledger.read(index, entries)
    assert (states.stored, states.read, states.evicted) == (4, 2, 1), "what is stored anew is read anew"


def test_what_was_evicted_and_is_asked_for_is_regretted(world, ledger):
    index = world.namespace(1, attention(0), recurrent(1))
    keys = chain(1, 2, 3, 4)
    world.put_chain(index, keys[:3])
    for group in (1, 0):
        evict(world, index, keys, 2, group)
    assert index.find(keys[2]) == -1, "only its ghost is left"
    evict(world, index, keys, 1, 1)
    ledger.asked(index, world.store.ghosts, prompt_of(world, index, keys))
    assert [each.regretted for each in ledger.of(index)] == [1, 1], "the third chunk and the state at its end"


def test_what_was_cleared_or_never_stored_is_not_regretted(world, ledger):
    index = world.namespace(1, attention(0), recurrent(1))
    keys = chain(1, 2, 3)
    ledger.asked(index, world.store.ghosts, prompt_of(world, index, keys))
    world.put_chain(index, keys)
    world.store.clear(None)
    ledger.asked(index, world.store.ghosts, prompt_of(world, index, keys))
    assert [each.regretted for each in ledger.of(index)] == [0, 0]


def test_attention_without_any_state_behind_it_is_no_regret(world):
    index = world.namespace(1, attention(0), recurrent(1))
    keys = chain(1, 2, 3)
    for chunk in range(3):
        world.put(index, keys, chunk, 0)
    evict(world, index, keys, 2, 0)
    assert regretted_groups(index, world.store.ghosts, prompt_of(world, index, keys)) == []


def test_on_attention_only_the_chunks_themselves_are_regretted(world):
    index = world.namespace(1, attention(0))
    keys = chain(1, 2, 3, 4)
    world.put_chain(index, keys[:3])
    for chunk in (2, 1):
        evict(world, index, keys, chunk, 0)
    assert regretted_groups(index, world.store.ghosts, prompt_of(world, index, keys)) == [1, 1]


# --- another policy takes over -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", POLICIES)
@pytest.mark.parametrize("second", POLICIES)
def test_a_policy_takes_over_what_another_kept(first, second):
    world = World(segments=(24,), policy=first)
    try:
        index = world.namespace(1, attention(0), recurrent(1))
        world.put_chain(index, chain(1, 2, 3, 4))
        world.clock.advance(5.0)
        world.put_chain(index, chain(7, 8))
        world.store.use_policy(make_policy(second, world.clock))
        present = np.flatnonzero(index.present.array)
        assert world.store.policy.name == second
        assert world.store.policy.covers(index, present).all()
        world.clock.advance(1000.0)
        world.store.evict_down_to(0, at_most=1000)
        assert world.arena.account().occupied == 0
        world.put_chain(index, chain(9, 10))
    finally:
        world.close()


def test_lru_takes_over_in_the_order_of_last_use():
    world = World(segments=(24,), policy="RETURNS")
    try:
        index = world.namespace(1, attention(0))
        for number in (3, 1, 2):
            world.put_chain(index, chain(number, number + 10))
            world.clock.advance(5.0)
        world.store.use_policy(make_policy("LRU", world.clock))
        going = [entry for _, batch in world.store.policy.candidates(1) for entry in batch.tolist()]
        assert going == [index.find(key) for n in (3, 1, 2) for key in reversed(chain(n, n + 10))]
    finally:
        world.close()


@pytest.mark.parametrize("groups", [[attention(0)], [attention(0), recurrent(1)]])
def test_returns_takes_over_by_what_was_used_last(groups):
    world = World(segments=(24,), policy="LRU")
    try:
        index = world.namespace(1, *groups)
        for number in (3, 1, 2):
            world.put_chain(index, chain(number, number + 10))
            world.clock.advance(500.0)
        world.store.use_policy(make_policy("RETURNS", world.clock))
        gone: list[int] = []
        while len(gone) < 3:
            assert world.store.evict_down_to(0, at_most=1) == 1
            ends = {number: index.find(chain(number, number + 10)[1]) for number in (3, 1, 2)}
            gone += [number for number, row in ends.items() if row < 0 and number not in gone]
        assert gone == [3, 1, 2]
    finally:
        world.close()


# --- shadows -----------------------------------------------------------------------------------------------------


def board(world: World, capacity: int = 24, policies: tuple[str, ...] = ("RETURNS", "LRU")) -> ShadowBoard:
    return ShadowBoard(world.clock, lambda _: capacity, policies)


def filled(world: World):
    index = world.namespace(1, attention(0), recurrent(1))
    world.put_chain(index, chain(1))
    return index


def one_turn(shadows: ShadowBoard) -> None:
    """Work until one policy has had its turn."""
    with patch("appliance.shadows.time.perf_counter", side_effect=[0.0, 0.0, 2.0]):
        shadows.work(1.0)


def test_every_policy_is_followed_on_the_same_prompts(world):
    index, shadows = filled(world), board(world)
    for _ in range(2):
        for number in range(4):
            shadows.came(index, chain(number, number + 10, number + 20))
            shadows.work(FOREVER)
            world.clock.advance(1.0)
    assert {count.prompts for count in shadows.counts.values()} == {8}
    assert {count.asked_chunks for count in shadows.counts.values()} == {24}
    assert shadows.counts["RETURNS"].hit_rate > 0
    assert shadows.share == 1.0


def test_they_hit_what_a_cache_of_that_policy_hits(world):
    """Room for two prompts with a state at each boundary, or for four with one state each: LRU keeps nothing."""
    index, shadows = filled(world), board(world, capacity=18)
    for _ in range(6):
        for number in range(4):
            shadows.came(index, chain(number, number + 10, number + 20))
            shadows.work(FOREVER)
            world.clock.advance(30.0)
    assert shadows.counts["LRU"].hit_chunks == 0
    assert shadows.counts["RETURNS"].hit_chunks > 12


def test_nothing_is_followed_before_sizes_are_known(world):
    index, shadows = world.namespace(1, attention(0), recurrent(1)), board(world)
    shadows.came(index, chain(1, 2))
    shadows.work(FOREVER)
    assert all(count.prompts == 0 for count in shadows.counts.values())


def test_a_prompt_counts_for_every_policy_or_for_none(world):
    """Its size became known, or there got to be too much to follow, between two policies' turns."""
    index, rooms = world.namespace(1, attention(0), recurrent(1)), [24]
    shadows = ShadowBoard(world.clock, lambda _: rooms[-1], ("RETURNS", "LRU", "SIMPLE"))
    shadows.came(index, chain(1, 2))
    one_turn(shadows)
    world.put_chain(index, chain(1))
    shadows.work(FOREVER)
    assert {count.prompts for count in shadows.counts.values()} == {0}
    shadows.came(index, chain(1, 2))
    one_turn(shadows)
    assert [count.prompts for count in shadows.counts.values()] == [1, 0, 0]
    rooms.append(1 << 30)
    shadows.work(FOREVER)
    assert shadows.halvings > 0
    assert {count.prompts for count in shadows.counts.values()} == {0}


def test_work_is_bounded_and_goes_on_later(world):
    index, shadows = filled(world), board(world)
    for number in range(5):
        shadows.came(index, chain(number, number + 10))
    shadows.work(0.0)
    assert all(count.prompts == 0 for count in shadows.counts.values())
    shadows.work(FOREVER)
    assert {count.prompts for count in shadows.counts.values()} == {5}


def test_too_many_prompts_halve_what_is_followed_by_whole_conversations(world):
    index, shadows = filled(world), board(world)
    while shadows.halvings < 2:
        for number in range(400):
            shadows.came(index, chain(number, number + 1000))
    assert shadows.share == 0.25
    shadows.work(FOREVER)
    followed = []
    for number in range(40):
        before = shadows.counts["LRU"].prompts
        for longer in (2, 3, 4):
            shadows.work(FOREVER)
            shadows.came(index, chain(*range(number, number + longer)))
        shadows.work(FOREVER)
        followed.append(shadows.counts["LRU"].prompts - before)
    assert set(followed) == {0, 3}, (
        "a conversation is followed from its first prompt to its last, or not at all"
    )


def test_the_memory_of_shadows_follows_that_of_the_namespace(world):
    index = filled(world)
    capacity = [100]
    shadows = ShadowBoard(world.clock, lambda _: capacity[0], ("LRU",))
    for number in range(30):
        shadows.came(index, chain(number, number + 100))
        shadows.work(FOREVER)
    cache = next(iter(shadows._shadows.values())).cache
    assert 80 < cache.used_extents <= 100
    capacity[0] = 20
    shadows.came(index, chain(500))
    shadows.work(FOREVER)
    assert cache.used_extents <= 20


def test_an_index_too_long_to_follow_is_followed_in_part(world):
    index = filled(world)
    shadows = ShadowBoard(world.clock, lambda _: 1_000_000, ("LRU",))
    for number in range(40):
        shadows.came(index, chain(number))
        shadows.work(FOREVER)
    assert 0 < shadows.share < 1
