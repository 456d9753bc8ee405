"""The radix tree that Marconi's and SegLen's rules see in a namespace's index.

A *node* is a row with a state, or one that nothing continues; its edge is the attention back to the node before. A model with
attention only has a node where nothing continues a row, with an edge of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from appliance.l1.columns import Column
from appliance.l1.index import NamespaceIndex

_FIRST_SIZE = 1024


class RadixNodes:
    """Nodes of one namespace, dense. Kept in step by :meth:`stored` and :meth:`removed`.

    The invariant: ``continued`` of a row with attention is the number of its children with attention, and ``gain`` of a row
    with a state is its distance in chunks to the state before it.
    """

    def __init__(self, index: NamespaceIndex) -> None:
        rows = len(index.chunk_index.array)
        self.index = index
        self.has_state = Column(rows, np.uint8)
        self.continued = Column(rows, np.uint32)
        self.gain = Column(rows, np.uint32)
        self.place = Column(rows, np.uint32)
        self._has_attention = Column(rows, np.uint8)
        self._rows = Column(_FIRST_SIZE, np.int64)
        self._count = 0
        self._attention = frozenset(index.attention)
        if not index.others:
            self.gain.array[:] = 1

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows of all nodes; not to be kept, since it changes with them."""
        return self._rows.array[: self._count]

    # --- keeping step ---------------------------------------------------------------------------------------------

    def stored(self, entries: NDArray[np.int64]) -> None:
        """Entries are in the cache; rows that have others already are no surprise."""
        groups = self.index.group_count
        changed: set[int] = set()
        for entry in entries.tolist():
            row, group = divmod(entry, groups)
            changed.add(row)
            if group not in self._attention:
                if not self.has_state.view[row]:
                    self.has_state.view[row] = 1
                    self._measure_behind(row)
            elif not self._has_attention.view[row]:
                self._has_attention.view[row] = 1
                self.continued.view[row] = self._count_children(row)
                parent = self.index.parent_of(row)
                if parent >= 0:
                    self.continued.view[parent] += 1
                    changed.add(parent)
        self._judge(changed)

    def removed(self, entries: NDArray[np.int64]) -> None:
        """Entries have left the cache; their rows still lead to their parents."""
        groups = self.index.group_count
        present = self.index.present.view
        changed: set[int] = set()
        for entry in entries.tolist():
            row, group = divmod(entry, groups)
            changed.add(row)
            begin = row * groups
            if group not in self._attention:
                if self.has_state.view[row] and not any(present[begin + g] for g in self.index.others):
                    self.has_state.view[row] = 0
                    self._measure_behind(row)
            elif self._has_attention.view[row] and not any(present[begin + g] for g in self._attention):
                self._has_attention.view[row] = 0
                parent = self.index.parent_of(row)
                if parent >= 0 and self.continued.view[parent]:
                    self.continued.view[parent] -= 1
                    changed.add(parent)
        self._judge(changed)

    def _count_children(self, row: int) -> int:
        return sum(self._has_attention.view[child] for child in self.index.children(row))

    def _measure_behind(self, row: int) -> None:
        """A state came or went: it, and the next states behind it, save another length now."""
        has_state, gain = self.has_state.view, self.gain.view
        depth = self.index.chunk_index.view
        above = self.state_before(row)
        before = depth[above] if above >= 0 else -1
        if has_state[row]:
            gain[row] = depth[row] - before
            before = depth[row]
        behind = list(self.index.children(row))
        while behind:
            found = behind.pop()
            if has_state[found]:
                gain[found] = depth[found] - before
            else:
                behind.extend(self.index.children(found))

    def _judge(self, rows: Iterable[int]) -> None:
        has_state, place = self.has_state.view, self.place.view
        has_attention, continued = self._has_attention.view, self.continued.view
        for row in rows:
            is_node = has_state[row] or (has_attention[row] and not continued[row])
            if is_node and not place[row]:
                self._add(row)
            elif place[row] and not is_node:
                self._discard(row)

    def _add(self, row: int) -> None:
        if self._count == len(self._rows.array):
            self._rows.grow(2 * self._count)
        self._rows.view[self._count] = row
        self._count += 1
        self.place.view[row] = self._count

    def _discard(self, row: int) -> None:
        self._count -= 1
        last = self._rows.view[self._count]
        place = self.place.view[row]
        self._rows.view[place - 1] = last
        self.place.view[last] = place
        self.place.view[row] = 0

    # --- asking -----------------------------------------------------------------------------------------------------

    def state_before(self, row: int) -> int:
        """The nearest row before this one with a state, -1 if there is none."""
        parent_of, has_state = self.index.parent_of, self.has_state.view
        row = parent_of(row)
        while row >= 0 and not has_state[row]:
            row = parent_of(row)
        return row

    def entries_of(self, row: int) -> list[int]:
        """What goes with the node: its states, then the attention that only it needs, the deepest first."""
        index = self.index
        groups = index.group_count
        entries = [row * groups + group for group in index.others]
        if self.continued.view[row]:
            return entries
        entries += [row * groups + group for group in index.attention]
        if index.others:
            above = index.parent_of(row)
            while above >= 0 and not self.has_state.view[above] and self.continued.view[above] < 2:
                entries += [above * groups + group for group in index.attention]
                above = index.parent_of(above)
        return entries
