"""Each gate of a restart alone: files that only it refuses, its words, and what a cold start makes of them."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from appliance.l1.examine import ALL_NAMESPACES
from appliance.l1.gates import GateLog, GateName, GateOutcome
from appliance.l1.removals import Removal
from appliance.protocol import arena_layout as layout
from tests.support.boots import HYBRID, Boot, Boots, descriptor_of
from tests.support.core_store import EXTENT, chain

KEYS = chain(1, 2, 3)
PER_CHUNK = 3
NAMESPACE = descriptor_of(*HYBRID)
HEADER_FIELDS = layout.HEADER.fields
RECORD_FIELDS = layout.RECORD.fields
assert HEADER_FIELDS is not None
assert RECORD_FIELDS is not None


@pytest.fixture
def boots(tmp_path) -> Iterator[Boots]:
    directory = tmp_path / "arena"
    directory.mkdir(mode=0o700)
    made = Boots(directory)
    yield made
    made.end(clean=False)


@pytest.fixture
def stored(boots) -> Boots:
    """An arena with three chunks in it, after an orderly stop."""
    boot = boots.start()
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    boots.end(clean=True)
    return boots


def edit(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def edit_header(path: Path, field: str, value: int) -> None:
    edit(path, HEADER_FIELDS[field][1], np.array(value, dtype=layout.HEADER[field]).tobytes())


def read_records(path: Path, extents: int) -> np.ndarray:
    shape = layout.SegmentLayout(extents, EXTENT)
    with path.open("rb") as file:
        file.seek(shape.records_offset)
        return np.frombuffer(file.read(extents * layout.RECORD_BYTES), dtype=layout.RECORD)


def outcomes(boot: Boot) -> dict[str, str]:
    assert [gate.name for gate in boot.opened.gates] == list(GateName), "every gate is told, in order"
    return {gate.name.value: gate.outcome.value for gate in boot.opened.gates}


def is_cold_at(boot: Boot, gate: GateName, words: str) -> None:
    """The gate failed and no other; everything before it passed, everything behind it was not reached."""
    place = list(GateName).index(gate)
    expected = ["passed"] * place + ["failed"] + ["skipped"] * (len(GateName) - place - 1)
    assert list(outcomes(boot).values()) == expected
    assert not boot.opened.warm
    assert boot.opened.reason == boot.opened.gates[place].reason
    assert words in boot.opened.reason
    assert boot.check_bytes() == 0
    boot.accounts_add_up()
    # What was refused once is not met again: the next start is warm with what is stored now.
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)


def is_warm(boot: Boot, objects: int) -> None:
    assert set(outcomes(boot).values()) == {"passed"}, boot.opened.reason
    assert boot.opened.warm
    assert boot.check_bytes() == boot.opened.object_count == objects
    boot.accounts_add_up()


def test_all_gates_open_and_every_object_is_back(stored):
    boot = stored.start()
    is_warm(boot, 3 * PER_CHUNK)
    assert boot.opened.clean_stop
    assert boot.opened.left_behind == {}
    stored.end(clean=True)
    is_warm(stored.start(), 3 * PER_CHUNK)


def test_a_first_start_has_nothing_to_judge(boots):
    boot = boots.start()
    assert outcomes(boot) == {"lock": "passed", **dict.fromkeys(list(GateName)[1:], "skipped")}
    assert boot.opened.reason == "There was no arena."
    assert not boot.opened.clean_stop


@pytest.mark.parametrize("change", [-4096, -1, 4096])
def test_size(stored, change):
    [path] = stored.segments()
    os.truncate(path, path.stat().st_size + change)
    is_cold_at(stored.start(), GateName.SIZE, "its header says")
    stored.end(clean=True)
    is_warm(stored.start(), 3 * PER_CHUNK)


@pytest.mark.parametrize(
    ("magic", "words"), [(b"PWARENA0", "no segment of an arena"), (layout.POISONED, "was given up")]
)
def test_magic(stored, magic, words):
    edit(stored.segments()[0], 0, magic)
    is_cold_at(stored.start(), GateName.MAGIC, words)
    stored.end(clean=True)
    is_warm(stored.start(), 3 * PER_CHUNK)


def test_schema(stored):
    edit_header(stored.segments()[0], "layout", layout.LAYOUT_VERSION + 1)
    is_cold_at(stored.start(), GateName.SCHEMA, f"arena layout version {layout.LAYOUT_VERSION + 1}")
    stored.end(clean=True)
    is_warm(stored.start(), 3 * PER_CHUNK)


def _move_records(path: Path) -> None:
    edit_header(path, "records_offset", 8192)


def _call_it_another(path: Path) -> None:
    edit_header(path, "segment", 1)


def _copy_it(path: Path) -> None:
    path.with_name("segment-ff-0001.arena").write_bytes(path.read_bytes())


def _another_arena_beside_it(path: Path) -> None:
    nonce = b"\xff" * 16  # behind any other by name
    copy = path.with_name(layout.segment_name(nonce, 1))
    copy.write_bytes(path.read_bytes())
    edit(copy, HEADER_FIELDS["nonce"][1], nonce)
    edit_header(copy, "segment", 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_move_records, "records_offset 8192"),
        (_call_it_another, "calls itself segment 1"),
        (_copy_it, "calls itself segment 0"),
        (_another_arena_beside_it, "are of two arenas"),
    ],
)
def test_layout(stored, damage, words):
    damage(stored.segments()[0])
    boot = stored.start()
    is_cold_at(boot, GateName.LAYOUT, words)
    assert len(stored.segments()) == 1
    stored.end(clean=True)
    is_warm(stored.start(), 3 * PER_CHUNK)


@pytest.mark.parametrize("whose", [ALL_NAMESPACES, NAMESPACE.namespace])
def test_epochs(stored, whose):
    """A header that lost a clear: the catalog still knows that it was acknowledged."""
    boot = stored.start()
    boot.store.clear(None if whose == ALL_NAMESPACES else whose.hex())
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    stored.end(clean=True)
    boot = stored.start(clears={whose: 1})
    is_warm(boot, 3 * PER_CHUNK)
    stored.end(clean=True)
    [path] = stored.segments()
    inode = path.stat().st_ino
    edit_header(path, "global_clear_epoch", 0)
    edit_header(path, "epoch_rows", 0)
    boot = stored.start(clears={whose: 1})
    is_cold_at(boot, GateName.EPOCHS, "was acknowledged in epoch 1, but the arena knows of 0")
    assert stored.segments()[0].stat().st_ino == inode, "the tables hold, so the memory can stay"
    stored.end(clean=True)
    is_warm(stored.start(clears={whose: 1}), 3 * PER_CHUNK)


def test_a_cold_arena_knows_the_clears_of_the_one_before(boots):
    """New files, old catalog: the clears it knows must not make every later start cold."""
    clears = {ALL_NAMESPACES: 4, NAMESPACE.namespace: 9}
    boot = boots.start(clears=clears)
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    assert boot.opened.arena.clear_epoch_of(NAMESPACE.namespace) == 9
    boots.end(clean=True)
    boot = boots.start(clears=clears)
    is_warm(boot, 3 * PER_CHUNK)
    assert boot.store.clear(None)[0] == 10


def _damage_record(boots: Boots, field: str) -> None:
    """Change one field of the first object's record."""
    [path] = boots.segments()
    records = read_records(path, boots.extents)
    head = int(np.flatnonzero(records["commit_word"] & np.uint64(1))[0])
    offset = layout.SegmentLayout(boots.extents, EXTENT).record_offset(head) + RECORD_FIELDS[field][1]
    edit(path, offset, bytes((records[head : head + 1].view(np.uint8)[RECORD_FIELDS[field][1]] ^ 0x40,)))


