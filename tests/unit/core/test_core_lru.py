"""Least recently used: exact order, and what goes before everything else."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from appliance.errors import InvalidSettings
from appliance.l1.eviction import EvictionPolicy, make_policy, policy_named
from appliance.l1.eviction.lru import LeastRecentlyUsed
from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Removal
from appliance.leases import LeaseState
from appliance.lookup import entries_of, find
from appliance.protocol.base import Grant
from tests.support.core_store import CHUNK, EXTENT, World, attention, chain, namespace_id, recurrent


@pytest.fixture
def world() -> Iterator[World]:
    made = World(segments=(24,))
    yield made
    made.close()


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def bare_index(slot: int, rows: int) -> NamespaceIndex:
    return NamespaceIndex(slot, bytes(16), "m", [attention(0)], CHUNK, rows)


def order(policy: EvictionPolicy) -> list[tuple[int, int]]:
    """Every candidate, none of them taken."""
    return [(slot, entry) for slot, batch in policy.candidates(1) for entry in batch.tolist()]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["touch", "touch", "touch", "remove", "evict", "look"]),
        st.integers(0, 1),
        st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True),
    ),
    max_size=80,
)


@given(OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_order_is_that_of_an_ordered_map(operations):
    policy = LeastRecentlyUsed()
    indexes = [bare_index(0, 12), bare_index(1, 12)]
    for index in indexes:
        policy.add_namespace(index)
    naive: OrderedDict[tuple[int, int], None] = OrderedDict()
    for what, slot, entries in operations:
        if what == "touch":
            policy.touched(indexes[slot], numbers(*entries))
            for entry in entries:
                naive.pop((slot, entry), None)
                naive[slot, entry] = None
        elif what == "remove":
            policy.removed(indexes[slot], numbers(entries[0]))
            naive.pop((slot, entries[0]), None)
        elif what == "evict":
            for of_slot, batch in policy.candidates(1):
                assert (of_slot, batch[0]) == next(iter(naive))
                policy.removed(indexes[of_slot], batch[:1])
                naive.popitem(last=False)
                break
        else:
            assert order(policy) == list(naive), "what nobody takes must keep its order and come again"
    assert order(policy) == list(naive)


def test_the_rest_of_a_batch_keeps_its_place_and_what_was_passed_over_does_not():
    policy = LeastRecentlyUsed()
    index = bare_index(0, 8)
    policy.add_namespace(index)
    policy.touched(index, numbers(0, 1, 2, 3, 4))
    for _, batch in policy.candidates(1):
        assert batch.tolist() == [0, 1, 2, 3, 4]
        policy.removed(index, numbers(1))
        break
    assert order(policy) == [(0, 2), (0, 3), (0, 4), (0, 0)]


def test_a_batch_frees_about_what_is_asked_for():
    policy = LeastRecentlyUsed()
    index = bare_index(0, 8)
    policy.add_namespace(index)
    index.extents.array[:] = 3
    policy.touched(index, numbers(0, 1, 2, 3, 4))
    assert [batch.tolist() for _, batch in policy.candidates(5)] == [[0, 1], [2, 3], [4]]
    policy.demoted(index, numbers(4, 2, 1))
    assert next(policy.candidates(6))[1].tolist() == [4, 2]


def test_compaction_of_the_log_loses_and_reorders_nothing():
    policy = LeastRecentlyUsed()
    index = bare_index(0, 50)
    policy.add_namespace(index)
    naive: OrderedDict[int, None] = OrderedDict()
    generator = np.random.default_rng(7)
    for _ in range(600):
        batch = generator.permutation(50)[: generator.integers(1, 30)]
        policy.touched(index, batch.astype(np.int64))
        for entry in batch.tolist():
            naive.pop(entry, None)
            naive[entry] = None
    assert len(policy._log) < 2500, "the log must follow the live entries, not the touches"
    assert [entry for _, entry in order(policy)] == list(naive)


def test_a_batch_longer_than_the_log_fits():
    policy = LeastRecentlyUsed()
    index = bare_index(0, 5000)
    policy.add_namespace(index)
    policy.touched(index, np.arange(5000))
    policy.touched(index, np.arange(5000)[::-1])
    first = [entry for _, entry in order(policy)][:3]
    assert first == [4999, 4998, 4997]


def test_each_look_meets_an_entry_once():
    policy = LeastRecentlyUsed()
    index = bare_index(0, 4)
    policy.add_namespace(index)
    policy.touched(index, numbers(2, 0, 3))
    assert [entry for _, entry in order(policy)] == [2, 0, 3]
    assert [entry for _, entry in order(policy)] == [2, 0, 3]


def test_demoted_entries_go_first_and_only_while_nothing_happened_to_them():
    policy = LeastRecentlyUsed()
    index = bare_index(0, 8)
    policy.add_namespace(index)
    policy.touched(index, numbers(0, 1, 2, 3, 4))
    policy.demoted(index, numbers(4, 3, 2, 1))
    policy.touched(index, numbers(3))
    policy.removed(index, numbers(2))
    policy.touched(index, numbers(2))  # another chunk got the number of the one that went
    policy.removed(index, numbers(1))
    found = [entry for _, entry in order(policy)]
    assert found == [4, 0, 4, 3, 2], "a demoted one that nobody took stands where it stood"


def test_policy_names():
    assert policy_named("lru") == policy_named("LRU") == "LRU"
    with pytest.raises(InvalidSettings) as caught:
        make_policy("ARC", time.monotonic)
    assert caught.value.details["field"] == "eviction_policy"


# --- through the store -------------------------------------------------------------------------------------------


def stored(index: NamespaceIndex, keys: list[bytes], group: int) -> list[bool]:
    return [
        index.find(key) >= 0 and bool(index.present.view[index.entry(index.find(key), group)]) for key in keys
    ]


def test_deep_chunks_of_a_chain_go_before_shallow_ones(world):
    index = world.namespace(1, attention(0))
    keys = chain(1, 2, 3, 4, 5, 6)
    world.put_chain(index, keys)
    gone = []
    world.observer.on_removed = lambda each: gone.append(keys.index(each[1]))
    world.store.evict_down_to(2 * EXTENT, at_most=100)
    assert gone == [5, 4, 3, 2]
    assert stored(index, keys, 0) == [True, True, False, False, False, False]


def test_a_lookup_keeps_its_chain_in_that_order(world):
    index = world.namespace(1, attention(0))
    old, new = chain(1, 2, 3), chain(7, 8, 9)
    world.put_chain(index, old)
    world.put_chain(index, new)
    found = find(index, world.store.ghosts, old, 3 * CHUNK + 1)
    world.store.touch(index, entries_of(index, found.rows, found.reach.hit))
    gone = []
    world.observer.on_removed = lambda each: gone.append(each[1])
    world.store.evict_down_to(0, at_most=100)
    assert gone == [*reversed(new), *reversed(old)]


def test_evicting_a_chunk_demotes_its_descendants_deepest_first(world):
    index = world.namespace(1, attention(0), recurrent(1))
    keys, other = chain(1, 2, 3), chain(7)
    world.put_chain(index, other)
    world.put_chain(index, keys)
    rows = index.rows_of(keys)
    # The first chunk's attention is the least recently used of all, everything behind it the most recently used.
    for row in rows[1:].tolist():
        world.store.touch(index, numbers(index.entry(row, 0), index.entry(row, 1)))
    world.store.touch(index, numbers(index.entry(int(rows[0]), 1)))
    gone = []
    world.observer.on_removed = lambda each: gone.append((each[1], each[2]))
    world.store.evict_down_to(0, at_most=3)
    assert gone[:2] == [(other[0], 1), (other[0], 0)]
    assert gone[2] == (keys[0], 0)
    del gone[:]
    world.store.evict_down_to(0, at_most=100)
    assert [key for key, _ in gone] == [keys[2], keys[2], keys[1], keys[1], keys[0]]


def test_a_row_that_is_used_again_is_not_demoted(world):
    """The chunk that took an evicted one's row is fresh and stays."""
    index = world.namespace(1, attention(0))
    filler = [chain(100 + i) for i in range(24)]
    for keys in filler:
        world.put_chain(index, keys)
    for i in range(10):
        world.put_chain(index, chain(200 + i))
    left = [i for i in range(24) if stored(index, filler[i], 0)[0]]
    assert left == list(range(10, 24)), "LRU evicts what is oldest, not what came last"
    assert all(stored(index, chain(200 + i), 0)[0] for i in range(10))


