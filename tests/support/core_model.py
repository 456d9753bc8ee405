"""What the state machine believes of the store: a model too simple to be wrong, and how to look into the file."""

from __future__ import annotations

import os
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from appliance.geometry import GroupKind
from appliance.l1.index import NamespaceIndex
from appliance.l1.space import Placement
from appliance.protocol import arena_layout as layout
from appliance.protocol.base import Grant
from tests.support.core_store import EXTENT

Tables = tuple[np.ndarray, np.ndarray, bytes]
"""Head records, links, and the records as bytes."""

Entry = tuple[str, bytes, int, int]
"""Namespace, key, group, and how often the namespace had been cleared: a clear ends a chunk's life, not its readers."""
Name = tuple[str, bytes, int, int]


@dataclass
class Thing:
    """Bytes at a place; ``word`` is what the file says while they are an object."""

    name: Name
    placement: Placement
    data: bytes
    life: int
    word: int = 0
    checksum: int = 0

    @property
    def entry(self) -> Entry:
        return (*self.name[:3], self.life)

    @property
    def extents(self) -> int:
        return sum(count for _, count in self.placement.runs)


@dataclass
class Writing:
    thing: Thing
    attach_id: int
    session: bytes
    deadline: float


@dataclass
class Held:
    entries: frozenset[Entry]
    session: bytes
    deadline: float
    unnamed: int = 0


@dataclass
class Model:
    objects: dict[Name, Thing] = field(default_factory=dict)
    doomed: list[Thing] = field(default_factory=list)
    writing: dict[int, Writing] = field(default_factory=dict)
    limbo: dict[int, Writing] = field(default_factory=dict)
    leases: dict[int, Held] = field(default_factory=dict)
    incomplete_since: dict[Entry, float] = field(default_factory=dict)
    lives: Counter[str] = field(default_factory=Counter)

    def held(self, entry: Entry) -> bool:
        return any(entry in lease.entries for lease in self.leases.values())

    def pending(self, entry: Entry) -> bool:
        return any(each.thing.entry == entry for each in self.writing.values())

    def of(self, entry: Entry) -> list[Thing]:
        return [thing for thing in self.objects.values() if thing.entry == entry]

    @property
    def everything(self) -> list[Thing]:
        return [
            *self.objects.values(),
            *self.doomed,
            *(each.thing for each in self.writing.values()),
            *(each.thing for each in self.limbo.values()),
        ]

    def expected_grant(self, name: Name, extents: int, limit: int, segments: Sequence[int]) -> Grant:
        """What a reservation must get."""
        unfinished = [*self.writing.values(), *self.limbo.values()]
        if (sum(each.thing.extents for each in unfinished) + extents) * EXTENT > limit:
            return Grant.OVER_LIMIT
        if name in self.objects:
            return Grant.EXISTS
        if any(each.thing.name == name for each in self.writing.values()):
            return Grant.PENDING
        if any(thing.name == name and thing.life == self.lives[name[0]] for thing in self.doomed):
            return Grant.PENDING
        room = list(segments)
        for thing in self.everything:
            evictable = (
                self.objects.get(thing.name) is thing
                and not self.held(thing.entry)
                and not self.pending(thing.entry)
            )
            if not evictable:
                room[thing.placement.segment] -= thing.extents
        return Grant.GRANTED if any(each >= extents for each in room) else Grant.OUT_OF_SPACE

    def needed(self, index: NamespaceIndex, keys: list[bytes], hit: int) -> set[Entry]:
        """The entries that a hit needs; windows here are two chunks."""
        namespace = index.namespace.hex()
        found = set()
        for group in index.groups:
            first = {GroupKind.ATTENTION: 0, GroupKind.RECURRENT: hit - 1, GroupKind.SLIDING: hit - 2}[
                group.kind
            ]
            found |= {
                (namespace, keys[chunk], group.index, self.lives[namespace])
                for chunk in range(max(0, first), hit)
            }
        return found if hit else set()

    def expected_hit(self, index: NamespaceIndex, keys: list[bytes]) -> int:
        """The longest hit."""

        def complete(entry: Entry) -> bool:
            return len(self.of(entry)) == index.groups[entry[2]].shards

        fits = [k for k in range(1, len(keys) + 1) if all(map(complete, self.needed(index, keys, k)))]
        return max(fits, default=0)


def read_tables(descriptor: int, shape: layout.SegmentLayout) -> Tables:
    """The tables of a segment, past the daemon."""
    raw = os.pread(descriptor, shape.extent_count * layout.RECORD_BYTES, shape.records_offset)
    links = os.pread(descriptor, shape.extent_count * layout.LINK_BYTES, shape.links_offset)
    return np.frombuffer(raw, dtype=layout.RECORD), np.frombuffer(links, dtype=layout.LINK), raw


def check_record(thing: Thing, table: Tables, state: int) -> np.void:
    records, links, raw = table
    head = thing.placement.extent
    record = records[head]
    namespace, key, group, shard = thing.name
    assert record["key"].tobytes() == key
    assert record["namespace"].tobytes() == bytes.fromhex(namespace)
    assert (int(record["group"]), int(record["shard"])) == (group, shard)
    assert int(record["length"]) == len(thing.data)
    assert int(record["extent_count"]) == thing.extents
    assert int(record["state"]) == state
    body = bytearray(raw[head * layout.RECORD_BYTES : (head + 1) * layout.RECORD_BYTES])
    if state == layout.STATE_DOOMED:  # only its state was changed since the commit
        body[layout.STATE_OFFSET] = layout.STATE_COMMITTED
    crc = struct.unpack_from("<I", body, layout.CRC_END)[0]
    assert crc == zlib.crc32(body[layout.CRC_BEGIN : layout.CRC_END])
    walked, first = [], head
    while first != layout.NO_LINK:
        walked.append((first, int(links["count"][first])))
        first = int(links["next"][first])
    assert tuple(walked) == thing.placement.runs
    return record
