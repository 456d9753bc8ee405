"""What the other policies would have hit on the live traffic: one cache of keys a policy and namespace.

The prompts are those that lookups bring, each once. Work is bounded: prompts wait in a short queue and are served in
slices of the loop's time; where they come faster than that, half of the prompts are left out from then on, chosen by their
first chunk so that whole conversations stay together, with half of the capacity, and counting begins anew. Memory is
bounded by the rows of an index, about a hundred bytes each.

``hit rate`` is in chunks: those that could have been loaded over all that were asked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.l1.eviction import POLICIES, make_policy
from appliance.l1.index import NamespaceIndex
from appliance.l1.keys_only import KeysOnlyCache

FOLLOWED = tuple(name for name in POLICIES if name != "MARCONI")
"""Marconi's rule replays its first prompts over a grid to find its weight: more than a slice of the loop's time allows."""
_MOST_ROWS = 65_536
_WAITING = 128
_MOST_HALVINGS = 12
_RESIZE_ABOVE = 1.25


@dataclass(slots=True)
class ShadowCount:
    """Of one policy, since counting began."""

    policy: str
    prompts: int = 0
    asked_chunks: int = 0
    hit_chunks: int = 0

    @property
    def hit_rate(self) -> float:
        """Chunks hit over chunks asked for, 0 before the first."""
        return self.hit_chunks / self.asked_chunks if self.asked_chunks else 0.0


@dataclass(slots=True)
class _Shadow:
    cache: KeysOnlyCache
    capacity_extents: int


class ShadowBoard:
    """Shadows of every namespace. ``capacity_extents`` tells how much memory a namespace may count on now."""

    def __init__(
        self,
        clock: Callable[[], float],
        capacity_extents: Callable[[NamespaceIndex], int],
        policies: Sequence[str] = FOLLOWED,
    ) -> None:
        self._clock = clock
        self._capacity_of = capacity_extents
        self._policies = tuple(policies)
        self._waiting: deque[tuple[NamespaceIndex, list[bytes], float, int]] = deque()
        self._shadows: dict[tuple[int, str], _Shadow] = {}
        self.halvings = 0
        self.since = clock()
        self.counts = {name: ShadowCount(name) for name in self._policies}

    @property
    def share(self) -> float:
        """The share of first chunks whose prompts are followed."""
        return 1.0 / (1 << self.halvings)

    def came(self, index: NamespaceIndex, keys: Sequence[bytes]) -> None:
        """A prompt of these whole chunks was looked up; never blocks."""
        if not keys or int.from_bytes(keys[0][-4:], "little") & ((1 << self.halvings) - 1):
            return
        if len(self._waiting) >= _WAITING:
            self._halve()
            return
        self._waiting.append((index, list(keys), self._clock(), 0))

    def work(self, seconds: float) -> None:
        """Serve waiting prompts for about so long, one policy at a time."""
        deadline = time.perf_counter() + seconds
        while self._waiting and time.perf_counter() < deadline:
            index, keys, now, done = self._waiting.popleft()
            served = self._serve(self._policies[done], index, keys, now)
            if served and done + 1 < len(self._policies):
                self._waiting.appendleft((index, keys, now, done + 1))

    def _serve(self, policy: str, index: NamespaceIndex, keys: list[bytes], now: float) -> bool:
        """False where the prompt counts for no policy: counting began anew, or nothing was stored yet to tell sizes by."""
        shadow = self._shadow_of(policy, index)
        if shadow is None:
            return False
        count = self.counts[policy]
        count.hit_chunks += shadow.cache.serve(keys, now)
        count.asked_chunks += len(keys)
        count.prompts += 1
        return True

    def _shadow_of(self, policy: str, index: NamespaceIndex) -> _Shadow | None:
        sizes = _entry_extents(index)
        if not sizes:
            return None
        capacity = max(1, int(self._capacity_of(index) * self.share))
        if capacity // min(sizes) > _MOST_ROWS and self.halvings < _MOST_HALVINGS:
            self._halve()
            return None
        known = self._shadows.get((index.slot, policy))
        if known is not None:
            if not capacity / _RESIZE_ABOVE <= known.capacity_extents <= capacity * _RESIZE_ABOVE:
                known.capacity_extents = capacity
                known.cache.resize(capacity)
            return known
        cache = KeysOnlyCache(
            make_policy(policy, self._clock),
            index.groups,
            index.chunk_tokens,
            capacity_extents=capacity,
            entry_extents=sizes,
            most_rows=_MOST_ROWS,
        )
        made = self._shadows[index.slot, policy] = _Shadow(cache, capacity)
        return made

    def _halve(self) -> None:
        """Too much traffic or too many chunks: follow half of it, from an empty start."""
        if self.halvings < _MOST_HALVINGS:
            self.halvings += 1
            self.restart()

    def restart(self) -> None:
        """Forget what was counted and cached."""
        self._waiting.clear()
        self._shadows.clear()
        self.since = self._clock()
        self.counts = {name: ShadowCount(name) for name in self._policies}


def _entry_extents(index: NamespaceIndex) -> list[int]:
    """Extents of one complete entry of each group; empty while one of them was never stored."""
    sizes = []
    for totals, mask in zip(index.totals, index.full_masks.tolist(), strict=True):
        if not totals.objects:
            return []
        sizes.append(round(totals.extents / totals.objects * int(mask).bit_count()))
    return sizes
