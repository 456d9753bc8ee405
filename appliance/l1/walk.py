"""The table walk: which records of the files are provably committed objects, and which memory may still be written.

A record counts as an object if its commit word says so and everything beside it adds up: its state, its CRC, its size,
and a chain of extents that is whole and nobody else's. Whole columns at a time; no file is changed here.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from appliance.fingerprint import NAMESPACE_BYTES
from appliance.l1.namespaces import NamespaceDescriptor
from appliance.l1.segment import Segment
from appliance.protocol import arena_layout as layout

Heads = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chains:
    """The runs of some allocations, as columns: ``owner`` is the position of the head in ``heads``."""

    heads: Heads
    whole: NDArray[np.bool_]
    owner: Heads
    firsts: Heads
    counts: Heads
    nexts: Heads

    def extents(self) -> tuple[Heads, Heads]:
        """Every extent of every run, and its owner."""
        total = int(self.counts.sum())
        ends = np.cumsum(self.counts)
        steps = np.arange(total, dtype=np.int64)
        extents: Heads = steps + np.repeat(self.firsts - (ends - self.counts), self.counts)
        return extents, np.repeat(self.owner, self.counts)

    def of(self, chosen: NDArray[np.bool_]) -> Chains:
        """The chains of some of the heads."""
        place = np.cumsum(chosen) - 1
        mine = chosen[self.owner]
        return Chains(
            self.heads[chosen],
            self.whole[chosen],
            place[self.owner[mine]],
            self.firsts[mine],
            self.counts[mine],
            self.nexts[mine],
        )


@dataclass(frozen=True, slots=True)
class WalkedSegment:
    """What one segment holds. ``objects`` are whole; ``writing`` may still be written; ``dropped`` are heads to free."""

    segment: Segment
    records: NDArray[np.void]
    objects: Chains
    writing: Chains
    dropped: Heads


@dataclass(slots=True)
class Walk:
    """What all segments hold.

    ``left_out`` counts committed records that are rightly no objects any more (cleared, removed while they were read);
    ``faults`` counts what does not add up, and ``first_fault`` says the first in words. ``unfenced`` says which memory
    may be written by somebody while nobody knows its extents: then no memory of these files may be handed out.
    """

    segments: list[WalkedSegment] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    first_fault: str = ""
    unfenced: str = ""

    @property
    def object_count(self) -> int:
        """Objects that can be taken back."""
        return sum(len(each.objects.heads) for each in self.segments)

    @property
    def object_bytes(self) -> int:
        """Their bytes."""
        return sum(int(each.records["length"][each.objects.heads].sum()) for each in self.segments)

    @property
    def tables_hold(self) -> bool:
        """Whether records and chains can be trusted to say what may still be written, whatever they hold."""
        return not self.unfenced and not any(self.faults[kind] for kind in ("record", "chain", "shared"))

    @property
    def writing_count(self) -> int:
        """Allocations that may still be written."""
        return sum(len(each.writing.heads) for each in self.segments)

    def fault(self, kind: str, segment: int, heads: Heads, sentence: str) -> None:
        """Count records that do not add up; ``sentence`` says what is wrong with each."""
        if len(heads):
            self.faults[kind] += len(heads)
            self.first_fault = self.first_fault or f"Extent {heads[0]} of segment {segment} {sentence}."


def walk_tables(
    segments: Sequence[Segment],
    namespaces: Mapping[bytes, NamespaceDescriptor],
    clear_epochs: Mapping[bytes, int],
    global_clear_epoch: int,
) -> Walk:
    """Judge every record of every segment."""
    walk = Walk()
    seen: set[bytes] = set()
    for segment in segments:
        records = segment.read_records()
        committed = np.flatnonzero((records["commit_word"] & 1) == 1).astype(np.int64)
        sound = committed[_sound(walk, segment, records, committed)]
        sound = sound[_in_force(walk, records[sound], clear_epochs, global_clear_epoch)]
        sound = sound[_placed(walk, segment, records, sound, namespaces)]
        sound = sound[_first_of_their_key(walk, segment, records, sound, seen)]
        objects, writing = _unshared(walk, segment, records, sound)
        dropped = np.setdiff1d(committed, objects.heads)
        walk.segments.append(WalkedSegment(segment, records, objects, writing, dropped))
    return walk


def _sound(walk: Walk, segment: Segment, records: NDArray[np.void], heads: Heads) -> NDArray[np.bool_]:
    """Which records are what a commit wrote. A removed one differs by its state only and counts as left out."""
    mine = records[heads]
    doomed = mine["state"] == layout.STATE_DOOMED
    walk.left_out["removed"] += int(np.count_nonzero(doomed))
    extent_bytes = segment.shape.extent_bytes
    lengths = mine["length"].astype(np.int64)
    sized = (lengths > 0) & (mine["extent_count"] == -(-lengths // extent_bytes))
    # Not ``mine``: a copy of records leaves out the bytes between their fields.
    raw = memoryview(records.view(np.uint8).reshape(-1, layout.RECORD_BYTES)[heads].tobytes())
    crcs = np.fromiter(
        (
            zlib.crc32(raw[at + layout.CRC_BEGIN : at + layout.CRC_END])
            for at in range(0, len(raw), layout.RECORD_BYTES)
        ),
        dtype=np.uint32,
        count=len(heads),
    )
    summed = crcs == mine["crc"]
    committed = mine["state"] == layout.STATE_COMMITTED
    bad = ~doomed & ~(summed & committed & sized)
    walk.fault("record", segment.index, heads[bad], "has a committed record that is not what a commit writes")
    good: NDArray[np.bool_] = ~doomed & ~bad
    return good


def _in_force(
    walk: Walk, mine: NDArray[np.void], clear_epochs: Mapping[bytes, int], global_clear_epoch: int
) -> NDArray[np.bool_]:
    """Which objects no acknowledged clear has removed."""
    kept: NDArray[np.bool_] = mine["clear_epoch"] >= global_clear_epoch
    raw = mine["namespace"].tobytes()
    # The namespaces that are there: few, where thousands may have been cleared.
    for namespace in {raw[at : at + NAMESPACE_BYTES] for at in range(0, len(raw), NAMESPACE_BYTES)}:
        epoch = clear_epochs.get(namespace, 0)
        if epoch > global_clear_epoch:
            kept &= (mine["namespace"] != np.void(namespace)) | (mine["clear_epoch"] >= epoch)
    walk.left_out["cleared"] += int(np.count_nonzero(~kept))
    return kept


def _placed(
    walk: Walk,
    segment: Segment,
    records: NDArray[np.void],
    heads: Heads,
    namespaces: Mapping[bytes, NamespaceDescriptor],
) -> NDArray[np.bool_]:
    """Which objects belong to a namespace that is described, and to a group and shard that it has."""
    mine = records[heads]
    known = np.zeros(len(heads), dtype=np.bool_)
    placed = np.zeros(len(heads), dtype=np.bool_)
    for namespace, descriptor in namespaces.items():
        here = np.flatnonzero(mine["namespace"] == np.void(namespace))
        known[here] = True
        full = np.zeros(1 << 16, dtype=np.uint64)
        full[: len(descriptor.groups)] = [group.full_mask for group in descriptor.groups]
        shards = mine["shard"][here].astype(np.uint64)
        bits = full[mine["group"][here]] >> np.minimum(shards, np.uint64(63))
        placed[here] = (shards < 64) & (bits & np.uint64(1) == 1)
    walk.fault(
        "namespace", segment.index, heads[~known], "holds an object of a namespace that nothing describes"
    )
    walk.fault(
        "place", segment.index, heads[known & ~placed], "holds an object of a group or shard that is none"
    )
    return placed


def _first_of_their_key(
    walk: Walk, segment: Segment, records: NDArray[np.void], heads: Heads, seen: set[bytes]
) -> NDArray[np.bool_]:
    """Which objects are not a second copy of one met before; each is named by namespace, key, group and shard."""
    mine = records[heads]
    names = np.zeros((len(heads), 52), dtype=np.uint8)
    for begin, end, field_name in (
        (0, 16, "namespace"),
        (16, 48, "key"),
        (48, 50, "group"),
        (50, 52, "shard"),
    ):
        column = np.ascontiguousarray(mine[field_name]).view(np.uint8).reshape(len(heads), end - begin)
        names[:, begin:end] = column
    raw = names.tobytes()
    fresh = np.ones(len(heads), dtype=np.bool_)
    for position in range(len(heads)):
        name = raw[position * 52 : position * 52 + 52]
        if name in seen:
            fresh[position] = False
        seen.add(name)
    walk.fault("twice", segment.index, heads[~fresh], "holds an object that is stored elsewhere too")
    return fresh


def _unshared(walk: Walk, segment: Segment, records: NDArray[np.void], sound: Heads) -> tuple[Chains, Chains]:
    """The objects whose extents are theirs alone, and the allocations that may still be written."""
    uncommitted = (records["commit_word"] & 1) == 0
    writing_heads = np.flatnonzero(uncommitted & (records["state"] == layout.STATE_WRITING)).astype(np.int64)
    links, counts = segment.read_links(), records["extent_count"].astype(np.int64)
    writing = follow(links, writing_heads, counts[writing_heads])
    objects = follow(links, sound, counts[sound])
    walk.fault(
        "chain", segment.index, sound[~objects.whole], "begins a chain of extents that does not add up"
    )
    objects = objects.of(objects.whole)
    owned, owner = objects.extents()
    written, _ = writing.extents()
    claims = np.bincount(owned, minlength=len(records)) + np.bincount(written, minlength=len(records))
    shared = np.zeros(len(objects.heads), dtype=np.bool_)
    shared[owner[claims[owned] > 1]] = True
    walk.fault("shared", segment.index, objects.heads[shared], "shares an extent with another allocation")
    if not writing.whole.all() or (np.bincount(written, minlength=len(records)) > 1).any():
        walk.unfenced = f"The extents of a reservation in segment {segment.index} are not known, and its writer may still write."
    return objects.of(~shared), writing


def follow(links: NDArray[np.void], heads: Heads, extent_counts: Heads) -> Chains:
    """Follow the chains of runs from each head at once, to their end or to where they break."""
    total = len(links)
    covered = np.zeros(len(heads), dtype=np.int64)
    ended = np.zeros(len(heads), dtype=np.bool_)
    owner, firsts = np.arange(len(heads), dtype=np.int64), heads
    found: list[tuple[Heads, Heads, Heads, Heads]] = []
    while len(owner):
        counts = links["count"][firsts].astype(np.int64)
        nexts = links["next"][firsts].astype(np.int64)
        fits = (counts > 0) & (firsts + counts <= total) & (covered[owner] + counts <= extent_counts[owner])
        owner, firsts, counts, nexts = owner[fits], firsts[fits], counts[fits], nexts[fits]
        found.append((owner, firsts, counts, nexts))
        covered[owner] += counts
        last = nexts == layout.NO_LINK
        ended[owner[last]] = True
        going = ~last & (nexts < total)
        owner, firsts = owner[going], nexts[going]
    columns = [np.concatenate(column) for column in zip(*found, strict=True)] if found else [heads[:0]] * 4
    return Chains(heads, ended & (covered == extent_counts), *columns)
