"""Starting on an arena directory, with real processes around it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import ArenaInUse, ArenaUnusable
from appliance.l1.arena import Arena
from appliance.l1.eviction import make_policy
from appliance.l1.examine import ALL_NAMESPACES
from appliance.l1.opening import Opened, open_arena
from appliance.l1.space import Placement
from appliance.l1.store import Store, Wanted
from appliance.protocol import arena_layout as layout
from appliance.protocol.liveness import INLINE_ATTACH_IDS, forget, is_alive, take_lock
from appliance.server.background import Mailbox
from appliance.server.population import Populator
from tests.support.core_lockholder import REPOSITORY, lock_holder
from tests.support.core_store import CHUNK, EXTENT, ROOT, Clock, Observer, attention, chain, namespace_id

EXTENTS = 32
LIVING, DEAD = 0xA11FE, 0xDEAD


@pytest.fixture
def directory(tmp_path) -> Path:
    path = tmp_path / "arena"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def opening(directory) -> Iterator[Callable[..., Opened]]:
    """Opens the arena as a new boot does; what was open before is closed as a crash leaves it."""
    opened: list[Opened] = []

    def crash() -> None:
        for each in opened:
            each.arena.close(clean=False)
            os.close(each.lock_descriptor)
        opened.clear()

    def start(
        extents: int = EXTENTS, extent_bytes: int = EXTENT, populate: bool = True, cold: bool = False
    ) -> Opened:
        """``cold`` makes the catalog know a clear that the arena lacks: its files can be used, its objects cannot."""
        crash()
        clears = {ALL_NAMESPACES: 1000} if cold else {}
        found = open_arena(
            directory,
            size_bytes=extents * extent_bytes,
            extent_bytes=extent_bytes,
            boot=os.urandom(16),
            clears=clears,
        )
        opened.append(found)
        if populate:
            space = found.arena.spaces[0]
            space.segment.populate(0, extents)
            space.add_populated(extents)
        return found

    yield start
    crash()


def store_on(arena: Arena) -> Store:
    return Store(arena, make_policy("LRU", Clock()), Observer(), Clock())


def reserve(store: Store, key: bytes, attach_id: int, *, extents: int = 1, commit: bool = False) -> Placement:
    index = store.namespace(namespace_id(1), "m", [attention(0)], CHUNK)
    wanted = Wanted(key, ROOT, 0, 0, 0, extents * EXTENT, bytes(16), attach_id)
    _, reserved = store.reserve(index, wanted)
    assert reserved is not None
    if commit:
        store.commit(reserved, 1)
    return reserved.placement


def records(found: Opened) -> np.ndarray:
    return found.arena.spaces[0].segment.read_records()


def extents_of(*placements: Placement) -> set[int]:
    return {e for each in placements for first, n in each.runs for e in range(first, first + n)}


def test_a_first_start_makes_a_private_empty_arena(opening, directory):
    found = opening()
    assert (found.warm, found.object_count, found.limbo_objects) == (False, 0, 0)
    account = found.arena.account()
    assert account.free == account.populated == account.capacity == EXTENTS * EXTENT
    [segment] = directory.glob("segment-*.arena")
    assert segment.stat().st_mode & 0o777 == 0o600
    assert int(found.arena.spaces[0].segment.header()["boot_count"]) == 1


def test_a_cold_start_bumps_every_generation_in_place(opening, directory):
    first = opening()
    store = store_on(first.arena)
    committed = [reserve(store, key, DEAD, extents=3, commit=True) for key in chain(1, 2, 3)]
    before = records(first)["commit_word"].copy()
    path, nonce = first.arena.spaces[0].segment.path, first.arena.nonce
    second = opening(cold=True)
    assert not second.warm
    assert "acknowledged" in second.reason
    assert second.arena.spaces[0].segment.path == path
    assert second.arena.nonce == nonce
    after = records(second)
    assert (after["commit_word"] & np.uint64(1) == 0).all(), "nothing may be found after a cold start"
    assert (after["commit_word"] >> np.uint64(1) > before >> np.uint64(1)).all()
    assert second.arena.account().free == EXTENTS * EXTENT
    again = reserve(store_on(second.arena), chain(9)[0], DEAD, extents=1)
    assert again.generation > committed[0].generation
    header = second.arena.spaces[0].segment.header()
    assert (int(header["boot_count"]), int(header["clean"])) == (2, 0)


def test_the_clean_flag_is_set_by_an_orderly_stop_and_cleared_by_the_next_start(opening):
    first = opening()
    segment = first.arena.spaces[0].segment
    segment.mark_clean()
    assert int(segment.header()["clean"]) == 1
    assert int(opening().arena.spaces[0].segment.header()["clean"]) == 0


@pytest.mark.parametrize("cold", [False, True])
def test_what_a_writer_may_still_write_goes_to_limbo(opening, directory, cold):
    with lock_holder(directory, LIVING):
        store = store_on(opening().arena)
        reserve(store, chain(1)[0], DEAD, extents=2)
        mine = [reserve(store, chain(i)[0], LIVING, extents=3) for i in (2, 3)]
        reserve(store, chain(4)[0], LIVING, extents=2, commit=True)
        found = opening(cold=cold)
        assert found.limbo_objects == 3, "a writer is not yet proven dead"
        account = found.arena.account()
        assert account.limbo == 8 * EXTENT
        assert found.arena.leave_limbo_of(DEAD) == 2
        account = found.arena.account()
        assert account.limbo == 6 * EXTENT
        assert account.free + account.limbo == account.populated == account.capacity
        assert found.arena.limbo_bytes_of(LIVING) == 6 * EXTENT
        table = records(found)
        assert set(np.flatnonzero(table["state"] == layout.STATE_WRITING)) == {p.extent for p in mine}
        # Everything else can be had, none of what it may still write.
        fresh = store_on(found.arena)
        got = [reserve(fresh, chain(50 + i)[0], DEAD) for i in range(EXTENTS - 6)]
        assert not extents_of(*got) & extents_of(*mine)
        assert len(extents_of(*got)) == EXTENTS - 6
        assert found.arena.leave_limbo_of(LIVING) == 6
        assert found.arena.account().free == 6 * EXTENT
        again = [reserve(fresh, chain(90 + i)[0], DEAD) for i in range(6)]
        assert extents_of(*again) == extents_of(*mine)
        assert all(p.generation >= 1 for p in again if p.extent in {each.extent for each in mine})


def test_limbo_survives_a_second_crash(opening, directory):
    with lock_holder(directory, LIVING):
        reserve(store_on(opening().arena), chain(1)[0], LIVING, extents=4)
        assert opening().arena.account().limbo == 4 * EXTENT
        assert opening(cold=True).arena.account().limbo == 4 * EXTENT
        assert opening().arena.account().limbo == 4 * EXTENT
    found = opening()
    assert found.limbo_objects == 1, "only a proof of death, and the grace behind it, ends limbo"
    assert found.arena.leave_limbo_of(LIVING) == 4
    assert found.arena.account().free == EXTENTS * EXTENT
    assert opening().limbo_objects == 0


def test_an_inline_writer_died_with_the_daemon_that_wrote_for_it(opening):
    reserve(store_on(opening().arena), chain(1)[0], INLINE_ATTACH_IDS + 5, extents=4)
    found = opening()
    assert found.limbo_objects == 0
    assert found.arena.account().free == EXTENTS * EXTENT
    assert not (records(found)["state"] == layout.STATE_WRITING).any()


def test_limbo_in_scattered_runs_keeps_every_extent(opening, directory):
    with lock_holder(directory, LIVING):
        first = opening()
        store = store_on(first.arena)
        singles = [reserve(store, chain(i)[0], DEAD) for i in range(EXTENTS)]
        for each in singles[3:20:2]:
            first.arena.free(each.address)
        mine = first.arena.reserve(
            store._record_of(
                store.by_slot[0], Wanted(chain(99)[0], ROOT, 0, 0, 0, 7 * EXTENT, bytes(16), LIVING)
            )
        )
        assert mine is not None
        assert len(mine.runs) == 7
        found = opening()
        found.arena.leave_limbo_of(DEAD)
        free = found.arena.spaces[0].allocator.free_mask
        assert set(np.flatnonzero(~free).tolist()) == extents_of(mine)
        assert found.arena.spaces[0].runs(mine.extent) == list(mine.runs)


def test_accounts_add_up_while_population_goes_on(opening, directory):
    with lock_holder(directory, LIVING):
        store = store_on(opening().arena)
        for i in range(6):
            reserve(store, chain(i)[0], DEAD, extents=4, commit=True)
        reserve(store, chain(9)[0], LIVING, extents=4)
        found = opening(populate=False)

        def check() -> None:
            account = found.arena.account()
            parts = account.free, account.reserved, account.occupied, account.draining, account.limbo
            assert sum(parts) == account.populated <= account.capacity

        check()
        space = found.arena.spaces[0]
        space.add_populated(8)
        check()
        assert found.arena.account().free == 8 * EXTENT
        found.arena.leave_limbo_of(LIVING)
        check()
        assert found.arena.account().free == 12 * EXTENT
        space.add_populated(EXTENTS - 8)
        check()
        assert found.arena.account().free == EXTENTS * EXTENT


def test_the_populator_populates_step_by_step_and_enters_on_the_loop(opening, directory):
    with lock_holder(directory, LIVING):
        mine = reserve(store_on(opening().arena), chain(1)[0], LIVING, extents=4)
        found = opening(populate=False)
        space, mailbox = found.arena.spaces[0], Mailbox()
        try:
            populator = Populator([space], EXTENTS * EXTENT // 2, mailbox)
            assert not populator.progress.initial_done
            assert populator.tick() == 0.0
            assert found.arena.account().free == 0, "extents enter on the loop thread only"
            for work in mailbox.take():
                work()
            assert populator.progress.initial_done
            assert space.allocator.free_extents == EXTENTS - 4
            assert not any(space.allocator.is_free(extent) for extent in extents_of(mine))
            assert found.arena.account().populated == EXTENTS * EXTENT
            assert "100 %" in populator.progress.sentence
            assert populator.tick() > 0
            assert mailbox.take() == []
        finally:
            mailbox.close()


def test_another_shape_replaces_the_file_and_leaves_old_mappings_readable(opening, directory):
    first = opening()
    placement = reserve(store_on(first.arena), chain(1)[0], LIVING)
    segment = first.arena.spaces[0].segment
    offset = segment.shape.extent_offset(placement.extent)
    descriptor = os.open(segment.path, os.O_RDWR)
    mapping = mmap.mmap(descriptor, segment.shape.file_bytes)
    try:
        mapping[offset : offset + 5] = b"bytes"
        second = opening(extents=EXTENTS // 2)
        assert not second.warm
        assert "smaller" in second.reason
        assert not segment.path.exists()
        assert [path.name for path in directory.glob("segment-*")] == [
            second.arena.spaces[0].segment.path.name
        ]
        assert second.arena.nonce != first.arena.nonce
        # A worker that still maps the old file neither crashes nor believes it.
        assert mapping[offset : offset + 5] == b"bytes"
        mapping[offset : offset + 5] = b"later"
        assert mapping[:8] == layout.POISONED
        assert second.arena.account().free == EXTENTS // 2 * EXTENT
    finally:
        mapping.close()
        os.close(descriptor)


@pytest.mark.parametrize("damage", ["empty", "short", "noise", "magic", "version", "truncated", "two"])
def test_files_that_make_no_sense_are_replaced(opening, directory, damage):
    path = opening().arena.spaces[0].segment.path
    good = path.read_bytes()
    if damage == "two":
        (directory / "segment-ff-0000.arena").write_bytes(good)
    else:
        path.write_bytes(
            {
                "empty": b"",
                "short": good[:100],
                "noise": os.urandom(len(good)),
                "magic": b"PWARENA0" + good[8:],
                "version": good[:8] + b"\xff" + good[9:],
                "truncated": good[:-1],
            }[damage]
        )
    found = opening()
    assert not found.warm
    assert found.arena.spaces[0].segment.path != path
    assert len(list(directory.glob("segment-*"))) == 1
    assert found.arena.account().free == EXTENTS * EXTENT


def test_clear_epochs_outlive_a_cold_start(opening):
    first = opening()
    assert first.arena.raise_clear_epoch(bytes([1] * 16)) == 1
    assert first.arena.raise_clear_epoch(bytes([2] * 16)) == 2
    second = opening().arena
    assert [second.clear_epoch_of(bytes([n] * 16)) for n in (1, 2, 3)] == [1, 2, 0]
    assert second.raise_clear_epoch(None) == 3
    third = opening().arena
    assert [third.clear_epoch_of(bytes([n] * 16)) for n in (1, 2, 3)] == [3, 3, 3]
    assert third.raise_clear_epoch(bytes([1] * 16)) == 4


def test_more_clears_than_the_table_holds_undo_none_and_touch_no_record(opening):
    first = opening()
    placement = reserve(store_on(first.arena), chain(1)[0], DEAD)
    record = records(first)[placement.extent].tobytes()
    names = [n.to_bytes(16, "big") for n in range(1, layout.MAX_EPOCH_ROWS + 12)]
    epochs = [first.arena.raise_clear_epoch(name) for name in names]
    assert epochs == list(range(1, len(names) + 1))
    assert records(first)[placement.extent].tobytes() == record, "the epoch table ran into the records"
    second = opening().arena
    assert all(second.clear_epoch_of(name) >= epoch for name, epoch in zip(names, epochs, strict=True)), (
        "a clear was undone"
    )
    assert second.clear_epoch_of(names[-1]) == epochs[-1]


# --- the directory --------------------------------------------------------------------------------------------------


def test_a_second_daemon_is_refused(opening, directory):
    opening()
    program = (
        "import sys; from pathlib import Path; from appliance.errors import *\n"
        "from appliance.l1.opening import open_arena\n"
        "try: open_arena(Path(sys.argv[1]), size_bytes=65536, extent_bytes=4096, boot=bytes(16))\n"
        "except ArenaInUse as error: print(error.code, error.remedy)"
    )
    before = {path.name: path.stat().st_mtime_ns for path in directory.glob("segment-*")}
    command = [sys.executable, "-c", program, str(directory)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=REPOSITORY)
    assert told.stdout.startswith("arena_in_use Stop it")
    assert {path.name: path.stat().st_mtime_ns for path in directory.glob("segment-*")} == before


def test_the_lock_of_a_dead_daemon_hinders_nobody(opening, directory):
    with lock_holder(directory, LIVING) as process:
        (directory / layout.lock_name(LIVING)).rename(directory / "daemon.lock")
        with pytest.raises(ArenaInUse):
            opening()
        process.kill()
        process.wait(timeout=30)
        assert not opening().warm


def test_a_directory_that_everybody_can_write_is_refused(opening, directory):
    directory.chmod(0o777)
    with pytest.raises(ArenaUnusable, match="everybody") as caught:
        opening()
    assert "chmod" in caught.value.remedy
    assert list(directory.glob("segment-*")) == []
    directory.chmod(0o700)
    opening()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArenaUnusable, match="cannot be used"):
        open_arena(tmp_path / "file" / "arena", size_bytes=65536, extent_bytes=4096, boot=bytes(16))


# --- proof of death ---------------------------------------------------------------------------------------------------


def test_a_stopped_process_is_alive(tmp_path):
    with lock_holder(tmp_path, 7) as process:
        assert is_alive(tmp_path, 7)
        process.send_signal(signal.SIGSTOP)
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT) is not None
        assert is_alive(tmp_path, 7)
        process.send_signal(signal.SIGCONT)
        assert is_alive(tmp_path, 7)


def test_a_killed_process_is_dead_even_while_its_forked_child_lives(tmp_path):
    with lock_holder(tmp_path, 7, 8, fork=True) as process:
        assert is_alive(tmp_path, 7)
        process.kill()
        process.wait(timeout=30)
        assert not is_alive(tmp_path, 7)
        assert not is_alive(tmp_path, 8)
        assert (tmp_path / layout.lock_name(7)).exists(), "looking must not remove anything"


def test_probing_does_not_take_the_lock_away(tmp_path):
    with lock_holder(tmp_path, 7):
        assert all(is_alive(tmp_path, 7) for _ in range(5))
        assert take_lock(tmp_path / layout.lock_name(7)) is None


def test_no_file_no_process(tmp_path):
    assert not is_alive(tmp_path, 1)
    forget(tmp_path, 1)
    (tmp_path / layout.lock_name(1)).touch()
    assert not is_alive(tmp_path, 1)
    forget(tmp_path, 1)
    assert not (tmp_path / layout.lock_name(1)).exists()


def test_a_file_that_cannot_be_probed_counts_as_alive(tmp_path):
    (tmp_path / layout.lock_name(1)).mkdir()
    assert is_alive(tmp_path, 1)
