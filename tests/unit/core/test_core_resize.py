"""Starting with another size or extent size: what fits is kept, the longest unused goes, and bytes stay what they are."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from appliance.l1 import moving
from appliance.l1.examine import ALL_NAMESPACES
from appliance.l1.plan import SizeChange, plan_size
from appliance.l1.removals import Removal
from appliance.l1.segment import Segment
from appliance.protocol import arena_layout as layout
from appliance.protocol.arena_layout import SegmentLayout
from tests.support.boots import HYBRID, Boot, Boots, descriptor_of
from tests.support.core_lockholder import lock_holder
from tests.support.core_store import EXTENT, chain

NAMESPACE = descriptor_of(*HYBRID)
ROOM = 1 << 30
LIVING = 0xA11FE


@pytest.fixture
def boots(tmp_path) -> Iterator[Boots]:
    directory = tmp_path / "arena"
    directory.mkdir(mode=0o700)
    made = Boots(directory)
    yield made
    made.end(clean=False)


def fill(boot: Boot, count: int, *, length: int = EXTENT) -> list[bytes]:
    """Store single chunks one second apart; returns their keys, the oldest first."""
    index = boot.namespace(NAMESPACE)
    keys = []
    for number in range(count):
        [key] = chain(100 + number)
        boot.put(index, [key], 0, length=length)
        keys.append(key)
        boot.clock.advance(1.0)
    return keys


def kept(boot: Boot) -> set[bytes]:
    return {key for _, key, _, _ in boot.names()}


@pytest.mark.parametrize("clean", [True, False])
def test_a_smaller_arena_keeps_what_was_used_last(boots, clean):
    boot = boots.start()
    index = boot.namespace(NAMESPACE)
    keys = fill(boot, 40)
    boot.store.touch(index, np.array([index.entry(index.find(keys[0]), 0)], dtype=np.int64))
    [old] = boots.segments()
    descriptor = os.open(old, os.O_RDWR)
    mapping = mmap.mmap(descriptor, 0)
    boots.end(clean=clean)
    boot = boots.start(extents=16, spare_bytes=ROOM)
    assert boot.opened.warm, boot.opened.reason
    assert boot.check_bytes() == 16
    assert boot.opened.left_behind == {"did_not_fit": 24}
    if clean:
        assert kept(boot) == {keys[0], *keys[25:]}, "what was touched last stays, though it was stored first"
    boot.accounts_add_up()
    assert boot.opened.arena.account().free == 0
    assert mapping[:8] == layout.POISONED, "nobody new may attach to the old file"
    assert not old.exists()
    mapping.close()
    os.close(descriptor)
    boots.end(clean=True)
    boot = boots.start()
    assert boot.opened.warm
    assert boot.check_bytes() == 16


@pytest.mark.parametrize(("extents", "extent_bytes"), [(32, 2 * EXTENT), (16, 4 * EXTENT)])
def test_another_extent_size_keeps_what_fits(boots, extents, extent_bytes):
    boot = boots.start()
    index = boot.namespace(NAMESPACE)
    for number, length in enumerate((1, EXTENT, EXTENT + 1, 3 * EXTENT, 5 * EXTENT - 7, 8 * EXTENT)):
        boot.put(index, chain(number), 0, length=length)
    boots.end(clean=True)
    boot = boots.start(extents=extents, extent_bytes=extent_bytes, spare_bytes=ROOM)
    assert boot.opened.warm, boot.opened.reason
    assert boot.check_bytes() == 6
    boot.accounts_add_up()
    boots.end(clean=False)
    boot = boots.start(extents=64, extent_bytes=EXTENT, spare_bytes=ROOM)
    assert boot.opened.warm, boot.opened.reason
    assert boot.check_bytes() == 6


def test_objects_in_scattered_runs_move_whole(boots):
    boot = boots.start()
    index = boot.namespace(NAMESPACE)
    singles = fill(boot, 64)
    for key in singles[3:40:2]:
        boot.store.remove(index, index.find(key), 0, Removal.EVICTED)
    placement = boot.put(index, chain(7), 0, length=9 * EXTENT - 5)
    assert len(placement.runs) > 3
    boots.end(clean=True)
    boot = boots.start(extents=30, spare_bytes=ROOM)
    assert boot.opened.warm, boot.opened.reason
    assert chain(7)[0] in kept(boot)
    boot.check_bytes()


def test_a_segment_that_was_added_goes_again_and_its_objects_move(boots):
    boot = boots.start(extents=20)
    fill(boot, 10)
    boots.end(clean=True)
    boot = boots.start(extents=50)
    index = boot.namespace(NAMESPACE)
    added = [key for number in range(25) for key in chain(1000 + number)]
    for key in added:
        boot.put(index, [key], 0)
        boot.clock.advance(1.0)
    first, second = boots.segments()
    inode = first.stat().st_ino
    boots.end(clean=True)
    boot = boots.start(extents=20)
    assert boot.opened.warm, boot.opened.reason
    assert boots.segments() == [first]
    assert first.stat().st_ino == inode, "no second copy of what stays was needed"
    assert not second.exists()
    assert boot.check_bytes() == 20
    assert boot.opened.left_behind == {"did_not_fit": 15}
    boot.accounts_add_up()
    boots.end(clean=False)
    boot = boots.start(extents=50)
    assert boot.opened.warm
    assert boot.check_bytes() == 20


def test_clears_hold_in_the_arena_that_replaces_another(boots):
    boot = boots.start()
    other = descriptor_of(*HYBRID, model="other")
    boot.put_chain(boot.namespace(other), chain(1, 2))
    boot.put_chain(boot.namespace(NAMESPACE), chain(1, 2))
    epoch, _, _ = boot.store.clear(NAMESPACE.fingerprint.namespace)
    boots.end(clean=True)
    clears = {NAMESPACE.namespace: epoch}
    boot = boots.start(extents=32, spare_bytes=ROOM, clears=clears)
    assert boot.opened.warm, boot.opened.reason
    assert boot.check_bytes() == 6
    assert boot.opened.arena.clear_epoch_of(NAMESPACE.namespace) == epoch
    boots.end(clean=False)
    assert boots.start(clears=clears).opened.warm


def test_what_is_being_written_in_a_file_that_goes_needs_no_limbo(boots):
    """Nobody else is ever given that memory: its file goes with the last process that maps it."""
    with lock_holder(boots.directory, LIVING):
        boot = boots.start()
        index = boot.namespace(NAMESPACE)
        fill(boot, 5)
        boot.reserve(index, chain(9), 0, attach_id=LIVING)
        boots.end(clean=False)
        boot = boots.start(extents=32, spare_bytes=ROOM)
        assert boot.opened.warm
        assert boot.opened.limbo_objects == 0
        assert boot.check_bytes() == 5
        boot.accounts_add_up()


def test_a_crash_in_the_middle_of_a_move_leaves_the_old_arena(boots, monkeypatch):
    boot = boots.start()
    fill(boot, 10)
    boots.end(clean=True)
    written = 0
    real = Segment.write_committed

    def die_at_the_fifth(self, extent, generation, record):
        nonlocal written
        written += 1
        if written == 5:
            raise KeyboardInterrupt
        return real(self, extent, generation, record)

    monkeypatch.setattr(Segment, "write_committed", die_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        boots.start(extents=32, spare_bytes=ROOM)
    monkeypatch.undo()
    boots.forget_lock()
    assert list(boots.directory.glob("unfinished-*")) != []
    boot = boots.start(extents=32, spare_bytes=ROOM)
    assert boot.opened.warm, boot.opened.reason
    assert boot.check_bytes() == 10
    assert list(boots.directory.glob("unfinished-*")) == []


def test_a_mount_that_fills_up_in_the_middle_of_a_move_costs_the_rest_only(boots, monkeypatch):
    boot = boots.start()
    keys = fill(boot, 10)
    boots.end(clean=True)
    written = 0
    real = Segment.write_data

    def full_at_the_fifth(self, runs, offset, data):
        nonlocal written
        written += 1
        if written == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, runs, offset, data)

    monkeypatch.setattr(Segment, "write_data", full_at_the_fifth)
    boot = boots.start(extents=32, spare_bytes=ROOM)
    monkeypatch.undo()
    assert boot.opened.warm
    assert boot.check_bytes() == 4
    assert kept(boot) == set(keys[-4:])
    assert boot.opened.left_behind == {"did_not_fit": 6}
    boot.accounts_add_up()
    boots.end(clean=True)
    assert boots.start().check_bytes() == 4


def test_a_move_has_an_end(boots, monkeypatch):
    boot = boots.start()
    fill(boot, 10)
    boots.end(clean=True)
    monkeypatch.setattr(moving, "MOVE_SECONDS", -1.0)
    boot = boots.start(extents=32, spare_bytes=ROOM)
    assert boot.opened.warm
    assert boot.opened.left_behind == {"did_not_fit": 10}
    boot.accounts_add_up()


def test_an_epoch_for_everybody_survives_a_move(boots):
    boot = boots.start()
    fill(boot, 4)
    assert boot.store.clear(None)[0] == 1
    fill(boot, 3)
    boots.end(clean=True)
    boot = boots.start(extents=32, spare_bytes=ROOM, clears={ALL_NAMESPACES: 1})
    assert boot.opened.warm, boot.opened.reason
    assert boot.check_bytes() == 3


@pytest.mark.parametrize(
    ("have", "wanted", "change", "keep", "new"),
    [
        ([64], 64, SizeChange.NONE, 1, 0),
        ([40, 24], 64, SizeChange.NONE, 2, 0),
        ([64], 65, SizeChange.GROW, 1, 1),
        ([64, 10], 64, SizeChange.DROP, 1, 0),
        ([64, 10, 6], 74, SizeChange.DROP, 2, 0),
        ([64, 10], 70, SizeChange.MOVE, 0, 70),
        ([64], 63, SizeChange.MOVE, 0, 63),
    ],
)
def test_the_plan(have, wanted, change, keep, new):
    plan = plan_size(have, EXTENT, SegmentLayout(wanted, EXTENT), object_bytes=EXTENT, spare_bytes=ROOM)
    assert (plan.change, plan.keep, plan.new_extents, plan.refusal) == (change, keep, new, "")
    assert sum(have[: plan.keep]) + plan.new_extents == wanted
