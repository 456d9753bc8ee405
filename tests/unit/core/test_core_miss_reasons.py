"""Each reason for a shortfall, for states that the real store was brought into."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Ghosts, Removal
from appliance.leases import LeaseState
from appliance.lookup import Outcome, entries_of, find
from appliance.protocol.base import MissReason
from appliance.reservations import ReservationState
from tests.support.core_store import CHUNK, EXTENT, World, attention, chain, namespace_id, recurrent, sliding


@pytest.fixture
def world() -> Iterator[World]:
    made = World(segments=(32,))
    yield made
    made.close()


def look(world: World, index: NamespaceIndex, keys: list[bytes], *, refused: tuple[int, ...] = ()) -> Outcome:
    return find(index, world.store.ghosts, keys, len(keys) * CHUNK + 1, refused)


def test_whole_hit_has_no_reason(world):
    index = world.namespace(1, attention(0), recurrent(1))
    keys = chain(1, 2)
    world.put_chain(index, keys)
    found = look(world, index, keys)
    assert (found.reach.hit, found.reason, found.detail) == (2, None, "")


def test_too_short(world):
    index = world.namespace(1, attention(0))
    keys = chain(1)
    world.put_chain(index, keys)
    assert find(index, world.store.ghosts, keys, CHUNK).reason is MissReason.TOO_SHORT
    assert find(index, world.store.ghosts, [], 3).reason is MissReason.TOO_SHORT
    assert find(index, world.store.ghosts, keys, CHUNK + 1).reason is None


def test_never_stored(world):
    index = world.namespace(1, attention(0))
    world.put_chain(index, chain(1, 2))
    found = look(world, index, chain(1, 2, 3))
    assert (found.reach.hit, found.reason) == (2, MissReason.NEVER_STORED)
    assert "chunk 3" in found.detail


def test_being_stored_counts_as_never_stored_and_says_so(world):
    index = world.namespace(1, attention(0))
    world.reserve(index, chain(1), 0, 0)
    found = look(world, index, chain(1))
    assert found.reason is MissReason.NEVER_STORED
    assert "being stored" in found.detail


def test_evicted(world):
    index = world.namespace(1, attention(0))
    keys = chain(1, 2)
    world.put_chain(index, keys)
    world.store.evict_down_to(EXTENT, at_most=1)
    found = look(world, index, keys)
    assert (found.reach.hit, found.reason) == (1, MissReason.EVICTED)


def test_evicted_is_told_while_the_row_lives_on_for_another_group(world):
    index = world.namespace(1, attention(0), attention(1))
    keys = chain(1)
    world.put_chain(index, keys)
    world.store.evict_down_to(EXTENT, at_most=1)
    assert index.find(keys[0]) >= 0
    assert look(world, index, keys).reason is MissReason.EVICTED


def test_recurrent_state_missing_names_the_boundary(world):
    index = world.namespace(1, attention(0), recurrent(1))
    keys = chain(1, 2, 3)
    for chunk in range(3):
        world.put(index, keys, chunk, 0)
    world.put(index, keys, 0, 1)
    found = look(world, index, keys)
    assert (found.reach.hit, found.reach.attention) == (1, 3)
    assert found.reason is MissReason.RECURRENT_MISSING


def test_an_evicted_state_is_evicted(world):
    index = world.namespace(1, attention(0), recurrent(1))
    keys = chain(1, 2)
    world.put_chain(index, keys)
    world.store.remove(index, index.find(keys[1]), 1, Removal.EVICTED)
    found = look(world, index, keys)
    assert (found.reach.hit, found.reason) == (1, MissReason.EVICTED)


def test_a_gap_inside_a_window_is_named_where_it_is(world):
    """The chunk at the boundary itself is there: what is missing lies before it."""
    index = world.namespace(1, attention(0), recurrent(1), sliding(2, 2))
    keys = chain(1, 2, 3)
    world.put_chain(index, keys)
    world.store.remove(index, index.find(keys[1]), 2, Removal.EVICTED)
    found = look(world, index, keys)
    assert found.reach.hit == 1
    assert found.reason is MissReason.EVICTED, "no snapshot is missing: the window's second chunk was evicted"
    assert "chunk 2, group 2" in found.detail


def test_rank_missing(world):
    index = world.namespace(1, attention(0, shards=4))
    keys = chain(1)
    for shard in (0, 2):
        world.put(index, keys, 0, 0, shard)
    found = look(world, index, keys)
    assert found.reason is MissReason.RANK_MISSING
    assert "[1, 3]" in found.detail


@pytest.mark.parametrize("cause", [ReservationState.EXPIRED, ReservationState.SESSION_ENDED])
def test_write_expired(world, cause):
    index = world.namespace(1, attention(0))
    _, reservation = world.reserve(index, chain(1), 0, 0)
    world.reservations.end(reservation.reservation_id, cause)
    assert look(world, index, chain(1)).reason is MissReason.WRITE_EXPIRED


def test_an_abort_leaves_the_reason_of_before(world):
    index = world.namespace(1, attention(0))
    keys = chain(1)
    _, reservation = world.reserve(index, keys, 0, 0)
    world.reservations.end(reservation.reservation_id, ReservationState.ABORTED)
    assert look(world, index, keys).reason is MissReason.NEVER_STORED
    world.put_chain(index, keys)
    world.store.evict_down_to(0, at_most=1)
    _, reservation = world.reserve(index, keys, 0, 0)
    world.reservations.end(reservation.reservation_id, ReservationState.ABORTED)
    assert look(world, index, keys).reason is MissReason.EVICTED


@pytest.mark.parametrize("held", [False, True])
def test_quarantined(world, held):
    index = world.namespace(1, attention(0))
    keys = chain(1)
    world.put_chain(index, keys)
    lease = None
    if held:
        found = look(world, index, keys)
        lease = world.leases.grant(b"s", "e", "r", index, 1, entries_of(index, found.rows, 1), 300.0)
    world.store.remove(index, index.find(keys[0]), 0, Removal.QUARANTINED)
    assert look(world, index, keys).reason is MissReason.QUARANTINED
    if lease is not None:
        world.leases.end(lease.lease_id, LeaseState.RELEASED)
        assert look(world, index, keys).reason is MissReason.QUARANTINED
    assert index.row_count == 0, "the row of a chunk that is gone goes too"
    world.put_chain(index, keys)
    assert look(world, index, keys).reason is None


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_cleared(world, held, everywhere):
    index = world.namespace(1, attention(0))
    keys = chain(1)
    world.put_chain(index, keys)
    lease = None
    if held:
        found = look(world, index, keys)
        lease = world.leases.grant(b"s", "e", "r", index, 1, entries_of(index, found.rows, 1), 300.0)
    world.store.clear(None if everywhere else namespace_id(1))
    if lease is not None:
        assert world.arena.account().draining == EXTENT
        world.leases.end(lease.lease_id, LeaseState.RELEASED)
    found = look(world, index, keys)
    assert found.reason is MissReason.EVICTED
    assert "cleared" in found.detail
    assert world.arena.account().free == world.arena.account().populated


def test_stranded(world):
    index = world.namespace(1, attention(0, shards=2))
    world.store.incomplete_grace_seconds = 1.0
    world.put(index, chain(1), 0, 0, 0)
    world.put_chain(index, chain(*range(10, 25)))
    world.put(index, chain(30), 0, 0, 0)
    world.clock.advance(2.0)
    world.reserve(index, chain(31), 0, 0)
    found = look(world, index, chain(1))
    assert found.reason is MissReason.EVICTED
    assert "never committed" in found.detail


def test_chunks_refused_to_a_request_are_not_called_never_stored(world):
    index = world.namespace(1, attention(0))
    keys = chain(1, 2, 3)
    world.put_chain(index, keys)
    found = look(world, index, keys, refused=(1,))
    assert (found.reach.hit, found.reason) == (1, MissReason.QUARANTINED)
    assert "failed to load" in found.detail
    assert look(world, index, keys).reach.hit == 3


def test_memory_of_removals_is_bounded_and_forgets_the_oldest():
    ghosts = Ghosts(capacity=2)
    for key in (b"a", b"b", b"a", b"c"):
        ghosts.remember(0, key, Removal.EVICTED)
    assert len(ghosts) == 2
    assert ghosts.cause(0, b"b") is Removal.NONE
    assert ghosts.cause(0, b"a") is ghosts.cause(0, b"c") is Removal.EVICTED
    assert ghosts.cause(1, b"a") is Removal.NONE