def _damage_links(boots: Boots) -> None:
    shape = layout.SegmentLayout(boots.extents, EXTENT)
    [path] = boots.segments()
    records = read_records(path, boots.extents)
    head = int(np.flatnonzero(records["commit_word"] & np.uint64(1))[0])
    edit(path, shape.links_offset + head * layout.LINK_BYTES, struct.pack("<II", 1, head))


def _forget_namespace(boots: Boots) -> None:
    [path] = boots.directory.glob("namespace-*.json")
    path.unlink()


def _damage_namespace(boots: Boots) -> None:
    [path] = boots.directory.glob("namespace-*.json")
    path.write_text(path.read_text().replace('"shards": 2', '"shards": 1'))


def _share_an_extent(boots: Boots) -> None:
    """Two records that both add up, on the same extent: the first object's link is made to lead into the second's."""
    shape = layout.SegmentLayout(boots.extents, EXTENT)
    [path] = boots.segments()
    records = read_records(path, boots.extents)
    heads = np.flatnonzero(records["commit_word"] & np.uint64(1)).tolist()
    long = next(head for head in heads if int(records[head]["extent_count"]) == 2)
    other = next(head for head in heads if head != long and not long < head <= long + 1)
    edit(
        path, shape.links_offset + long * layout.LINK_BYTES, struct.pack("<IIII", 1, other, 1, layout.NO_LINK)
    )


