"""The index of one namespace: a row a chunk, with a mask of shards per group.

Everything is in columns: a lookup of a long prompt gathers its rows once and works on whole arrays. An *entry* is one
(chunk, group): the unit of leases and of eviction, over all its shards, since losing one shard strands the others.

``present``, ``pending`` and ``doomed`` are disjoint masks: committed objects, reservations, and objects that left the
cache while a lease still reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.geometry import GroupKind, ObjectGroup
from appliance.hashing import KEY_BYTES
from appliance.l1.columns import Column
from appliance.l1.removals import Removal

_KEY_SHARDS = 256
"""One dictionary of millions of keys stalls for a tenth of a second when it grows; 256 small ones do not."""

_MOST_BEHIND = 16_384

Rows = NDArray[np.int64]


class GroupTotals:
    """Exact totals of one group of the namespace, in objects and extents."""

    __slots__ = ("extents", "leased_extents", "objects", "reserved_extents")

    def __init__(self) -> None:
        self.objects = 0
        self.extents = 0
        self.leased_extents = 0
        self.reserved_extents = 0


class NamespaceIndex:
    """Rows, entries and objects of one namespace. ``slot`` is its number in the recency log."""

    def __init__(
        self,
        slot: int,
        namespace: bytes,
        model: str,
        groups: Sequence[ObjectGroup],
        chunk_tokens: int,
        capacity: int,
    ) -> None:
        self.slot = slot
        self.namespace = namespace
        self.model = model
        self.groups = tuple(groups)
        self.chunk_tokens = chunk_tokens
        self.windows = [group.window_chunks(chunk_tokens) for group in groups]
        self.group_count = len(groups)
        self.full_masks: NDArray[np.uint64] = np.array([group.full_mask for group in groups], dtype=np.uint64)
        self.attention = [g for g, group in enumerate(groups) if group.kind is GroupKind.ATTENTION]
        self.others = [g for g, group in enumerate(groups) if group.kind is not GroupKind.ATTENTION]
        self.totals = [GroupTotals() for _ in groups]
        self._shard_base = [sum(group.shards for group in groups[:g]) for g in range(len(groups))]
        self._shards = sum(group.shards for group in groups)
        self._capacity = capacity
        self._maps: list[dict[bytes, int]] = [{} for _ in range(_KEY_SHARDS)]
        self._free_rows: list[int] = []
        self._rows_made = 0
        self.row_count = 0
        self.any_pins = False
        self._keys: NDArray[np.void] = np.zeros(capacity, dtype=f"V{KEY_BYTES}")
        # Row columns. Row numbers in them are one higher than the row, so that 0 means none. Whoever walks many rows
        # reads ``parents`` itself.
        self.parents = Column(capacity, np.uint32)
        self._first_child = Column(capacity, np.uint32)
        self._next_sibling = Column(capacity, np.uint32)
        self._previous_sibling = Column(capacity, np.uint32)
        self.chunk_index = Column(capacity, np.uint32)
        self._mapped = Column(capacity, np.uint8)
        # Entry columns, at row * groups + group.
        entries = capacity * self.group_count
        self.present = Column(entries, np.uint64)
        self.pending = Column(entries, np.uint64)
        self.doomed = Column(entries, np.uint64)
        self.holds = Column(entries, np.int32)
        self.pins = Column(entries, np.int32)
        self.extents = Column(entries, np.uint32)
        self.removal = Column(entries, np.uint8)
        self.stored_at = Column(entries, np.uint32)
        self.used_at = Column(entries, np.uint32)
        # Object column, at row * shards + base of the group + shard; addresses one higher, 0 means none.
        self._address = Column(capacity * self._shards, np.uint64)

    # --- rows -----------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """The row of a chunk, -1 if the index has none."""
        return self._maps[key[0]].get(key, -1)

    def rows_of(self, keys: Sequence[bytes]) -> Rows:
        """The rows of chunks, -1 where there is none."""
        maps = self._maps
        return np.fromiter((maps[key[0]].get(key, -1) for key in keys), dtype=np.int64, count=len(keys))

    def key_of(self, row: int) -> bytes:
        """The chunk key of a row."""
        key: bytes = self._keys[row].tobytes()
        return key

    def parent_of(self, row: int) -> int:
        """The row of the chunk before, -1 if it is not in the index."""
        return self.parents.view[row] - 1

    def keys_of(self, rows: Sequence[int] | Rows) -> list[bytes]:
        """The chunk keys of rows."""
        packed = self._keys[np.asarray(rows, dtype=np.int64)].tobytes()
        return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]

    def ensure_row(self, key: bytes, parent: bytes, chunk_index: int) -> int:
        """The row of a chunk, made and linked to its parent's if it is new."""
        row = self.find(key)
        if row >= 0:
            return row
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = self._rows_made
            assert row < self._capacity, "a row without an extent: the index would grow past the arena"
            self._rows_made += 1
        self._maps[key[0]][key] = row
        self._mapped.view[row] = 1
        self._keys[row] = np.void(key)
        self.chunk_index.view[row] = chunk_index
        self.row_count += 1
        begin = row * self.group_count
        self.removal.array[begin : begin + self.group_count] = Removal.NONE
        self._link(row, self.find(parent) if chunk_index else -1)
        return row

    def _link(self, row: int, parent: int) -> None:
        """Make a row that has no children yet a child of its parent, if there is one."""
        self._first_child.view[row] = 0
        self._join(row, parent)

    def _join(self, row: int, parent: int) -> None:
        self.parents.view[row] = parent + 1
        self._previous_sibling.view[row] = 0
        following = self._first_child.view[parent] if parent >= 0 else 0
        self._next_sibling.view[row] = following
        if following:
            self._previous_sibling.view[following - 1] = row + 1
        if parent >= 0:
            self._first_child.view[parent] = row + 1

    def _unlink(self, row: int) -> None:
        for child in self.children(row):
            self.parents.view[child] = 0
            self._previous_sibling.view[child] = 0
            self._next_sibling.view[child] = 0
        parent, following = self.parents.view[row], self._next_sibling.view[row]
        previous = self._previous_sibling.view[row]
        if previous:
            self._next_sibling.view[previous - 1] = following
        elif parent:
            self._first_child.view[parent - 1] = following
        if following:
            self._previous_sibling.view[following - 1] = previous
        self.parents.view[row] = 0
        self._first_child.view[row] = 0

    def children(self, row: int) -> list[int]:
        """Rows whose parent is ``row``."""
        found = []
        child = self._first_child.view[row]
        while child:
            found.append(child - 1)
            child = self._next_sibling.view[child - 1]
        return found

    def descendants(self, row: int) -> Iterator[int]:
        """Rows that continue the prompt of ``row``, nearest first."""
        queue = self.children(row)
        while queue:
            found = queue.pop()
            yield found
            queue.extend(self.children(found))

    def entries_behind(self, row: int) -> Rows:
        """Entries that no hit can use without the attention of ``row``, the deepest first; bounded in number."""
        present, groups = self.present.view, self.group_count
        behind: list[int] = []
        for other in itertools.chain((row,), self.descendants(row)):
            behind.extend(e for e in range(other * groups, (other + 1) * groups) if present[e])
            if len(behind) > _MOST_BEHIND:
                break
        return np.array(behind[::-1], dtype=np.int64)

    def rows(self) -> Iterator[int]:
        """Every row that a key leads to."""
        for mapping in self._maps:
            yield from mapping.values()

    def unmap(self, row: int) -> None:
        """No key leads to the row any more; it lives until its last object is gone."""
        if self._mapped.view[row]:
            key = self.key_of(row)
            del self._maps[key[0]][key]
            self._mapped.view[row] = 0
            self.row_count -= 1
            self._unlink(row)

    def recycle_if_empty(self, row: int) -> bool:
        """Give a row back once it holds nothing; returns whether it did."""
        begin, end = row * self.group_count, (row + 1) * self.group_count
        for entry in range(begin, end):
            if (
                self.present.view[entry] | self.pending.view[entry] | self.doomed.view[entry]
                or self.holds.view[entry]
            ):
                return False
        self.unmap(row)
        self._free_rows.append(row)
        return True

    # --- for the consistency check ------------------------------------------------------------------------------

    @property
    def rows_made(self) -> int:
        """Rows that were ever in use; they are the first ones of every column."""
        return self._rows_made

    @property
    def key_count(self) -> int:
        """Keys that lead to a row."""
        return sum(len(mapping) for mapping in self._maps)

    @property
    def objects_per_row(self) -> int:
        """Objects that a complete chunk has, over all groups and shards."""
        return self._shards

    @property
    def object_columns(self) -> tuple[Rows, Rows]:
        """Group and shard of each object of a row, in the order of :meth:`addresses_of_rows`."""
        places = [(g, shard) for g, group in enumerate(self.groups) for shard in range(group.shards)]
        columns = np.array(places, dtype=np.int64)
        return columns[:, 0], columns[:, 1]

    def free_rows(self) -> list[int]:
        """Rows that were given back."""
        return list(self._free_rows)

    def mapped_rows(self, first: int, last: int) -> NDArray[np.bool_]:
        """Whether a key leads to each row of ``first .. last - 1``."""
        mapped: NDArray[np.bool_] = self._mapped.array[first:last] != 0
        return mapped

    def addresses_of_rows(self, first: int, last: int) -> NDArray[np.int64]:
        """Addresses of rows ``first .. last - 1``, -1 where nothing lies; (rows, objects of a row)."""
        stored = self._address.array[first * self._shards : last * self._shards]
        return stored.reshape(-1, self._shards).astype(np.int64) - 1

    def doomed_addresses(self) -> list[int]:
        """Addresses of all objects that left the cache while a lease reads them."""
        used = self.doomed.array[: self._rows_made * self.group_count]
        found = []
        for entry in np.flatnonzero(used).tolist():
            row, group = divmod(entry, self.group_count)
            found += [self.address(row, group, shard) for shard in _bits(int(used[entry]))]
        return found

    # --- entries and objects ----------------------------------------------------------------------------------

    def entry(self, row: int, group: int) -> int:
        """The number of a (chunk, group) in the entry columns."""
        return row * self.group_count + group

    def address(self, row: int, group: int, shard: int) -> int:
        """Where an object lies, -1 if nowhere."""
        return self._address.view[row * self._shards + self._shard_base[group] + shard] - 1

    def is_full(self, row: int, group: int) -> bool:
        """Whether every shard of the entry is committed."""
        return self.present.view[row * self.group_count + group] == int(self.full_masks[group])

    def set_pending(self, row: int, group: int, shard: int, extents: int) -> None:
        """A reservation was granted."""
        self.pending.view[self.entry(row, group)] |= 1 << shard
        self.totals[group].reserved_extents += extents

    def end_pending(self, row: int, group: int, shard: int, extents: int) -> None:
        """A reservation ended, one way or the other."""
        entry = self.entry(row, group)
        assert self.pending.view[entry] >> shard & 1, (
            "a reservation ended twice: its memory would be freed twice"
        )
        self.pending.view[entry] &= ~(1 << shard)
        self.totals[group].reserved_extents -= extents

    def set_present(
        self, row: int, group: int, shard: int, address: int, extents: int, now_seconds: int
    ) -> None:
        """An object was committed."""
        entry = self.entry(row, group)
        assert not self.present.view[entry] >> shard & 1, (
            "an object was stored twice: its first copy would leak"
        )
        self.present.view[entry] |= 1 << shard
        self.extents.view[entry] += extents
        self.removal.view[entry] = Removal.NONE
        self.stored_at.view[entry] = now_seconds
        self.used_at.view[entry] = now_seconds
        self._address.view[row * self._shards + self._shard_base[group] + shard] = address + 1
        totals = self.totals[group]
        totals.objects += 1
        totals.extents += extents
        if self.holds.view[entry]:
            totals.leased_extents += extents

    def take_present(self, row: int, group: int, cause: Removal) -> list[int]:
        """Take all committed objects of an entry out of the cache; returns their addresses.

        Where a lease holds the entry they become *doomed*: their addresses stay until the last hold ends.
        """
        entry = self.entry(row, group)
        mask = self.present.view[entry]
        addresses = [self.address(row, group, shard) for shard in _bits(mask)]
        totals = self.totals[group]
        totals.objects -= len(addresses)
        totals.extents -= self.extents.view[entry]
        if self.holds.view[entry]:
            totals.leased_extents -= self.extents.view[entry]
            self.doomed.view[entry] |= mask
        else:
            self._forget_addresses(row, group, mask)
        self.present.view[entry] = 0
        self.extents.view[entry] = 0
        self.removal.view[entry] = cause
        return addresses

    def take_doomed(self, row: int, group: int) -> list[int]:
        """The addresses of objects whose last hold has ended."""
        entry = self.entry(row, group)
        mask = self.doomed.view[entry]
        addresses = [self.address(row, group, shard) for shard in _bits(mask)]
        self._forget_addresses(row, group, mask)
        self.doomed.view[entry] = 0
        return addresses

    def _forget_addresses(self, row: int, group: int, mask: int) -> None:
        base = row * self._shards + self._shard_base[group]
        for shard in _bits(mask):
            self._address.view[base + shard] = 0

    # --- holds --------------------------------------------------------------------------------------------------

    def hold(self, entries: Rows) -> None:
        """One more lease on each of these distinct entries."""
        fresh = entries[self.holds.array[entries] == 0]
        self._add_leased(fresh, 1)
        self.holds.array[entries] += 1

    def unhold(self, entries: Rows) -> Rows:
        """One lease less on each of these distinct entries; returns those that nobody holds now."""
        self.holds.array[entries] -= 1
        assert (self.holds.array[entries] >= 0).all(), (
            "a hold ended twice: bytes under another lease could be reused"
        )
        freed: Rows = entries[self.holds.array[entries] == 0]
        self._add_leased(freed, -1)
        return freed

    def pinned_extents(self) -> int:
        """Extents of entries that an admin pinned."""
        return int(self.extents.array[self.pins.array != 0].sum()) if self.any_pins else 0

    def _add_leased(self, entries: Rows, sign: int) -> None:
        per_group = np.bincount(
            entries % self.group_count, weights=self.extents.array[entries], minlength=self.group_count
        )
        for group, extents in enumerate(per_group):
            self.totals[group].leased_extents += sign * int(extents)


def _bits(mask: int) -> Iterator[int]:
    """The positions of the bits of a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
