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

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from appliance.l1.columns import Column
from appliance.l1.extents import ExtentAllocator, Run
from appliance.l1.segment import HeadRecord, Segment
from appliance.l1.walk import Chains
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

    Population goes from the first extent to the last and has come to ``entered_extents``; what is taken over from an
    earlier boot is populated from the start.
    """

    def __init__(self, segment: Segment) -> None:
        count = segment.shape.extent_count
        self.segment = segment
        self.populated_extents = 0
        self.entered_extents = 0
        self.retired = False
        self.allocator = ExtentAllocator(count)
        self._adopted: NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        # Columns by head extent.
        self.generations = Column(count, np.uint64).view
        self.lengths = Column(count, np.uint64).view
        self.checksums = Column(count, np.uint64).view
        self.extent_counts = Column(count, np.uint32).view
        self.states = Column(count, np.uint8).view
        self._run_counts = Column(count, np.uint32).view
        self._run_nexts = Column(count, np.uint32).view
        self.extents_by_state = [0] * len(ExtentState)

    def add_populated(self, count: int) -> None:
        """Hand further extents to the allocator: their memory is there now. Those of an earlier boot stay out."""
        first = self.entered_extents
        fresh = np.flatnonzero(~self._adopted[first : first + count]) + first
        for piece in np.split(fresh, np.flatnonzero(np.diff(fresh) != 1) + 1):
            if len(piece):
                self.allocator.release([(int(piece[0]), len(piece))])
        self.extents_by_state[ExtentState.FREE] += len(fresh)
        self.populated_extents += len(fresh)
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

    def adopt(self, chains: Chains, records: NDArray[np.void], state: ExtentState) -> None:
        """Take over allocations of an earlier boot: its objects, or what its writers may still write.

        ``records`` is the whole table; generations are taken from :meth:`adopt_generations`. Before any population.
        """
        extents, _ = chains.extents()
        assert not self._adopted[extents].any(), "two allocations of an earlier boot would share an extent"
        self._adopted[extents] = True
        run_counts, run_nexts = self.run_columns()
        run_counts[chains.firsts], run_nexts[chains.firsts] = chains.counts, chains.nexts
        covered = np.bincount(chains.owner, weights=chains.counts, minlength=len(chains.heads))
        np.frombuffer(self.extent_counts, np.uint32)[chains.heads] = covered
        np.frombuffer(self.states, np.uint8)[chains.heads] = state
        if state is ExtentState.OCCUPIED:
            np.frombuffer(self.lengths, np.uint64)[chains.heads] = records["length"][chains.heads]
            np.frombuffer(self.checksums, np.uint64)[chains.heads] = records["checksum"][chains.heads]
        self.extents_by_state[state] += len(extents)
        self.populated_extents += len(extents)

    def unadopted(self) -> NDArray[np.int64]:
        """Extents that belong to nothing of an earlier boot, ascending."""
        free: NDArray[np.int64] = np.flatnonzero(~self._adopted)
        return free

    def adopt_generations(self, words: NDArray[np.uint64]) -> None:
        """Go on where the commit words of an earlier boot stand: a generation is never used twice."""
        np.frombuffer(self.generations, np.uint64)[:] = words >> np.uint64(1)

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
        """Take an object out of the cache while a reader still holds it; a start must not take it back."""
        self.segment.write_doomed(head)
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
