"""The extents of one segment and the state of each allocation in it, in columns.

::

                     reserve                 commit
          FREE ───────────────► RESERVED ───────────────► OCCUPIED
           ▲                     │    │                    │    │
           │        writer has   │    │ expired, revoked   │    │ removed from the index
           │        acknowledged │    ▼                    │    ▼ while a reader holds it
           ├─────────────────────┘  LIMBO                  │  DRAINING
           │                          │                    │    │
           └──────────────────────────┴────────────────────┴────┘
              writer acknowledged        evicted, cleared    last hold ended
              or proven dead

Every way to FREE bumps the generation in the file before the extents can be handed out again.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from appliance.l1.columns import Column
from appliance.l1.extents import ExtentAllocator, Run
from appliance.l1.segment import HeadRecord, Segment
from appliance.protocol.arena_layout import NO_LINK


class ExtentState(IntEnum):
    """What the allocation that starts at an extent is."""

    FREE = 0
    RESERVED = 1
    OCCUPIED = 2
    DRAINING = 3
    LIMBO = 4


TRANSITIONS: dict[ExtentState, frozenset[ExtentState]] = {
    ExtentState.FREE: frozenset({ExtentState.RESERVED}),
    ExtentState.RESERVED: frozenset({ExtentState.OCCUPIED, ExtentState.LIMBO, ExtentState.FREE}),
    ExtentState.OCCUPIED: frozenset({ExtentState.DRAINING, ExtentState.FREE}),
    ExtentState.DRAINING: frozenset({ExtentState.FREE}),
    ExtentState.LIMBO: frozenset({ExtentState.FREE}),
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an object lies: its segment, its extent runs and the generation of its head."""

    segment: int
    extent: int
    generation: int
    runs: tuple[Run, ...]

    @property
    def address(self) -> int:
        """The object's handle, see :func:`address_of`."""
        return address_of(self.segment, self.extent)


def address_of(segment: int, extent: int) -> int:
    """Segment and head extent as one number."""
    return segment << 32 | extent


def split_address(address: int) -> tuple[int, int]:
    """The segment and the head extent of a handle."""
    return address >> 32, address & 0xFFFF_FFFF


class SegmentSpace:
    """Allocations of one segment; ``extents_by_state`` always adds up to ``populated_extents``.

    Population goes from the first extent to the last and has come to ``entered_extents``; what an earlier boot's writers
    hold is populated from the start.
    """

    def __init__(self, segment: Segment) -> None:
        count = segment.shape.extent_count
        self.segment = segment
        self.populated_extents = 0
        self.entered_extents = 0
        self.retired = False
        self.allocator = ExtentAllocator(count)
        # Columns by head extent.
        self.generations = Column(count, np.uint64).view
        self.lengths = Column(count, np.uint64).view
        self.checksums = Column(count, np.uint64).view
        self.extent_counts = Column(count, np.uint32).view
        self.states = Column(count, np.uint8).view
        self._run_counts = Column(count, np.uint32).view
        self._run_nexts = Column(count, np.uint32).view
        self.extents_by_state = [0] * len(ExtentState)

    def add_populated(self, count: int, held: AbstractSet[int] = frozenset()) -> None:
        """Hand further extents to the allocator: their memory is there now.

        ``held`` are extents that an earlier boot's writers may still write; they stay out until they leave limbo.
        """
        first = self.entered_extents
        begin = first
        for extent in [*sorted(e for e in held if first <= e < first + count), first + count]:
            if extent > begin:
                self.allocator.release([(begin, extent - begin)])
                self.extents_by_state[ExtentState.FREE] += extent - begin
                self.populated_extents += extent - begin
            begin = extent + 1
        self.entered_extents += count

    def reserve(self, extent_count: int, record: HeadRecord) -> Placement | None:
        """Take extents for a writer and enter the reservation in the file before anybody is told."""
        runs = self.allocator.allocate(extent_count)
        if runs is None:
            return None
        head = runs[0][0]
        self.adopt_runs(head, runs)
        self._move(head, ExtentState.RESERVED)
        generation = self.generations[head]
        self.segment.write_writing(head, generation, record, runs)
        self.lengths[head] = record.length
        return Placement(self.segment.index, head, generation, tuple(runs))

    def adopt_runs(self, head: int, runs: list[Run]) -> None:
        """Remember which extents belong to the allocation that starts at ``head``."""
        for position, (first, count) in enumerate(runs):
            self._run_counts[first] = count
            self._run_nexts[first] = runs[position + 1][0] if position + 1 < len(runs) else NO_LINK
        self.extent_counts[head] = sum(count for _, count in runs)

    def adopt_limbo(self, head: int, runs: list[Run], generation: int) -> None:
        """Take over an allocation that a writer of an earlier boot may still write."""
        self.adopt_runs(head, runs)
        self.generations[head] = generation
        self.states[head] = ExtentState.LIMBO
        self.extents_by_state[ExtentState.LIMBO] += self.extent_counts[head]
        self.populated_extents += self.extent_counts[head]

    def commit(self, head: int, record: HeadRecord) -> int:
        """Make a reservation an object; returns its commit word."""
        word = self.segment.write_committed(head, self.generations[head], record)
        self.checksums[head] = record.checksum
        self._move(head, ExtentState.OCCUPIED)
        return word

    def to_limbo(self, head: int) -> None:
        """End a reservation whose writer may still be writing."""
        self._move(head, ExtentState.LIMBO)

    def to_draining(self, head: int) -> None:
        """Take an object out of the cache while a reader still holds it."""
        self._move(head, ExtentState.DRAINING)

    def free(self, head: int) -> int:
        """Clear the word, bump the generation, then give the extents back. Returns the number of extents."""
        was_writing = self.states[head] in (ExtentState.RESERVED, ExtentState.LIMBO)
        generation = self.generations[head] + 1
        self.segment.write_freed(head, generation, was_writing=was_writing)
        self.generations[head] = generation
        runs = self.runs(head)
        count = self.extent_counts[head]
        self._move(head, ExtentState.FREE)
        for first, _ in runs:
            self._run_counts[first] = 0
        self.extent_counts[head] = 0
        self.allocator.release(runs)
        return count

    def run_columns(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """By the first extent of a run: extents in it, and the first of the next; as they change, not to be written."""
        return np.frombuffer(self._run_counts, np.uint32), np.frombuffer(self._run_nexts, np.uint32)

    def runs(self, head: int) -> list[Run]:
        """The extent runs of an allocation, in stream order."""
        found = []
        first = head
        while first != NO_LINK:
            count = self._run_counts[first]
            assert count, (
                f"extent {first} of segment {self.segment.index} starts no run: a reader would be sent astray"
            )
            found.append((first, count))
            first = self._run_nexts[first]
        return found

    def _move(self, head: int, to: ExtentState) -> None:
        came_from = ExtentState(self.states[head])
        assert to in TRANSITIONS[came_from], (
            f"extent {head} went from {came_from.name} to {to.name}: bytes could be lost"
        )
        count = self.extent_counts[head]
        self.states[head] = to
        self.extents_by_state[came_from] -= count
        self.extents_by_state[to] += count
