"""The amnesty behind a warm restart: who is waited for, and how it ends."""

from __future__ import annotations

import pytest

from appliance.protocol.arena_layout import lock_name
from appliance.protocol.base import Grant
from appliance.server.amnesty import AMNESTY_SECONDS, Amnesty
from tests.support.core_lockholder import lock_holder
from tests.support.core_store import World, attention, chain

FIRST, SECOND = 0xA1, 0xB2


@pytest.fixture
def world():
    made = World(segments=(4,))
    yield made
    made.close()


def full(world: World):
    index = world.namespace(1, attention(0))
    for number in range(4):
        world.put(index, chain(number), 0, 0)
    return index


def test_it_waits_for_those_who_hold_a_lock_and_ends_when_each_is_back_or_dead(world):
    index = full(world)
    (world.directory / lock_name(0xDEAD)).write_text("")
    (world.directory / "attach-notanumber00000.lock").write_text("")
    amnesty = Amnesty(world.store)
    with lock_holder(world.directory, FIRST, SECOND):
        amnesty.begin(world.directory, 100.0)
    assert amnesty.waiting == {FIRST, SECOND}
    assert world.reserve(index, chain(9), 0, 0)[0] is Grant.WARMING
    assert world.store.evict_down_to(0, at_most=10) == 0
    amnesty.advance({FIRST}, set(), 101.0)
    assert world.reserve(index, chain(9), 0, 0)[0] is Grant.WARMING
    amnesty.advance(set(), {SECOND}, 102.0)
    assert world.reserve(index, chain(9), 0, 0)[0] is Grant.GRANTED


def test_it_never_lasts_longer_than_its_time(world):
    index = full(world)
    amnesty = Amnesty(world.store)
    with lock_holder(world.directory, FIRST):
        amnesty.begin(world.directory, 100.0)
    amnesty.advance(set(), set(), 100.0 + AMNESTY_SECONDS - 0.1)
    assert world.reserve(index, chain(9), 0, 0)[0] is Grant.WARMING
    amnesty.advance(set(), set(), 100.0 + AMNESTY_SECONDS)
    assert world.reserve(index, chain(9), 0, 0)[0] is Grant.GRANTED


def test_without_anybody_there_is_none(world):
    index = full(world)
    amnesty = Amnesty(world.store)
    amnesty.begin(world.directory, 100.0)
    assert world.reserve(index, chain(9), 0, 0)[0] is Grant.GRANTED


def test_free_memory_is_given_out_all_the_same(world):
    index = world.namespace(1, attention(0))
    amnesty = Amnesty(world.store)
    with lock_holder(world.directory, FIRST):
        amnesty.begin(world.directory, 0.0)
    assert world.reserve(index, chain(1), 0, 0)[0] is Grant.GRANTED
