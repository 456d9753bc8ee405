"""Moving objects into other segments, when L1 starts smaller or with another extent size.

The ones used last go first, and as many as fit. An object is written as a worker's is: links and record, bytes, and the
commit word last; so a crash in the middle leaves objects or nothing. The old files are gone only when it is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from appliance.l1.extents import Run
from appliance.l1.segment import HeadRecord
from appliance.l1.space import ExtentState, SegmentSpace
from appliance.l1.taking import Taken
from appliance.l1.walk import WalkedSegment, follow
from appliance.protocol.arena_layout import STATE_COMMITTED, STATE_WRITING

MOVE_SECONDS = 20.0
"""Longer than this a start does not move objects; what is left is left behind."""


@dataclass(slots=True)
class _Target:
    """One segment to move into: its free extents, and what has come so far."""

    space: SegmentSpace
    free: NDArray[np.int64]
    heads: list[int] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    taken: int = 0

    def allocate(self, count: int) -> list[Run]:
        """The next free extents as runs; empty if there are not so many."""
        if count > len(self.free) - self.taken:
            return []
        picked = self.free[self.taken : self.taken + count]
        self.taken += count
        pieces = np.split(picked, np.flatnonzero(np.diff(picked) != 1) + 1)
        return [(int(piece[0]), len(piece)) for piece in pieces]


@dataclass(frozen=True, slots=True)
class _Source:
    """One segment to move from; ``order`` and ``bounds`` find an object's runs among those of all."""

    walked: WalkedSegment
    taken: Taken
    order: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @classmethod
    def of(cls, walked: WalkedSegment, taken: Taken) -> _Source:
        owner = walked.objects.owner
        order = np.argsort(owner, kind="stable")
        bounds = np.searchsorted(owner[order], np.arange(len(taken.heads) + 1))
        return cls(walked, taken, order, bounds)

    def runs_of(self, at: int) -> list[Run]:
        chains = self.walked.objects
        mine = self.order[self.bounds[at] : self.bounds[at + 1]]
        return [(int(chains.firsts[each]), int(chains.counts[each])) for each in mine]


def move_objects(
    sources: Sequence[tuple[WalkedSegment, Taken]],
    targets: Sequence[SegmentSpace],
    now_unix: float,
) -> list[Taken]:
    """Move what fits from ``sources`` into ``targets``, which own it afterwards; returns what was moved."""
    deadline = time.monotonic() + MOVE_SECONDS
    tables = [_Source.of(walked, taken) for walked, taken in sources]
    places = [_Target(space, space.unadopted()) for space in targets]
    for number, at, idle in _by_recency(tables, now_unix):
        if time.monotonic() > deadline:
            break
        try:
            _move(tables[number], at, idle, places)
        except OSError:  # the mount is full: what is there by now stays, the rest is left behind
            break
    return [_adopt(place) for place in places if place.heads]


def _by_recency(sources: Sequence[_Source], now_unix: float) -> list[tuple[int, int, float]]:
    """Source and position of each object, what was used last first, and of one age shallow chunks first."""
    taken = [source.taken for source in sources]
    numbers = np.concatenate([np.full(len(each.heads), n) for n, each in enumerate(taken)])
    positions = np.concatenate([np.arange(len(each.heads)) for each in taken])
    chunks = np.concatenate([each.records["chunk_index"].astype(np.int64) for each in taken])
    idle = np.concatenate([used_ago(each, now_unix) for each in taken])
    order = np.lexsort((chunks, idle.astype(np.int64)))
    return list(zip(numbers[order].tolist(), positions[order].tolist(), idle[order].tolist(), strict=True))


def used_ago(taken: Taken, now_unix: float) -> NDArray[np.float64]:
    """Seconds since each object was used, or stored where that is all that is known."""
    # A clock that was set back since must not make an object younger than this moment.
    stored_ago = np.maximum(0.0, now_unix - taken.records["stored_unix_ms"] / 1000.0)
    return np.where(np.isnan(taken.idle_seconds), stored_ago, taken.idle_seconds)


def _move(source: _Source, at: int, idle: float, places: Sequence[_Target]) -> None:
    """Move one object to the first place that has room; without any it stays behind."""
    record = _record_of(source.taken.records[at])
    for place in places:
        segment = place.space.segment
        runs = place.allocate(-(-record.length // segment.shape.extent_bytes))
        if runs:
            data = source.walked.segment.read_data(source.runs_of(at), 0, record.length)
            extents = sum(count for _, count in runs)
            _write(place.space, runs, replace(record, extent_count=extents), memoryview(data))
            place.heads.append(runs[0][0])
            place.idle.append(idle)
            return


def _record_of(old: np.void) -> HeadRecord:
    return HeadRecord(
        key=old["key"].tobytes(),
        parent=old["parent"].tobytes(),
        namespace=old["namespace"].tobytes(),
        salt=old["salt"].tobytes(),
        length=int(old["length"]),
        checksum=int(old["checksum"]),
        attach_id=int(old["attach_id"]),
        stored_unix_ms=int(old["stored_unix_ms"]),
        clear_epoch=int(old["clear_epoch"]),
        extent_count=int(old["extent_count"]),
        chunk_index=int(old["chunk_index"]),
        group=int(old["group"]),
        shard=int(old["shard"]),
        state=STATE_COMMITTED,
    )


def _write(space: SegmentSpace, runs: list[Run], record: HeadRecord, data: memoryview) -> None:
    head = runs[0][0]
    generation = space.generations[head]
    space.segment.write_writing(head, generation, replace(record, state=STATE_WRITING), runs)
    space.segment.write_data(runs, 0, data)
    space.segment.write_committed(head, generation, record)


def _adopt(place: _Target) -> Taken:
    """Make what has come the space's own, as the table now says it."""
    segment = place.space.segment
    heads = np.array(place.heads, dtype=np.int64)
    records = segment.read_records()
    chains = follow(segment.read_links(), heads, records["extent_count"][heads].astype(np.int64))
    assert chains.whole.all(), "an object that was moved would lack some of its bytes"
    place.space.adopt(chains, records, ExtentState.OCCUPIED)
    return Taken(segment.index, heads, records[heads], np.array(place.idle))
