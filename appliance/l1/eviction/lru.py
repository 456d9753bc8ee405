"""Least recently used, as a log: a touch appends, an eviction reads from the old end.

A touch of a whole prompt is one array append; an entry's older log records become stale and are skipped when they are
met. The log is compacted when more than half of it is stale, so its memory follows the number of live entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from appliance.geometry import GroupKind
from appliance.l1.eviction.policy import Prompt
from appliance.l1.index import NamespaceIndex

_SLOT_SHIFT = 40
_ENTRY_MASK = (1 << _SLOT_SHIFT) - 1
_FIRST_CAPACITY = 1024
_LOOKS = 4096
"""Candidates looked at in one go: what is held is met once and then stands at the new end of the log."""
_WINDOW = 256


class LeastRecentlyUsed:
    """Exact LRU over entries of all namespaces."""

    name: ClassVar[str] = "LRU"

    def __init__(self) -> None:
        self._log: NDArray[np.int64] = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._log_stamps: NDArray[np.int64] = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._head = 0
        self._tail = 0
        self._next_stamp = 1
        self._generation = 0
        self._indexes: dict[int, NamespaceIndex] = {}
        self._stamps: dict[int, NDArray[np.int64]] = {}
        self._demoted: deque[tuple[int, int, int]] = deque()

    def add_namespace(self, index: NamespaceIndex) -> None:
        """See :class:`EvictionPolicy`."""
        self._indexes[index.slot] = index
        self._stamps[index.slot] = np.zeros(len(index.present.array), dtype=np.int64)

    def asked(self, index: NamespaceIndex, prompt: Prompt) -> Sequence[int]:
        """See :class:`EvictionPolicy`. Recency knows no better boundary than another: all of them."""
        return (
            range(1, len(prompt.keys))
            if GroupKind.RECURRENT in {group.kind for group in index.groups}
            else ()
        )

    def stored(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`. What is stored is touched, too, and that is when it enters the log."""

    def touched(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`."""
        self._append(index.slot, entries)

    def demoted(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`."""
        stamps = self._stamps[index.slot][entries]
        self._demoted.extend(
            (index.slot, entry, stamp) for entry, stamp in zip(entries.tolist(), stamps.tolist(), strict=True)
        )

    def removed(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`."""
        self._stamps[index.slot][entries] = 0

    def covers(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See :class:`EvictionPolicy`. Stamps in the log ascend, so an entry's record is found by bisection."""
        stamps = self._stamps[index.slot][entries]
        live = slice(self._head, self._tail)
        position = np.searchsorted(self._log_stamps[live], stamps)
        inside = position < self._tail - self._head
        found = np.minimum(position, max(0, self._tail - self._head - 1))
        if not len(self._log[live]):
            return np.zeros(len(entries), dtype=np.bool_)
        same: NDArray[np.bool_] = (
            inside
            & (stamps != 0)
            & (self._log_stamps[live][found] == stamps)
            & (self._log[live][found] == entries | (index.slot << _SLOT_SHIFT))
        )
        return same

    def candidates(self, extents: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """See :class:`EvictionPolicy`. What the consumer looks at and does not evict moves to the recent end."""
        began, looks = self._next_stamp, 0
        while looks < _LOOKS:
            demoted = self._take_demoted(extents)
            if demoted is not None:
                looks += len(demoted[1])
                yield demoted
                continue
            slot, entries, positions = self._oldest(began, extents)
            if not len(entries):
                return
            looks += len(entries)
            generation, stamps = self._generation, self._stamps[slot][entries]
            try:
                yield slot, entries
            finally:
                if generation == self._generation:
                    self._pass_over(slot, entries, stamps, positions)

    def _take_demoted(self, extents: int) -> tuple[int, NDArray[np.int64]] | None:
        taken: list[int] = []
        of_slot = -1
        while self._demoted and extents > 0:
            slot, entry, stamp = self._demoted[0]
            # Used, removed or stored anew since: its number may even stand for another chunk now.
            if stamp and self._stamps[slot][entry] == stamp:
                if of_slot not in (-1, slot):
                    break
                of_slot = slot
                taken.append(entry)
                extents -= self._indexes[slot].extents.view[entry]
            self._demoted.popleft()
        return (of_slot, np.array(taken, dtype=np.int64)) if taken else None

    def _oldest(self, before: int, extents: int) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        """Entries at the old end that came into the log before a stamp, with their positions; of one slot."""
        while self._head < self._tail:
            window = slice(self._head, min(self._tail, self._head + _WINDOW))
            packed, stamps = self._log[window], self._log_stamps[window]
            slots, entries = packed >> _SLOT_SHIFT, packed & _ENTRY_MASK
            slot = int(slots[0])
            of_slot = int(np.argmax(slots != slot)) or len(slots)
            entries, stamps = entries[:of_slot], stamps[:of_slot]
            live = np.flatnonzero((self._stamps[slot][entries] == stamps) & (stamps < before))
            if len(live):
                freed = np.cumsum(self._indexes[slot].extents.array[entries[live]])
                live = live[: int(np.searchsorted(freed, extents)) + 1]
                return slot, entries[live], self._head + live
            if stamps[-1] >= before:
                break
            self._head += of_slot
        return 0, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)

    def _pass_over(
        self,
        slot: int,
        entries: NDArray[np.int64],
        stamps: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        """Go on behind the last entry that the consumer evicted, or behind all if it evicted none."""
        stayed = self._stamps[slot][entries] == stamps
        evicted = np.flatnonzero(~stayed)
        looked = int(evicted[-1]) + 1 if len(evicted) else len(entries)
        self._head = int(positions[looked - 1]) + 1
        self._append(slot, entries[:looked][stayed[:looked]])

    def _append(self, slot: int, entries: NDArray[np.int64]) -> None:
        count = len(entries)
        if self._tail + count > len(self._log):
            self._compact(count)
        begin, end = self._tail, self._tail + count
        self._log[begin:end] = entries | (slot << _SLOT_SHIFT)
        stamps = np.arange(self._next_stamp, self._next_stamp + count)
        self._log_stamps[begin:end] = stamps
        self._stamps[slot][entries] = stamps
        self._next_stamp += count
        self._tail = end

    def _compact(self, extra: int) -> None:
        """Drop stale records; make the log longer where that is not enough."""
        log, stamps = self._log[self._head : self._tail], self._log_stamps[self._head : self._tail]
        live = np.zeros(len(log), dtype=np.bool_)
        slots = log >> _SLOT_SHIFT
        for slot, current in self._stamps.items():
            of_slot = np.flatnonzero(slots == slot)
            live[of_slot] = current[log[of_slot] & _ENTRY_MASK] == stamps[of_slot]
        kept = int(np.count_nonzero(live))
        capacity = max(_FIRST_CAPACITY, 2 * (kept + extra))
        new_log, new_stamps = np.zeros(capacity, dtype=np.int64), np.zeros(capacity, dtype=np.int64)
        new_log[:kept], new_stamps[:kept] = log[live], stamps[live]
        self._log, self._log_stamps = new_log, new_stamps
        self._head, self._tail = 0, kept
        self._generation += 1
