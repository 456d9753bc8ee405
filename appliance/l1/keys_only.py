"""A cache of keys without bytes: the daemon's index and an eviction policy, told of prompts one after the other.

It answers what a policy would have hit with so much memory: for the live traffic (shadows) and for a recorded trace
(``pagewarden bench trace``). Lookup, index and policy are the ones that serve; only the arena is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from appliance.geometry import ObjectGroup
from appliance.l1.eviction import EvictionPolicy, Prompt
from appliance.l1.index import Rows
from appliance.l1.keys_only_index import KeysOnlyIndex
from appliance.lookup import Presence, fold, presence_of

Entries = NDArray[np.int64]


class KeysOnlyCache:
    """One namespace. ``entry_extents`` are the extents of one entry of each group, all shards together.

    The index has room for ``most_rows`` chunks, or for as many as fit into the first capacity where that is 0.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        groups: Sequence[ObjectGroup],
        chunk_tokens: int,
        *,
        capacity_extents: int,
        entry_extents: Sequence[int],
        most_rows: int = 0,
    ) -> None:
        self.policy = policy
        self.used_extents = 0
        self.evicted_entries = 0
        self.stored_entries = 0
        self._sizes = np.maximum(1, np.array(entry_extents, dtype=np.int64))
        self._kinds = [group.kind for group in groups]
        self._most_rows = most_rows or capacity_extents // int(self._sizes.min()) + 1
        self.resize(capacity_extents)
        singles = [_one_shard(group) for group in groups]
        self.index = KeysOnlyIndex(0, bytes(32), "", singles, chunk_tokens, self._most_rows + 1)
        # States before their chunk's attention: the order in which entries of one chunk go.
        self._order = np.array([*self.index.others, *self.index.attention], dtype=np.int64)
        self._is_attention = np.isin(np.arange(len(groups)), self.index.attention)
        policy.add_namespace(self.index)

    def resize(self, capacity_extents: int) -> None:
        """Another capacity, no more than the rows of the index can hold; what is too much goes with the next prompt."""
        self._capacity = min(capacity_extents, self._most_rows * int(self._sizes.min()))

    def serve(self, keys: Sequence[bytes], now_seconds: float) -> int:
        """A prompt of these whole chunks is looked up, computed and stored; returns the chunks it hit."""
        index = self.index
        rows = index.rows_of(keys)
        presence = presence_of(index, rows)
        reach = fold(presence, self._kinds, index.windows)
        wanted = self.policy.asked(index, Prompt(keys, rows, reach.hit, reach.attention))
        self._store(keys, rows, presence, reach.hit, {*wanted, len(keys)}, int(now_seconds))
        return reach.hit

    def _store(
        self,
        keys: Sequence[bytes],
        rows: Rows,
        presence: Presence,
        hit: int,
        boundaries: Iterable[int],
        now_seconds: int,
    ) -> None:
        """Store what was computed: attention of every chunk behind the hit, states at the chosen boundaries."""
        index = self.index
        wanted = np.zeros_like(presence)
        wanted[hit:] = self._is_attention
        chosen = [boundary - 1 for boundary in boundaries if hit < boundary <= len(keys)]
        wanted[chosen] = True
        missing = wanted & ~presence
        needed = int(missing.sum(axis=0) @ self._sizes)
        own = _entries(rows[rows >= 0], np.arange(index.group_count))
        index.holds.array[own] += 1
        if self._make_room(needed):
            index.holds.array[own] -= 1
            rows = index.ensure_rows(keys, rows)
            fresh = _entries(rows, self._order)[missing[:, self._order].ravel()]
            index.store(fresh, self._sizes[fresh % index.group_count], now_seconds)
            self.used_extents += needed
            self.stored_entries += len(fresh)
            self.policy.stored(index, fresh)
            recent = wanted | self._is_attention
            recent[max(0, hit - 1)] = True
            self._touch(rows, recent)
        else:
            index.holds.array[own] -= 1

    def _touch(self, rows: Rows, recent: Presence) -> None:
        """These entries of a prompt are recent now: deep ones go before shallow ones."""
        entries = _entries(rows[::-1], self._order)[recent[::-1, self._order].ravel()]
        self.policy.touched(self.index, entries[self.index.present.array[entries] != 0])

    def _make_room(self, extents: int) -> bool:
        excess = self.used_extents + extents - self._capacity
        if excess <= 0:
            return True
        index = self.index
        for _, entries in self.policy.candidates(excess):
            free = entries[(index.present.array[entries] != 0) & (index.holds.array[entries] == 0)]
            freed = np.cumsum(index.extents.array[free].astype(np.int64))
            count = int(np.searchsorted(freed, excess)) + 1
            if count <= len(free):
                self._evict(free[:count])
                self.used_extents -= int(freed[count - 1])
                return True
            if len(free):
                self._evict(free)
                self.used_extents -= int(freed[-1])
                excess -= int(freed[-1])
        return False

    def _evict(self, entries: Entries) -> None:
        index = self.index
        rows, groups = np.divmod(entries, index.group_count)
        index.take_out(entries)
        for row in index.rows_with_more(rows[self._is_attention[groups]].tolist()):
            # Nothing at or behind its boundary can be hit without this chunk's attention.
            self.policy.demoted(index, index.entries_behind(row))
        self.policy.removed(index, entries)
        index.recycle(list(dict.fromkeys(rows.tolist())))
        self.evicted_entries += len(entries)


def _entries(rows: Rows, groups: NDArray[np.int64]) -> Entries:
    """The entries of these groups of each row, row by row; the index has as many groups as ``groups``."""
    entries: Entries = (rows[:, None] * len(groups) + groups).ravel()
    return entries


def _one_shard(group: ObjectGroup) -> ObjectGroup:
    return replace(group, shards=1, replicas=1, absent_shards=())