DAMAGES: list[tuple[str, Callable[[Boots], None], str, int]] = [
    ("length", lambda boots: _damage_record(boots, "length"), "not what a commit writes", 1),
    ("key", lambda boots: _damage_record(boots, "key"), "not what a commit writes", 1),
    ("checksum", lambda boots: _damage_record(boots, "checksum"), "not what a commit writes", 1),
    ("crc", lambda boots: _damage_record(boots, "crc"), "not what a commit writes", 1),
    ("links", _damage_links, "a chain of extents that does not add up", 1),
    ("shared", _share_an_extent, "shares an extent", 2),
    ("namespace gone", _forget_namespace, "a namespace that nothing describes", 3 * PER_CHUNK + 1),
    ("namespace damaged", _damage_namespace, "a namespace that nothing describes", 3 * PER_CHUNK + 1),
]


@pytest.mark.parametrize(
    ("damage", "words", "lost"), [each[1:] for each in DAMAGES], ids=[e[0] for e in DAMAGES]
)
@pytest.mark.parametrize("clean", [True, False], ids=["orderly", "killed"])
def test_table_walk(boots, damage, words, lost, clean):
    """After an orderly stop one fault makes the start cold; after a crash it costs the object that it touches."""
    boot = boots.start()
    index = boot.namespace(NAMESPACE)
    boot.put_chain(index, KEYS)
    boot.put(index, chain(7), 0, length=2 * EXTENT)
    boots.end(clean=clean)
    damage(boots)
    boot = boots.start()
    if clean:
        is_cold_at(boot, GateName.TABLE_WALK, words)
        boots.end(clean=True)
        is_warm(boots.start(), 3 * PER_CHUNK)
        return
    is_warm(boot, 3 * PER_CHUNK + 1 - lost)
    assert sum(boot.opened.left_behind.values()) == lost
    freed = read_records(boots.segments()[0], boots.extents)
    assert np.count_nonzero(freed["commit_word"] & np.uint64(1)) == 3 * PER_CHUNK + 1 - lost
    boots.end(clean=True)
    is_warm(boots.start(), 3 * PER_CHUNK + 1 - lost)


def test_table_walk_refuses_memory_that_an_unknown_writer_may_write(boots):
    boot = boots.start()
    index = boot.namespace(NAMESPACE)
    boot.put_chain(index, KEYS)
    placement = boot.reserve(index, chain(9), 0, length=2 * EXTENT).placement
    boots.end(clean=False)
    shape = layout.SegmentLayout(boots.extents, EXTENT)
    [path] = boots.segments()
    edit(
        path, shape.links_offset + placement.extent * layout.LINK_BYTES, struct.pack("<II", 1, layout.NO_LINK)
    )
    boot = boots.start()
    is_cold_at(boot, GateName.TABLE_WALK, "its writer may still write")
    assert boots.segments() != [path], "memory that somebody unknown may write is never handed out again"


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"extents": 32}, "L1 was made smaller, from 64 to 32 extents, and there is no room for both"),
        (
            {"extent_bytes": 2 * EXTENT},
            "The extent size changed from 4096 to 8192 bytes, and there is no room",
        ),
    ],
)
def test_fit(stored, size, words):
    boot = stored.start(**size, spare_bytes=1 << 20)
    is_cold_at(boot, GateName.FIT, words)
    stored.end(clean=True)
    is_warm(stored.start(**size), 3 * PER_CHUNK)


