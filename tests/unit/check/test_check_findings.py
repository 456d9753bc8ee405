"""Every kind of finding is found: the live state or the file is made wrong on purpose, one thing at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from appliance.check.findings import Findings, Kind
from appliance.check.looks import Looks
from appliance.check.runner import check_memory
from appliance.l1.space import ExtentState, split_address
from appliance.leases import LeaseState
from appliance.lookup import entries_of, find
from appliance.protocol import arena_layout as layout
from appliance.protocol.base import Role
from appliance.reservations import ReservationState
from appliance.sessions import Session, SessionTable
from tests.support.core_store import EXTENT, World, attention, chain, recurrent

KEYS = chain(1, 2, 3, 4)
OTHER_KEYS = chain(5, 6)


class Checked:
    """A world with something in every state: objects, leases, reservations, limbo, draining, evicted."""

    def __init__(self) -> None:
        self.world = World(segments=(64, 32))
        world = self.world
        self.sessions = SessionTable(world.clock, 1.0)
        for name in (b"r", b"w"):
            self.sessions.open(Session(name, Role.WORKER, "e", "c", "h", 1, heard_at=world.clock()))
        self.index = world.namespace(1, attention(0, shards=2), recurrent(1))
        world.put_chain(self.index, KEYS, length=3 * EXTENT)
        world.put_chain(self.index, OTHER_KEYS)
        self.lease = self._lease(KEYS)
        doomed = self._lease(OTHER_KEYS[:1])
        assert doomed.entries.size
        world.store.remove(self.index, self.index.find(OTHER_KEYS[0]), 0, self._evicted())
        _, self.writing = world.reserve(self.index, chain(8), 0, 0, length=2 * EXTENT)
        _, revoked = world.reserve(self.index, chain(9), 0, 1, length=2 * EXTENT)
        assert revoked is not None
        world.reservations.end(revoked.reservation_id, ReservationState.EXPIRED)
        self.revoked = revoked

    @staticmethod
    def _evicted():
        from appliance.l1.removals import Removal

        return Removal.EVICTED

    def _lease(self, keys: list[bytes]):
        world, index = self.world, self.index
        found = find(index, world.store.ghosts, keys, 4 * len(keys) + 1)
        entries = entries_of(index, found.rows, found.reach.hit)
        assert found.reach.hit == len(keys)
        return world.leases.grant(b"r", "e", "request", index, found.reach.hit, entries, 300.0)

    def check(self) -> Findings:
        findings = Findings()
        looks = Looks(lambda work: work())
        world = self.world
        check_memory(world.store, world.leases, world.reservations, self.sessions, looks, findings)
        return findings

    # --- where things are -----------------------------------------------------------------------------------

    def address(self, chunk: int = 0, group: int = 0, shard: int = 0) -> int:
        return self.index.address(self.index.find(KEYS[chunk]), group, shard)

    def entry(self, chunk: int = 0, group: int = 0) -> int:
        return self.index.entry(self.index.find(KEYS[chunk]), group)

    def space(self, address: int):
        segment, extent = split_address(address)
        return self.world.arena.spaces[segment], extent

    def write(self, address: int, offset: int, data: bytes) -> None:
        """Into the record of an object, past the daemon."""
        space, extent = self.space(address)
        segment = space.segment
        os.pwrite(self.world.files[segment.index], data, segment.shape.record_offset(extent) + offset)


@pytest.fixture
def checked() -> Iterator[Checked]:
    made = Checked()
    yield made
    made.world.close()


def test_nothing_is_found_where_nothing_is_wrong(checked: Checked):
    findings = checked.check()
    assert findings.shown == []
    assert findings.checked["extents"] == 96
    assert findings.checked["objects"] == 4 * 3 + 2 * 3 - 2
    states = {state for space in checked.world.arena.spaces for state in space.states.tolist()}
    assert states == set(ExtentState), "the world should have something in every state"


def test_nothing_is_found_after_everything_ended(checked: Checked):
    world = checked.world
    for lease in list(world.leases.live):
        world.leases.end(lease, LeaseState.RELEASED)
    world.reservations.end_session(b"w")
    world.reservations.all_stopped(7)
    world.store.clear(None)
    assert checked.check().shown == []
    assert world.arena.account().free == world.arena.account().populated


Corruption = Callable[[Checked], None]


def _word(checked: Checked) -> None:
    checked.write(checked.address(), 0, (12345).to_bytes(8, "little"))


def _uncommitted(checked: Checked) -> None:
    address = checked.address()
    space, extent = checked.space(address)
    checked.write(
        address, 0, layout.word_of(space.generations[extent], committed=False).to_bytes(8, "little")
    )


def _record_state(checked: Checked) -> None:
    checked.write(checked.address(), layout.STATE_OFFSET, bytes((layout.STATE_WRITING,)))


def _record_length(checked: Checked) -> None:
    checked.write(checked.address(), 104, (77).to_bytes(8, "little"))


def _record_checksum(checked: Checked) -> None:
    space, extent = checked.space(checked.address())
    space.checksums[extent] = 99


def _record_crc(checked: Checked) -> None:
    checked.write(checked.address(), layout.CRC_END, b"\1\2\3\4")


def _left_writing(checked: Checked) -> None:
    space = checked.world.arena.spaces[0]
    free = int(np.flatnonzero(space.allocator.free_mask)[0])
    checked.write(free, layout.STATE_OFFSET, bytes((layout.STATE_WRITING,)))


def _links(checked: Checked) -> None:
    space, extent = checked.space(checked.address())
    position = space.segment.shape.links_offset + extent * layout.LINK_BYTES
    os.pwrite(checked.world.files[space.segment.index], b"\x09\0\0\0", position)


def _free_and_owned(checked: Checked) -> None:
    space, extent = checked.space(checked.address())
    space.allocator.free_mask[extent + 1] = True


def _owned_twice(checked: Checked) -> None:
    space, extent = checked.space(checked.address(0))
    _, other = checked.space(checked.address(1))
    counts, _ = space.run_columns()
    assert counts[extent] == 3, "one run, so that the chain can be bent"
    counts.flags.writeable = True
    space._run_counts[extent] = 2
    space._run_nexts[extent] = other + 2
    space._run_counts[other + 2] = 1
    space._run_nexts[other + 2] = layout.NO_LINK


def _chain_in_a_circle(checked: Checked) -> None:
    space, extent = checked.space(checked.address())
    space.extent_counts[extent] = 9
    space._run_nexts[extent] = extent


def _leaked(checked: Checked) -> None:
    checked.world.arena.spaces[0].allocator.allocate(1)


def _by_state(checked: Checked) -> None:
    accounts = checked.world.arena.spaces[0].extents_by_state
    accounts[ExtentState.OCCUPIED] += 1
    accounts[ExtentState.FREE] -= 1


def _populated(checked: Checked) -> None:
    checked.world.arena.spaces[1].populated_extents -= 1


def _forgotten_by_the_index(checked: Checked) -> None:
    from appliance.l1.removals import Removal

    checked.index.take_present(checked.index.find(OTHER_KEYS[1]), 0, Removal.EVICTED)


def _key_leads_astray(checked: Checked) -> None:
    key = KEYS[1]
    checked.index._maps[key[0]][key] = checked.index.find(KEYS[2])


def _key_lost(checked: Checked) -> None:
    del checked.index._maps[KEYS[1][0]][KEYS[1]]


def _row_free_and_used(checked: Checked) -> None:
    checked.index._free_rows.append(checked.index.find(KEYS[1]))


def _addresses_swapped(checked: Checked) -> None:
    view, objects = checked.index._address.view, checked.index.objects_per_row
    one, other = (checked.index.find(key) * objects for key in KEYS[:2])
    view[one], view[other] = view[other], view[one]


def _offered_but_freed(checked: Checked) -> None:
    checked.world.arena.free(checked.address(3, 1))


def _committed_and_pending(checked: Checked) -> None:
    checked.index.pending.view[checked.entry()] |= 1


def _shard_too_many(checked: Checked) -> None:
    checked.index.present.view[checked.entry(0, 1)] |= 2


def _entry_extents(checked: Checked) -> None:
    checked.index.extents.view[checked.entry()] += 1


def _doomed_without_holds(checked: Checked) -> None:
    checked.index.doomed.view[checked.entry(3, 1)] = 1


def _no_address(checked: Checked) -> None:
    checked.index._forget_addresses(checked.index.find(KEYS[0]), 0, 1)


def _objects_total(checked: Checked) -> None:
    checked.index.totals[0].objects += 1


def _extents_total(checked: Checked) -> None:
    checked.index.totals[1].extents -= 1


def _leased_total(checked: Checked) -> None:
    checked.index.totals[0].leased_extents += 2


def _reserved_total(checked: Checked) -> None:
    checked.index.totals[0].reserved_extents = 0


def _one_hold_too_many(checked: Checked) -> None:
    checked.index.holds.view[checked.entry()] += 1


def _lease_forgotten(checked: Checked) -> None:
    del checked.world.leases.live[checked.lease.lease_id]


def _pending_mark_lost(checked: Checked) -> None:
    assert checked.writing is not None
    reserved = checked.writing.reserved
    checked.index.pending.view[checked.index.entry(reserved.row, 0)] = 0


def _reservation_forgotten(checked: Checked) -> None:
    assert checked.writing is not None
    del checked.world.reservations.live[checked.writing.reservation_id]


def _reserved_bytes(checked: Checked) -> None:
    checked.world.reservations.reserved_bytes["e"] += EXTENT


def _limbo_forgotten(checked: Checked) -> None:
    checked.world.arena.limbo_by_attach.clear()


def _limbo_of_a_free_extent(checked: Checked) -> None:
    free = int(np.flatnonzero(checked.world.arena.spaces[0].allocator.free_mask)[0])
    checked.world.arena.limbo_by_attach.setdefault(7, set()).add(free)


def _session_ended(checked: Checked) -> None:
    session = checked.sessions.get(b"r")
    assert session is not None
    checked.sessions.remove(session)


def _session_names_nothing(checked: Checked) -> None:
    checked.world.leases.by_session[b"r"].add(4711)


def _lost_stamp(checked: Checked) -> None:
    checked.world.store.policy._stamps[checked.index.slot][checked.entry()] = 0


def _lost_log_record(checked: Checked) -> None:
    policy = checked.world.store.policy
    policy._head = policy._tail - 1


def _clear_undone(checked: Checked) -> None:
    checked.world.arena.raise_clear_epoch(None)


CORRUPTIONS: list[tuple[Kind, Corruption]] = [
    (Kind.RECORD, _word),
    (Kind.RECORD, _uncommitted),
    (Kind.OBJECT, _uncommitted),
    (Kind.RECORD, _record_state),
    (Kind.RECORD, _record_length),
    (Kind.RECORD, _record_checksum),
    (Kind.RECORD, _record_crc),
    (Kind.RECORD, _left_writing),
    (Kind.LINKS, _links),
    (Kind.OWNERSHIP, _free_and_owned),
    (Kind.OWNERSHIP, _owned_twice),
    (Kind.OWNERSHIP, _chain_in_a_circle),
    (Kind.OWNERSHIP, _leaked),
    (Kind.ACCOUNTING, _by_state),
    (Kind.ACCOUNTING, _populated),
    (Kind.UNINDEXED, _forgotten_by_the_index),
    (Kind.ROW, _key_leads_astray),
    (Kind.ROW, _key_lost),
    (Kind.ROW, _row_free_and_used),
    (Kind.OBJECT, _addresses_swapped),
    (Kind.OBJECT, _offered_but_freed),
    (Kind.ENTRY, _committed_and_pending),
    (Kind.ENTRY, _shard_too_many),
    (Kind.ENTRY, _entry_extents),
    (Kind.ENTRY, _doomed_without_holds),
    (Kind.ENTRY, _no_address),
    (Kind.TOTALS, _objects_total),
    (Kind.TOTALS, _extents_total),
    (Kind.TOTALS, _leased_total),
    (Kind.TOTALS, _reserved_total),
    (Kind.HOLDS, _one_hold_too_many),
    (Kind.HOLDS, _lease_forgotten),
    (Kind.RESERVATION, _pending_mark_lost),
    (Kind.RESERVATION, _reservation_forgotten),
    (Kind.RESERVATION, _reserved_bytes),
    (Kind.LIMBO, _limbo_forgotten),
    (Kind.LIMBO, _limbo_of_a_free_extent),
    (Kind.SESSION, _session_ended),
    (Kind.SESSION, _session_names_nothing),
    (Kind.EVICTION, _lost_stamp),
    (Kind.EVICTION, _lost_log_record),
    (Kind.CLEARED, _clear_undone),
]


@pytest.mark.parametrize(
    ("kind", "corrupt"), CORRUPTIONS, ids=[f"{kind}-{each.__name__.strip('_')}" for kind, each in CORRUPTIONS]
)
def test_what_is_wrong_is_found_and_named(checked: Checked, kind: Kind, corrupt: Corruption):
    corrupt(checked)
    found = [finding for finding in checked.check().shown if finding.kind == kind]
    assert found, f"no {kind} finding"
    for finding in found:
        assert finding.sentence.startswith(finding.subject)
        assert finding.sentence.endswith(".")
        assert finding.sentence.count("\n") == 0


def test_every_kind_has_a_corruption():
    assert {kind for kind, _ in CORRUPTIONS} == set(Kind)


def test_findings_are_bounded_but_counted():
    findings = Findings()
    for extent in range(700):
        findings.add(Kind.RECORD, f"Extent {extent}", "is wrong")
    assert (len(findings.shown), findings.total) == (500, 700)
