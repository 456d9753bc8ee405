"""The daemon's index for a cache without bytes: whole prompts are stored and taken out in one go.

Objects lie nowhere and every entry has one shard, so rows and entries of a prompt change in bulk; what a row, an entry and
a chain are, and how they are found, is :class:`NamespaceIndex`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.l1.index import NamespaceIndex, Rows
from appliance.l1.removals import Removal


class KeysOnlyIndex(NamespaceIndex):
    """Entries are present or not; there are no reservations and no addresses."""

    def ensure_rows(self, keys: Sequence[bytes], rows: Rows) -> Rows:
        """The rows of a prompt's chunks from the first on; ``rows`` are those there are, -1 where one is to be made."""
        missing = np.flatnonzero(rows < 0)
        if not len(missing):
            return rows
        made = self._take_rows(len(missing))
        fresh = [keys[at] for at in missing.tolist()]
        for key, row in zip(fresh, made.tolist(), strict=True):
            self._maps[key[0]][key] = row
        self._keys[made] = np.frombuffer(b"".join(fresh), dtype=self._keys.dtype)
        self._mapped.array[made] = 1
        self.chunk_index.array[made] = missing
        self.row_count += len(made)
        self.removal.array.reshape(-1, self.group_count)[made] = Removal.NONE
        complete = rows.copy()
        complete[missing] = made
        self._link_chain(complete, missing)
        return complete

    def _link_chain(self, rows: Rows, missing: Rows) -> None:
        """Link the new rows at these places of a prompt to the rows before them."""
        made = rows[missing]
        self.parents.array[made] = np.where(missing > 0, rows[missing - 1] + 1, 0)
        for column in (self._first_child, self._next_sibling, self._previous_sibling):
            column.array[made] = 0
        is_first = np.ones(len(missing), dtype=np.bool_)
        is_first[1:] = missing[1:] != missing[:-1] + 1
        inner = made[~is_first]
        self._first_child.array[self.parents.array[inner].astype(np.int64) - 1] = inner + 1
        for row in made[is_first].tolist():
            self._join(row, self.parent_of(row))

    def _take_rows(self, count: int) -> Rows:
        reused = min(count, len(self._free_rows))
        taken = self._free_rows[len(self._free_rows) - reused :]
        del self._free_rows[len(self._free_rows) - reused :]
        first = self._rows_made
        assert first + count - reused <= self._capacity, (
            "a row without an extent: the index would grow past its memory"
        )
        self._rows_made += count - reused
        return np.array([*taken, *range(first, self._rows_made)], dtype=np.int64)

    def store(self, entries: NDArray[np.int64], extents: NDArray[np.int64], now_seconds: int) -> None:
        """These distinct entries are present from now on."""
        self.present.array[entries] = 1
        self.extents.array[entries] = extents
        self.removal.array[entries] = Removal.NONE
        self.stored_at.array[entries] = now_seconds
        self.used_at.array[entries] = now_seconds
        self._count(entries, extents, 1)

    def take_out(self, entries: NDArray[np.int64]) -> None:
        """These distinct entries, which are present and not held, are evicted."""
        self._count(entries, self.extents.array[entries], -1)
        self.present.array[entries] = 0
        self.extents.array[entries] = 0
        self.removal.array[entries] = Removal.EVICTED

    def rows_with_more(self, rows: Sequence[int]) -> list[int]:
        """Those of these rows that still hold something, or that a row continues which is not one of them."""
        own = set(rows)
        first, following = self._first_child.view, self._next_sibling.view
        more = []
        for row in rows:
            child = first[row]
            continued = child and (following[child - 1] or child - 1 not in own)
            if continued or self._holds_something(row):
                more.append(row)
        return more

    def recycle(self, rows: Sequence[int]) -> None:
        """Give back those of these distinct rows that hold nothing and that nobody holds."""
        holds, groups = self.holds.view, self.group_count
        empty = [
            row
            for row in rows
            if not self._holds_something(row) and not any(holds[row * groups : (row + 1) * groups])
        ]
        for row, key in zip(empty, self.keys_of(empty), strict=True):
            del self._maps[key[0]][key]
            self._unlink(row)
            self._mapped.view[row] = 0
        self._free_rows.extend(empty)
        self.row_count -= len(empty)

    def _holds_something(self, row: int) -> bool:
        begin = row * self.group_count
        return any(self.present.view[begin : begin + self.group_count])

    def _count(self, entries: NDArray[np.int64], extents: NDArray[np.int64], sign: int) -> None:
        groups = entries % self.group_count
        objects = np.bincount(groups, minlength=self.group_count).tolist()
        summed = np.bincount(groups, weights=extents, minlength=self.group_count).tolist()
        for group, totals in enumerate(self.totals):
            totals.objects += sign * objects[group]
            totals.extents += sign * int(summed[group])
