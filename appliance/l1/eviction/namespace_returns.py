"""What the policy knows of one namespace: the boundaries that prompts may come back to, and the row that serves each.

Invariant: a boundary has at most one owner, a row that serves at or before it; and ``boundary`` and the memory's ``row``
name each other or are both 0. When an owner stops serving, its boundaries fall back to the one above, as prompts would.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.geometry import GroupKind
from appliance.l1.columns import Column
from appliance.l1.eviction import kinds
from appliance.l1.eviction.boundaries import BoundaryMemory
from appliance.l1.eviction.chains import Chains
from appliance.l1.eviction.evictable import Evictable
from appliance.l1.eviction.rates import ReturnRates
from appliance.l1.index import NamespaceIndex

Entries = NDArray[np.int64]
Rows = NDArray[np.int64]

_REMEMBERED = 131_072
_MOST_OWNED = 32
"""A row that serves so many boundaries is worth keeping whatever the others add."""


class NamespaceReturns:
    """Boundaries, owners and chains of one namespace."""

    def __init__(self, index: NamespaceIndex, evictable: Evictable) -> None:
        rows = len(index.chunk_index.array)
        self.index = index
        self.chains = Chains(index, evictable)
        self.rates = ReturnRates(kinds.KINDS)
        self.memory = BoundaryMemory(self.rates, _REMEMBERED)
        self.boundary = Column(rows, np.uint32)
        """By row: the boundary at its end, one higher."""
        self.version = Column(rows, np.uint32)
        """By row: counts up when something was stored there or a life began."""
        self.asked = 0
        self.learned_at = 0
        self._is_state = [group.kind is GroupKind.RECURRENT for group in index.groups]
        self.has_states = any(self._is_state)
        self._owned: dict[int, list[int]] = {}
        self._window = max((window for window in index.windows), default=1)

    # --- lives ----------------------------------------------------------------------------------------------------

    def begin(self, key: bytes, kind: int, row: int, server: int, now: float) -> int:
        """A life begins at a chunk's end; ``row`` and ``server`` are -1 where there is none."""
        memory = self.memory
        boundary, forgotten = memory.begin(key, kind, now)
        if forgotten >= 0:
            self._disown(forgotten)
        if row >= 0:
            self.version.view[row] += 1
            self._settle(boundary, row)
        if server >= 0 and not memory.owner.view[boundary]:
            self._own(server, boundary)
        return boundary

    # --- what enters and leaves -------------------------------------------------------------------------------------

    def stored(self, entries: Entries, now: float) -> None:
        """Entries are in the cache: boundaries that are remembered there have a place now, and maybe a nearer owner."""
        rows, groups = np.divmod(entries, self.index.group_count)
        self.version.array[rows] += 1
        pairs = list(zip(rows.tolist(), groups.tolist(), strict=True))
        began = self.chains.stored(pairs)
        self._arrived(pairs, now)
        # Shallow before deep: each takes over from the row above it what lies behind itself.
        for row in sorted(began, key=self.index.chunk_index.view.__getitem__):
            self._got_server(row)

    def take_over(self, entries: Entries, now: float) -> None:
        """The cache holds these entries already: every place where a hit can end is one that prompts may come back to.

        Lives there began when the place was last used.
        """
        self.stored(entries, now)
        index, chains = self.index, self.chains
        for row in np.unique(entries // index.group_count).tolist():
            begin = row * index.group_count
            if chains.attention_only and chains.is_leaf(row) and not self.boundary.view[row]:
                self.begin(index.key_of(row), kinds.offered(), row, -1, now)
            boundary = self.boundary.view[row] - 1
            if boundary >= 0:
                used = max(index.used_at.view[begin : begin + index.group_count])
                self.memory.since_ms.view[boundary] = int(min(used, now) * 1000)

    def removed(self, entries: Entries) -> None:
        """Entries are in the cache no more."""
        rows, groups = np.divmod(entries, self.index.group_count)
        pairs = list(zip(rows.tolist(), groups.tolist(), strict=True))
        for row in self.chains.removed(pairs):
            self._lost_server(row)
        boundary = self.boundary.view
        for row, _ in pairs:
            if boundary[row] and not self.is_here(row):
                self._unsettle(boundary[row] - 1, row)

    def is_here(self, row: int) -> bool:
        """Whether anything of the row is in the cache."""
        return bool(self.chains.has_attention.view[row] or self.chains.serves.view[row])

    def _arrived(self, entries: Sequence[tuple[int, int]], now: float) -> None:
        boundary = self.boundary.view
        rows = list(dict.fromkeys(row for row, _ in entries if not boundary[row]))
        with_state = {row for row, group in entries if self._is_state[group]}
        find = self.memory.find
        for row, key in zip(rows, self.index.keys_of(rows), strict=True):
            found = find(key)
            if found >= 0:
                self._settle(found, row)
            elif row in with_state:
                found = self.begin(key, kinds.offered(), row, -1, now)
                self.memory.is_end.view[found] = 1

    def _settle(self, boundary: int, row: int) -> None:
        before = self.memory.row.view[boundary] - 1
        if before == row:
            return
        if before >= 0:
            self._unsettle(boundary, before)
        self.memory.row.view[boundary] = row + 1
        self.boundary.view[row] = boundary + 1
        if self.chains.attention_only and not self.chains.serves.view[row]:
            self.chains.serve(row, serves=True)
            self._got_server(row)

    def _unsettle(self, boundary: int, row: int) -> None:
        self.memory.row.view[boundary] = 0
        self.boundary.view[row] = 0
        if self.chains.attention_only and self.chains.serves.view[row]:
            self.chains.serve(row, serves=False)
            self._lost_server(row)

    # --- who serves which boundary ------------------------------------------------------------------------------------

    def _got_server(self, row: int) -> None:
        """The row serves from now on: itself, and what was served by the one above and lies behind this."""
        owner, at = self.memory.owner.view, self.memory.row.view
        depth, descends = self.index.chunk_index.view, self.chains.descends
        theirs = self._owned.get(self.chains.serving_above(row), [])
        behind = [b for b in theirs if at[b] and depth[at[b] - 1] >= depth[row] and descends(at[b] - 1, row)]
        for each in behind:
            theirs.remove(each)
            owner[each] = 0
            self._own(row, each)
        boundary = self.boundary.view[row] - 1
        if boundary >= 0 and owner[boundary] != row + 1:
            if owner[boundary]:
                self._owned[owner[boundary] - 1].remove(boundary)
            self._own(row, boundary)

    def _lost_server(self, row: int) -> None:
        """The row serves no more: prompts that come back to its boundaries fall back to the one above."""
        chains, owner = self.chains, self.memory.owner.view
        owned = self._owned.pop(row, [])
        for each in owned:
            owner[each] = 0
        if chains.attention_only and owned:
            above = chains.attended_above(row)
            if above >= 0 and not chains.serves.view[above]:
                chains.serve(above, serves=True)
        else:
            above = chains.serving_above(row)
        if above >= 0:
            for each in owned:
                self._own(above, each)

    def _own(self, row: int, boundary: int) -> None:
        served = self._owned.setdefault(row, [])
        served.append(boundary)
        self.memory.owner.view[boundary] = row + 1
        if len(served) > _MOST_OWNED:
            since, own = self.memory.since_ms.view, self.boundary.view[row] - 1
            served.sort(key=lambda b: (b != own, -since[b]))
            for each in served[_MOST_OWNED // 2 :]:
                self.memory.owner.view[each] = 0
            del served[_MOST_OWNED // 2 :]

    def _disown(self, boundary: int) -> None:
        owner = self.memory.owner.view[boundary] - 1
        if owner >= 0:
            self._owned[owner].remove(boundary)
            self.memory.owner.view[boundary] = 0
        row = self.memory.row.view[boundary] - 1
        if row >= 0:
            self._unsettle(boundary, row)

    # --- what it is worth -----------------------------------------------------------------------------------------

    def expected_returns(self, rows: Rows, now: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Expected returns per second to the boundaries that each row serves, and whether it serves any."""
        find = self._owned.get if self._window <= 1 else self._served_by_window
        served: list[Sequence[int]] = [find(row) or () for row in rows.tolist()]
        counts = np.fromiter(map(len, served), dtype=np.int64, count=len(served))
        flat = np.array([b for each in served for b in each], dtype=np.int64)
        worth = self.memory.worth_of(flat, now)
        of_row = np.repeat(np.arange(len(served)), counts)
        sums = np.bincount(of_row, weights=worth, minlength=len(served))
        return sums.astype(np.float64), counts > 0

    def _served_by_window(self, row: int) -> Sequence[int]:
        """The boundaries that need this row: its own, or those just behind it whose window reaches back to it."""
        level = [row]
        for _ in range(self._window):
            for each in level:
                if each in self._owned:
                    return self._owned[each]
            level = [child for each in level[:_MOST_OWNED] for child in self.index.children(each)]
        return ()

    def entries_below(self, row: int) -> Entries:
        """Every entry in the cache of the row and of those it continues, the deepest first."""
        index, below = self.index, []
        while row >= 0:
            begin = row * index.group_count
            below += [begin + group for group in (*index.others, *index.attention)]
            row = index.parents.view[row] - 1
        entries = np.array(below, dtype=np.int64)
        present: Entries = entries[index.present.array[entries] != 0]
        return present

    def state_extents(self) -> float:
        """Extents of one complete state or window of this namespace, 0 while none was stored."""
        extents = 0.0
        for group in self.index.others:
            totals = self.index.totals[group]
            if totals.objects:
                shards = int(self.index.full_masks[group]).bit_count()
                extents += totals.extents / totals.objects * shards
        return extents
