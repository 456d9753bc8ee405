"""What stands on what in one namespace: which rows can serve a hit, which continue others, and what an eviction would free.

A row *serves* if a hit can end there: its state or window is in the cache. In a model of attention only a hit can end
anywhere, and there a row serves if its owner says that prompts may come back to it (:meth:`serve`). A row is *evictable* if that breaks no other: its state can go, or nothing continues it. Evicting the last row that serves on a
branch leaves attention chunks that nothing can reach, so they go with it: together they are a *unit*.

Measuring a unit walks its branch, so the figures are kept until something changes them: a state that comes or goes above
it, or a branch that forks or ceases to. The invariant: where ``measured`` is set, ``gain`` and ``run`` are what a walk finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from appliance.l1.columns import Column
from appliance.l1.eviction.evictable import Evictable
from appliance.l1.index import NamespaceIndex

Rows = NDArray[np.int64]


class Figures(NamedTuple):
    """Of each row: what evicting it would free and cost. ``free`` is false where a lease or a pin holds it."""

    free: NDArray[np.bool_]
    gain_chunks: Rows
    extents: NDArray[np.float64]
    is_leaf: NDArray[np.bool_]


class Chains:
    """Rows of one namespace by what stands on them. Kept in step by :meth:`stored` and :meth:`removed`."""

    def __init__(self, index: NamespaceIndex, evictable: Evictable) -> None:
        self.index = index
        self._evictable = evictable
        rows = len(index.chunk_index.array)
        self.serves = Column(rows, np.uint8)
        self.has_attention = Column(rows, np.uint8)
        self.continued = Column(rows, np.uint32)
        self.places = Column(rows, np.uint32)
        self._measured = Column(rows, np.uint8)
        self._gain = Column(rows, np.uint32)
        self._run = Column(rows, np.uint32)
        self.attention_only = not index.others
        self._attends = [group in index.attention for group in range(index.group_count)]
        self._is_other = ~np.array(self._attends)
        evictable.add_namespace(index.slot, self.places)

    # --- keeping step: entries come by the dozen, for which plain loops are faster than numpy -----------------------

    def stored(self, entries: Sequence[tuple[int, int]]) -> list[int]:
        """These (row, group) are in the cache; returns the rows that serve from now on and did not before."""
        has_attention, serves, measured = self.has_attention.view, self.serves.view, self._measured.view
        attended: dict[int, None] = {}
        began: list[int] = []
        for row, group in entries:
            measured[row] = 0
            attends = self._attends[group]
            if attends and not has_attention[row]:
                attended[row] = None
            if not serves[row] and not attends:
                serves[row] = 1
                began.append(row)
        changed = self._attend(attended)
        for row in began:
            self._serving_changed(row)
        self._judge((*attended, *began, *changed))
        return began

    def removed(self, entries: Sequence[tuple[int, int]]) -> list[int]:
        """These (row, group) have left the cache; returns the rows that served until now and do not any more."""
        has_attention, serves, measured = self.has_attention.view, self.serves.view, self._measured.view
        lost: list[int] = []
        ended: list[int] = []
        for row, group in entries:
            measured[row] = 0
            attends = self._attends[group]
            if attends and has_attention[row] and not self._any_present(row, self.index.attention):
                has_attention[row] = 0
                lost.append(row)
                if serves[row] and self.attention_only:
                    serves[row] = 0
                    ended.append(row)
            if serves[row] and not attends and not self._any_present(row, self.index.others):
                serves[row] = 0
                ended.append(row)
        changed = self._unattend(lost)
        for row in ended:
            self._serving_changed(row)
        self._judge((*lost, *ended, *changed))
        return ended

    def serve(self, row: int, *, serves: bool) -> None:
        """Of a model of attention only: a hit is expected to end at the row, or not any more."""
        self.serves.view[row] = serves
        self._serving_changed(row)

    def _any_present(self, row: int, groups: Sequence[int]) -> bool:
        begin, present = row * self.index.group_count, self.index.present.view
        return any(present[begin + group] for group in groups)

    def _attend(self, rows: Iterable[int]) -> list[int]:
        """Rows have attention; returns the parents that had it before."""
        has_attention, parent_of = self.has_attention.view, self.index.parent_of
        changed = []
        for row in rows:
            parent = parent_of(row)
            if parent >= 0 and has_attention[parent]:
                self._fork_changes(parent, 1)
                changed.append(parent)
        for row in rows:
            has_attention[row] = 1
        for row in rows:
            self.continued.view[row] = sum(has_attention[child] for child in self.index.children(row))
        return changed

    def _unattend(self, rows: Iterable[int]) -> list[int]:
        """Rows have attention no more; returns the parents that still have."""
        changed = []
        for row in rows:
            parent = self.index.parent_of(row)
            if parent >= 0 and self.has_attention.view[parent]:
                self._fork_changes(parent, -1)
                changed.append(parent)
        return changed

    def _fork_changes(self, row: int, by: int) -> None:
        """One row more or less continues this one: the one branch that was or is alone ends elsewhere now."""
        before = self.continued.view[row]
        if max(before, before + by) == 2:
            for child in self.index.children(row):
                if self.has_attention.view[child]:
                    self._forget_leaf_of(child)
        self.continued.view[row] = before + by
        self._measured.view[row] = 0

    def _forget_leaf_of(self, row: int) -> None:
        """The leaf that this branch leads to, if nothing serves or forks on the way, is to be measured anew."""
        while row >= 0 and not self.serves.view[row] and self.continued.view[row] == 1:
            children = (child for child in self.index.children(row) if self.has_attention.view[child])
            row = next(children, -1)
        if row >= 0:
            self._measured.view[row] = 0

    def _serving_changed(self, row: int) -> None:
        """Hits behind the row fall back to another one now, down to the next rows that serve."""
        measured, serves = self._measured.view, self.serves.view
        measured[row] = 0
        level = self.index.children(row)
        while level:
            found = level.pop()
            measured[found] = 0
            if not serves[found]:
                level.extend(self.index.children(found))

    def _judge(self, rows: Iterable[int]) -> None:
        slot, places = self.index.slot, self.places.view
        for row in rows:
            evictable = bool(self.has_attention.view[row] and not self.continued.view[row]) or bool(
                self.serves.view[row] and not self.attention_only
            )
            if evictable != bool(places[row]):
                change = self._evictable.add if evictable else self._evictable.discard
                change(slot, row)

    # --- asking ---------------------------------------------------------------------------------------------------

    def serving_above(self, row: int) -> int:
        """The nearest row before ``row`` that serves, -1 if none does."""
        parents, serves = self.index.parents.view, self.serves.view
        row = parents[row] - 1
        while row >= 0 and not serves[row]:
            row = parents[row] - 1
        return row

    def attended_above(self, row: int) -> int:
        """The nearest row before ``row`` that has attention, -1 if none does."""
        parents, has_attention = self.index.parents.view, self.has_attention.view
        row = parents[row] - 1
        while row >= 0 and not has_attention[row]:
            row = parents[row] - 1
        return row

    def serving_at(self, row: int) -> int:
        """``row`` if it serves, else the nearest before it."""
        return row if self.serves.view[row] else self.serving_above(row)

    def descends(self, row: int, ancestor: int) -> bool:
        """Whether ``row`` is ``ancestor`` or continues it."""
        depth, parents = self.index.chunk_index.view, self.index.parents.view
        above = depth[ancestor]
        while row >= 0 and depth[row] > above:
            row = parents[row] - 1
        return row == ancestor

    def is_leaf(self, row: int) -> bool:
        """Whether no attention in the cache continues the row."""
        return not self.continued.view[row]

    def is_measured(self, row: int) -> bool:
        """Whether nothing has changed what the row's eviction would free and cost since :meth:`figures`."""
        return bool(self._measured.view[row])

    def figures(self, rows: Rows) -> Figures:
        """What evicting each of these evictable rows would free and cost. Attention chunks count at their average size."""
        for row in rows[self._measured.array[rows] == 0].tolist():
            self._measure(row)
        index, groups = self.index, self.index.group_count
        leaf = self.continued.array[rows] == 0
        counted = leaf[:, None] | self._is_other[None, :]
        held = (index.holds.array.reshape(-1, groups)[rows] != 0) | (
            index.pins.array.reshape(-1, groups)[rows] != 0
        )
        own = (index.extents.array.reshape(-1, groups)[rows] * counted).sum(axis=1)
        above = (self._run.array[rows] - 1) * self._attention_extents()
        return Figures(
            free=~(held & counted).any(axis=1),
            gain_chunks=self._gain.array[rows].astype(np.int64),
            extents=np.maximum(1.0, own + above),
            is_leaf=leaf,
        )

    def unit(self, row: int) -> Sequence[int]:
        """The rows whose attention goes when ``row`` is evicted, the deepest first; none for a state alone."""
        if self.continued.view[row]:
            return ()
        rows, parents = [row], self.index.parents.view
        for _ in range(self._run.view[row] - 1):
            row = parents[row] - 1
            if row < 0:
                break
            rows.append(row)
        return rows

    def _measure(self, row: int) -> None:
        """Walk up to what serves or forks, then on to what serves."""
        serves, continued, parents = self.serves.view, self.continued.view, self.index.parents.view
        run = 1
        above = parents[row] - 1
        if not continued[row]:
            while above >= 0 and not serves[above] and continued[above] < 2:
                run += 1
                above = parents[above] - 1
        while above >= 0 and not serves[above]:
            above = parents[above] - 1
        depth = self.index.chunk_index.view
        self._run.view[row] = run
        self._gain.view[row] = depth[row] - depth[above] if above >= 0 else depth[row] + 1
        self._measured.view[row] = 1

    def _attention_extents(self) -> float:
        """Extents of one chunk's attention over all groups and shards, on average."""
        extents = 0.0
        for group in self.index.attention:
            totals = self.index.totals[group]
            if totals.objects:
                extents += totals.extents / totals.objects * int(self.index.full_masks[group]).bit_count()
        return extents
