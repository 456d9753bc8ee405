"""What stands on what in one namespace: which rows can serve a hit, which continue others, and what an eviction would free.

A row *serves* if a hit can end there: its state or window is in the cache, or its model has attention only. A row is
*evictable* if that breaks no other: its state can go, or nothing continues it. Evicting the last row that serves on a
branch leaves attention chunks that nothing can reach, so they go with it: together they are a *unit*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from appliance.l1.columns import Column
from appliance.l1.index import NamespaceIndex

NONE = -1


class Evictable:
    """All evictable rows of all namespaces, dense, so that samples can be drawn from them."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self._places: dict[int, Column] = {}

    def add_namespace(self, slot: int, places: Column) -> None:
        """``places`` holds each row's position here, one higher."""
        self._places[slot] = places

    def set(self, slot: int, row: int, *, evictable: bool) -> None:
        """Put a row in or take it out; doing so twice is harmless."""
        places = self._places[slot].view
        place = places[row]
        if evictable:
            if not place:
                self.rows.append((slot, row))
                places[row] = len(self.rows)
        elif place:
            last = self.rows.pop()
            if place <= len(self.rows):
                self.rows[place - 1] = last
                self._places[last[0]].view[last[1]] = place
            places[row] = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """What goes together: ``rows`` from the deepest up, without whose bytes hits end ``gain_chunks`` earlier."""

    rows: tuple[int, ...]
    gain_chunks: int
    extents: int


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
        self._attention_only = not index.others
        evictable.add_namespace(index.slot, self.places)

    # --- keeping step -------------------------------------------------------------------------------------------

    def stored(self, row: int, group: int) -> bool:
        """An entry is in the cache; returns whether its row serves from now on and did not before."""
        index = self.index
        attends = group in index.attention
        if attends and not self.has_attention.view[row]:
            self.has_attention.view[row] = 1
            self.continued.view[row] = sum(self.has_attention.view[child] for child in index.children(row))
            parent = index.parent_of(row)
            if parent >= 0:
                self.continued.view[parent] += 1
                self._judge(parent)
        served = self.serves.view[row]
        if not attends or self._attention_only:
            self.serves.view[row] = 1
        self._judge(row)
        return not served and bool(self.serves.view[row])

    def removed(self, row: int, group: int) -> bool:
        """An entry has left the cache; returns whether its row served until now and does not any more."""
        index = self.index
        begin = row * index.group_count
        present = index.present.view
        served = self.serves.view[row]
        if group in index.attention:
            if self.has_attention.view[row] and not any(present[begin + g] for g in index.attention):
                self._lost_attention(row)
        elif not any(present[begin + g] for g in index.others):
            self.serves.view[row] = 0
        self._judge(row)
        return bool(served) and not self.serves.view[row]

    def _lost_attention(self, row: int) -> None:
        self.has_attention.view[row] = 0
        if self._attention_only:
            self.serves.view[row] = 0
        parent = self.index.parent_of(row)
        if parent >= 0 and self.continued.view[parent]:
            self.continued.view[parent] -= 1
            self._judge(parent)

    def _judge(self, row: int) -> None:
        has_state = self.serves.view[row] and not self._attention_only
        is_leaf = self.has_attention.view[row] and not self.continued.view[row]
        self._evictable.set(self.index.slot, row, evictable=bool(has_state or is_leaf))

    # --- asking ---------------------------------------------------------------------------------------------------

    def serving_above(self, row: int) -> int:
        """The nearest row before ``row`` that serves, ``NONE`` if none does."""
        parent_of, serves = self.index.parent_of, self.serves.view
        row = parent_of(row)
        while row >= 0 and not serves[row]:
            row = parent_of(row)
        return row

    def serving_at(self, row: int) -> int:
        """``row`` if it serves, else the nearest before it."""
        return row if self.serves.view[row] else self.serving_above(row)

    def descends(self, row: int, ancestor: int) -> bool:
        """Whether ``row`` is ``ancestor`` or continues it."""
        depth = self.index.chunk_index.view
        parent_of = self.index.parent_of
        while row >= 0 and depth[row] > depth[ancestor]:
            row = parent_of(row)
        return row == ancestor

    def is_leaf(self, row: int) -> bool:
        """Whether nothing in the cache continues the row."""
        return not self.continued.view[row]

    def unit(self, row: int) -> Unit | None:
        """What evicting the row takes with it, ``None`` while a lease or a pin holds it."""
        index = self.index
        groups = index.others if self.continued.view[row] else range(index.group_count)
        begin = row * index.group_count
        holds, pins, size = index.holds.view, index.pins.view, index.extents.view
        extents = 0
        for group in groups:
            entry = begin + group
            if holds[entry] or pins[entry]:
                return None
            extents += size[entry]
        depth = index.chunk_index.view[row] + 1
        if self.continued.view[row]:
            return Unit((row,), depth - self._depth_of(self.serving_above(row)), extents)
        return self._branch(row, depth, extents)

    def _branch(self, row: int, depth: int, extents: int) -> Unit:
        """The row and the attention that only it needs, up to what serves or forks; then on to what serves."""
        index, serves, continued = self.index, self.serves.view, self.continued.view
        parent_of, size = index.parent_of, index.extents.view
        rows = [row]
        above = parent_of(row)
        while above >= 0 and not serves[above] and continued[above] < 2:
            rows.append(above)
            for group in index.attention:
                extents += size[above * index.group_count + group]
            above = parent_of(above)
        while above >= 0 and not serves[above]:
            above = parent_of(above)
        return Unit(tuple(rows), depth - self._depth_of(above), extents)

    def _depth_of(self, row: int) -> int:
        return self.index.chunk_index.view[row] + 1 if row >= 0 else 0