def test_held_entries_are_skipped_and_come_back(world):
    index = world.namespace(1, attention(0))
    held, free = chain(1, 2), chain(3, 4)
    world.put_chain(index, held)
    world.put_chain(index, free)
    found = find(index, world.store.ghosts, held, 2 * CHUNK + 1)
    entries = entries_of(index, found.rows, 2)
    lease = world.leases.grant(b"s", "e", "r", index, 2, entries, 300.0)
    world.store.evict_down_to(0, at_most=100)
    assert stored(index, held, 0) == [True, True]
    assert stored(index, free, 0) == [False, False]
    world.leases.end(lease.lease_id, LeaseState.RELEASED)
    assert world.store.evict_down_to(0, at_most=100) == 2
    assert world.arena.account().occupied == 0


def test_pinned_entries_are_skipped(world):
    index = world.namespace(1, attention(0))
    keys = chain(1, 2)
    world.put_chain(index, keys)
    index.pins.view[index.entry(index.find(keys[1]), 0)] = 1
    index.any_pins = True
    world.store.evict_down_to(0, at_most=100)
    assert stored(index, keys, 0) == [False, True]
    assert index.pinned_extents() == 1


def test_nothing_that_is_held_is_given_for_room(world):
    index = world.namespace(1, attention(0))
    keys = chain(*range(24))
    world.put_chain(index, keys)
    found = find(index, world.store.ghosts, keys, 24 * CHUNK + 1)
    world.leases.grant(b"s", "e", "r", index, 24, entries_of(index, found.rows, 24), 300.0)
    assert world.reserve(index, chain(99), 0, 0)[0] is Grant.OUT_OF_SPACE
    assert not world.store.make_room(1)
    assert world.observer.gone == []


