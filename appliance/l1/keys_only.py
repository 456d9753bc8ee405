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
from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Removal
from appliance.lookup import entries_of, fold, presence_of


class KeysOnlyCache:
    """One namespace. ``entry_extents`` are the extents of one entry of each group, all shards together."""

    def __init__(
        self,
        policy: EvictionPolicy,
        groups: Sequence[ObjectGroup],
        chunk_tokens: int,
        *,
        capacity_extents: int,
        entry_extents: Sequence[int],
    ) -> None:
        self.policy = policy
        self.used_extents = 0
        self.evicted_entries = 0
        self.stored_entries = 0
        self._capacity = capacity_extents
        self._sizes = [max(1, size) for size in entry_extents]
        self._kinds = [group.kind for group in groups]
        rows = capacity_extents // min(self._sizes) + 1
        singles = [_one_shard(group) for group in groups]
        self.index = NamespaceIndex(0, bytes(32), "", singles, chunk_tokens, rows)
        self._attention = self.index.attention
        policy.add_namespace(self.index)

    def serve(self, keys: Sequence[bytes], now_seconds: float) -> int:
        """A prompt of these whole chunks is looked up, computed and stored; returns the chunks it hit."""
        index = self.index
        rows = index.rows_of(keys)
        reach = fold(presence_of(index, rows), self._kinds, index.windows)
        held = entries_of(index, rows, reach.hit)
        index.hold(held)
        wanted = self.policy.asked(index, Prompt(keys, rows, reach.hit, reach.attention))
        self._store(keys, rows, reach.hit, {*wanted, len(keys)}, int(now_seconds))
        index.unhold(held)
        return reach.hit

    def _store(
        self, keys: Sequence[bytes], rows: NDArray[np.int64], hit: int, boundaries: Iterable[int], now: int
    ) -> None:
        """Store what was computed: attention of every chunk behind the hit, states at the chosen boundaries."""
        index, sizes = self.index, self._sizes
        states = sorted(b - 1 for b in boundaries if hit < b <= len(keys)) if index.others else []
        needed = self._missing_extents(rows, hit, states)
        if not self._make_room(needed):
            return
        found = rows.tolist()
        parent = keys[hit - 1] if hit else b""
        fresh: list[int] = []
        wanted = set(states)
        for chunk in range(hit, len(keys)):
            row = found[chunk]
            if row < 0:
                row = found[chunk] = index.ensure_row(keys[chunk], parent, chunk)
            parent = keys[chunk]
            for group in (*self._attention, *index.others) if chunk in wanted else self._attention:
                if not index.present.view[row * index.group_count + group]:
                    index.set_present(row, group, 0, 0, sizes[group], now)
                    fresh.append(row * index.group_count + group)
        self.used_extents += needed
        self.stored_entries += len(fresh)
        self.policy.stored(index, np.array(fresh, dtype=np.int64))
        self.policy.touched(index, self._recency(np.array(found, dtype=np.int64), hit, states))

    def _missing_extents(self, rows: NDArray[np.int64], hit: int, states: Sequence[int]) -> int:
        index = self.index
        present = presence_of(index, rows)
        missing = sum(
            self._sizes[group] * int(np.count_nonzero(~present[hit:, group])) for group in self._attention
        )
        return missing + sum(
            self._sizes[group] * int(np.count_nonzero(~present[states, group])) for group in index.others
        )

    def _recency(self, rows: NDArray[np.int64], hit: int, states: Sequence[int]) -> NDArray[np.int64]:
        """Entries that are recent now, the first to go first: deep before shallow, a state before its chunk."""
        chunks = np.arange(len(rows))[:, None]
        attention = rows[:, None] * self.index.group_count + np.array(self._attention, dtype=np.int64)
        boundaries = np.array([*([hit - 1] if hit else []), *states], dtype=np.int64)
        others = rows[boundaries, None] * self.index.group_count + np.array(self.index.others, dtype=np.int64)
        depth = np.concatenate(
            (
                np.broadcast_to(chunks * 2, attention.shape).ravel(),
                np.broadcast_to(boundaries[:, None] * 2 + 1, others.shape).ravel(),
            )
        )
        entries = np.concatenate((attention.ravel(), others.ravel()))
        recent: NDArray[np.int64] = entries[np.argsort(-depth, kind="stable")]
        return recent

    def _make_room(self, extents: int) -> bool:
        excess = self.used_extents + extents - self._capacity
        if excess <= 0:
            return True
        index = self.index
        for _, entry in self.policy.candidates():
            if index.holds.view[entry] or not index.present.view[entry]:
                continue
            row, group = divmod(entry, index.group_count)
            if group in self._attention:
                self.policy.demoted(index, index.entries_behind(row))
            size = index.extents.view[entry]
            index.take_present(row, group, Removal.EVICTED)
            self.policy.removed(index, entry)
            index.recycle_if_empty(row)
            self.used_extents -= size
            self.evicted_entries += 1
            excess -= size
            if excess <= 0:
                return True
        return False


def _one_shard(group: ObjectGroup) -> ObjectGroup:
    return replace(group, shards=1, replicas=1, absent_shards=())