def test_a_larger_arena_keeps_everything_and_adds_a_segment(stored):
    boot = stored.start(extents=100)
    is_warm(boot, 3 * PER_CHUNK)
    assert [space.segment.shape.extent_count for space in boot.opened.arena.spaces] == [64, 36]
    index = boot.namespace(NAMESPACE)
    for number in range(10, 80):
        boot.put(index, chain(number), 0)
    assert boot.check_bytes() == 3 * PER_CHUNK + 70
    stored.end(clean=True)
    is_warm(stored.start(), 3 * PER_CHUNK + 70)


# --- what an acknowledged removal leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_what_was_removed_while_it_was_read_does_not_come_back(boots, clean):
    boot = boots.start()
    index = boot.namespace(NAMESPACE)
    boot.put_chain(index, KEYS)
    row = index.find(KEYS[1])
    boot.store.hold(index, np.array([index.entry(row, 0)], dtype=np.int64))
    assert boot.store.remove(index, row, 0, Removal.QUARANTINED) == 1
    boots.end(clean=clean)
    boot = boots.start()
    is_warm(boot, 3 * PER_CHUNK - 1)
    assert boot.opened.left_behind == {"removed": 1}
    assert not any(key == KEYS[1] and group == 0 for _, key, group, _ in boot.names())


@pytest.mark.parametrize("clean", [True, False])
def test_a_clear_holds_for_what_was_read_meanwhile(boots, clean):
    boot = boots.start()
    index = boot.namespace(NAMESPACE)
    boot.put_chain(index, KEYS)
    other = boot.namespace(descriptor_of(*HYBRID, model="other"))
    boot.put_chain(other, KEYS)
    boot.store.hold(index, np.array([index.entry(index.find(KEYS[0]), 0)], dtype=np.int64))
    epoch, objects, _ = boot.store.clear(NAMESPACE.fingerprint.namespace)
    assert (epoch, objects) == (1, 3 * PER_CHUNK)
    boots.end(clean=clean)
    boot = boots.start(clears={NAMESPACE.namespace: 1})
    is_warm(boot, 3 * PER_CHUNK)
    assert {namespace for namespace, *_ in boot.names()} == {other.namespace.hex()}


def test_a_crash_between_the_epoch_and_the_objects_of_a_clear(boots):
    boot = boots.start()
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    assert boot.opened.arena.raise_clear_epoch(NAMESPACE.namespace) == 1
    boots.end(clean=False)
    boot = boots.start()
    is_warm(boot, 0)
    assert boot.opened.left_behind == {"cleared": 3 * PER_CHUNK}


# --- the log itself ---------------------------------------------------------------------------------------------------


def test_gates_are_met_in_order_and_none_behind_a_closed_one():
    gates = GateLog()
    with pytest.raises(AssertionError, match="out of order"):
        gates.passed(GateName.SIZE, "x")
    gates.passed(GateName.LOCK, "Mine.")
    gates.failed(GateName.SIZE, "Too short.", bytes=1)
    with pytest.raises(AssertionError, match="behind a closed one"):
        gates.passed(GateName.MAGIC, "x")
    assert not gates.warm
    assert gates.reason == "Too short."
    done = gates.complete()
    assert [gate.name for gate in done] == list(GateName)
    assert [gate.outcome for gate in done[2:]] == [GateOutcome.SKIPPED] * 6
    assert done[1].to_plain() == {
        "name": "size",
        "outcome": "failed",
        "reason": "Too short.",
        "facts": {"bytes": 1},
    }