def test_room_is_counted_in_bytes_not_objects(world):
    small = world.namespace(1, attention(0))
    large = world.namespace(2, attention(0))
    keys = [chain(i) for i in range(12)]
    for each in keys:
        world.put_chain(small, each)
    world.put_chain(large, chain(50, 51), length=6 * EXTENT)
    assert world.arena.account().free == 0
    gone = []
    world.observer.on_removed = lambda each: gone.append((each[0], each[4]))
    grant, _ = world.reserve(large, chain(60), 0, 0, length=5 * EXTENT)
    assert grant is Grant.GRANTED
    assert gone == [(namespace_id(1), 1)] * 5, "as many old small ones as the large one needs, no more"


def test_an_object_larger_than_a_segment_evicts_nothing(world):
    index = world.namespace(1, attention(0))
    world.put_chain(index, chain(1, 2, 3))
    assert world.reserve(index, chain(9), 0, 0, length=25 * EXTENT)[0] is Grant.OUT_OF_SPACE
    assert world.observer.gone == []


def test_background_eviction_stops_at_the_watermark_and_at_its_bound(world):
    index = world.namespace(1, attention(0))
    world.put_chain(index, chain(*range(20)))
    assert world.store.evict_down_to(15 * EXTENT, at_most=3) == 3
    assert world.arena.account().occupied == 17 * EXTENT
    assert world.store.evict_down_to(15 * EXTENT, at_most=100) == 2
    assert world.arena.account().occupied == 15 * EXTENT
    assert world.store.evict_down_to(15 * EXTENT, at_most=100) == 0


def test_sets_that_lack_a_shard_go_first_once_their_writer_is_overdue(world):
    index = world.namespace(1, attention(0, shards=2))
    world.store.incomplete_grace_seconds = 600.0
    old, half = chain(1), chain(2)
    world.put_chain(index, old)
    for i in range(10):
        world.put_chain(index, chain(100 + i))
    world.put(index, half, 0, 0, shard=0)
    world.put(index, chain(3), 0, 0, shard=0)
    world.clock.advance(599.0)
    assert world.arena.account().free == 0
    assert world.reserve(index, chain(4), 0, 0)[0] is Grant.GRANTED
    assert world.observer.gone[-1][1:4] == (old[0], 0, Removal.EVICTED)
    world.reserve(index, chain(4), 0, 0, shard=1)
    world.clock.advance(2.0)
    assert world.reserve(index, chain(5), 0, 0)[0] is Grant.GRANTED
    assert world.observer.gone[-1][1:4] == (half[0], 0, Removal.STRANDED)


def test_a_set_whose_last_shard_is_being_written_is_not_stranded(world):
    index = world.namespace(1, attention(0, shards=2))
    world.store.incomplete_grace_seconds = 5.0
    half = chain(1)
    world.put(index, half, 0, 0, shard=0)
    for i in range(11):
        world.put_chain(index, chain(100 + i))
    grant, writing = world.reserve(index, half, 0, 0, shard=1)
    assert grant is Grant.GRANTED
    world.clock.advance(6.0)
    assert world.reserve(index, chain(7), 0, 0)[0] is Grant.GRANTED
    assert stored(index, half, 0) == [True]
    assert writing is not None
    assert world.reservations.commit(b"w", writing.reservation_id, 0) is not None
    assert index.is_full(index.find(half[0]), 0)
    assert not world.store._incomplete
