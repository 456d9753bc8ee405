"""What became of the bytes that were kept: read again or not, evicted, and asked for after they were evicted.

Counted per namespace and group since the daemon started, in extents. *Regret* is what a prompt would have loaded had it not
been evicted: attention of the chunks behind its hit that are gone for that reason, up to the deepest boundary at which a
state is there or was evicted, and that state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.l1.columns import Column
from appliance.l1.eviction import Prompt
from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Ghosts, Removal
from appliance.l1.segment import HeadRecord
from appliance.l1.store import Reserved, StoreObserver

Entries = NDArray[np.int64]


@dataclass(slots=True)
class GroupLedger:
    """Extents of one group since the start: stored, read at least once since, evicted, and regretted."""

    stored: int = 0
    read: int = 0
    evicted: int = 0
    regretted: int = 0


class RetentionLedger:
    """Stands between the store and its observer, and is told of reads and of prompts.

    An entry's flag says whether it was read since it was stored, so that it counts once.
    """

    def __init__(self, observer: StoreObserver) -> None:
        self._observer = observer
        self._was_read: dict[int, Column] = {}
        self._groups: dict[int, list[GroupLedger]] = {}

    def of(self, index: NamespaceIndex) -> list[GroupLedger]:
        """The ledgers of a namespace, one a group."""
        if index.slot not in self._groups:
            self._groups[index.slot] = [GroupLedger() for _ in index.groups]
            self._was_read[index.slot] = Column(len(index.present.array), np.uint8)
        return self._groups[index.slot]

    # --- the store tells ----------------------------------------------------------------------------------------

    def stored(self, reserved: Reserved, record: HeadRecord) -> None:
        """See :class:`StoreObserver`."""
        self.of(reserved.index)[record.group].stored += record.extent_count
        self._observer.stored(reserved, record)

    def removed(self, index: NamespaceIndex, row: int, group: int, cause: Removal, extents: int) -> None:
        """See :class:`StoreObserver`."""
        ledger = self.of(index)[group]
        if cause is Removal.EVICTED:
            ledger.evicted += extents
        self._was_read[index.slot].view[index.entry(row, group)] = 0
        self._observer.removed(index, row, group, cause, extents)

    # --- prompts ------------------------------------------------------------------------------------------------

    def read(self, index: NamespaceIndex, entries: Entries) -> None:
        """A lease was granted on these entries."""
        ledgers = self.of(index)
        was_read = self._was_read[index.slot].array
        fresh = entries[was_read[entries] == 0]
        was_read[fresh] = 1
        extents = index.extents.array[fresh]
        summed = np.bincount(fresh % index.group_count, weights=extents, minlength=index.group_count)
        for ledger, more in zip(ledgers, summed.tolist(), strict=True):
            ledger.read += int(more)

    def asked(self, index: NamespaceIndex, ghosts: Ghosts, prompt: Prompt) -> None:
        """A prompt came: count what of it was evicted."""
        masks = regretted_groups(index, ghosts, prompt)
        if not masks:
            return
        ledgers = self.of(index)
        for group, extents in enumerate(_entry_extents(index)):
            ledgers[group].regretted += extents * sum(mask >> group & 1 for mask in masks)


def regretted_groups(index: NamespaceIndex, ghosts: Ghosts, prompt: Prompt) -> list[int]:
    """Of each chunk that the prompt would have loaded behind its hit, the mask of groups that were evicted."""
    attention = sum(1 << group for group in index.attention)
    states = sum(1 << group for group in index.others)
    found: list[int] = []
    boundary = 0
    for chunk in range(prompt.hit, len(prompt.rows)):
        evicted, stored = _fate(index, ghosts, prompt.keys[chunk], int(prompt.rows[chunk]))
        if (evicted | stored) & attention != attention:
            break
        found.append(evicted & attention)
        if (evicted | stored) & states == states:
            boundary = len(found)
            at_boundary = evicted & states
    if boundary:
        found[boundary - 1] |= at_boundary
    return found[:boundary]


def _fate(index: NamespaceIndex, ghosts: Ghosts, key: bytes, row: int) -> tuple[int, int]:
    """The masks of groups of a chunk that were evicted, and that are in the cache."""
    if row < 0:
        return ghosts.evicted_groups(index.slot, key), 0
    begin = row * index.group_count
    present = index.present.view[begin : begin + index.group_count]
    stored = sum(1 << group for group, each in enumerate(present) if each)
    return index.groups_removed(row, Removal.EVICTED) & ~stored, stored


def _entry_extents(index: NamespaceIndex) -> Sequence[int]:
    """Extents of one complete entry of each group, on average; 0 where none is in the cache."""
    return [
        round(totals.extents / totals.objects * int(mask).bit_count()) if totals.objects else 0
        for totals, mask in zip(index.totals, index.full_masks.tolist(), strict=True)
    ]
