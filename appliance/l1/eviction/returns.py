"""Keep what prompts are expected to come back to, per byte.

Every prompt leaves boundaries behind: its end, where it parted from earlier ones, and a few before its end where later ones
may part. How soon prompts come back to each is learned (:mod:`appliance.l1.eviction.rates`), also for boundaries whose bytes
are gone. A state serves all boundaries between itself and the next state behind it. So what goes first is the unit with the
least

    sum of expected returns per second to the boundaries it serves * tokens a hit would be shorter / extents freed

and a snapshot is worth making where that is no less than what was last evicted. Sizes, model and traffic come in only
through these figures: there is nothing to tune. Rivals: LHD (Beckmann et al., NSDI 2018) ranks single objects so; Marconi
(Pan et al., MLSys 2025) trades recency against saved work per byte.

Ranking draws a sample, so an eviction costs the same however much is cached.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from appliance.geometry import GroupKind
from appliance.l1.columns import Column
from appliance.l1.eviction import kinds
from appliance.l1.eviction.boundaries import BoundaryMemory
from appliance.l1.eviction.chains import Chains, Evictable, Unit
from appliance.l1.eviction.policy import Prompt
from appliance.l1.eviction.rates import ReturnRates
from appliance.l1.index import NamespaceIndex

Entries = NDArray[np.int64]

_LOOKS = 4096
_SAMPLE = 256
_TAKEN = 16
"""The lowest sixteenth of a sample goes before the next one is drawn."""
_REMEMBERED = 131_072
_MOST_OWNED = 32
"""A row that serves so many boundaries is worth keeping whatever the others add."""
_LEARN_EVERY = 64
_HALVE_EVERY = 16_384
_FRESH_SECONDS = 120
"""A leaf that no boundary stands on is a prompt still being stored, for so long."""
_LEAST_GAIN_CHUNKS = 1 / 32
"""A snapshot splits a step of the engine, which costs about as much as computing a few tokens."""
_PRICE_WEIGHT = 0.02


class Space:
    """What the policy knows of one namespace."""

    def __init__(self, index: NamespaceIndex, evictable: Evictable) -> None:
        self.index = index
        self.chains = Chains(index, evictable)
        self.rates = ReturnRates(kinds.KINDS)
        self.memory = BoundaryMemory(self.rates, _REMEMBERED)
        self.owned: dict[int, list[int]] = {}
        self.boundary = Column(len(index.chunk_index.array), np.uint32)
        self.version = Column(len(index.chunk_index.array), np.uint32)
        self.asked = 0
        self.learned_at = 0
        self.has_states = any(group.kind is GroupKind.RECURRENT for group in index.groups)
        self.window = max((window for window in index.windows), default=1)

    # --- who serves which boundary --------------------------------------------------------------------------------

    def begin(self, key: bytes, kind: int, row: int, server: int, now: float) -> int:
        """A life begins at a chunk's end; ``row`` and ``server`` are -1 where there is none."""
        memory = self.memory
        boundary, forgotten = memory.begin(key, kind, now)
        if forgotten >= 0:
            self._disown(forgotten)
        if row >= 0:
            self._settle(boundary, row)
        if server >= 0 and not memory.owner.view[boundary]:
            self._own(server, boundary)
        return boundary

    def arrived(self, row: int, is_state: bool, now: float) -> None:  # noqa: FBT001
        """Something of the row is in the cache: its boundary, if one is remembered, has a place now."""
        key = self.index.key_of(row)
        boundary = self.memory.find(key)
        if boundary >= 0:
            self._settle(boundary, row)
        elif is_state:
            boundary = self.begin(key, kinds.offered(), row, -1, now)
            self.memory.is_end.view[boundary] = 1

    def got_server(self, row: int) -> None:
        """The row serves from now on: itself, and what was served by the one above and lies behind this."""
        owner, at = self.memory.owner.view, self.memory.row.view
        theirs = self.owned.get(self.chains.serving_above(row), [])
        mine = [b for b in theirs if at[b] and self.chains.descends(at[b] - 1, row)]
        for each in mine:
            theirs.remove(each)
            owner[each] = 0
            self._own(row, each)
        boundary = self.boundary.view[row] - 1
        if boundary >= 0 and not owner[boundary]:
            self._own(row, boundary)

    def lost_server(self, row: int) -> None:
        """The row serves no more: prompts that come back to its boundaries fall back to the one above."""
        above = self.chains.serving_above(row)
        owner = self.memory.owner.view
        for each in self.owned.pop(row, []):
            owner[each] = 0
            if above >= 0:
                self._own(above, each)

    def left(self, row: int) -> None:
        """Nothing of the row is in the cache."""
        boundary = self.boundary.view[row] - 1
        if boundary >= 0:
            self.memory.row.view[boundary] = 0
            self.boundary.view[row] = 0

    def _settle(self, boundary: int, row: int) -> None:
        before = self.memory.row.view[boundary] - 1
        if before >= 0 and before != row:
            self.boundary.view[before] = 0
        self.memory.row.view[boundary] = row + 1
        self.boundary.view[row] = boundary + 1

    def _own(self, row: int, boundary: int) -> None:
        served = self.owned.setdefault(row, [])
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
            self.owned[owner].remove(boundary)
            self.memory.owner.view[boundary] = 0
        row = self.memory.row.view[boundary] - 1
        if row >= 0:
            self.boundary.view[row] = 0
            self.memory.row.view[boundary] = 0

    def served_by(self, row: int) -> list[int]:
        """The boundaries that the row serves; for a sliding window, also those just behind that need the row."""
        served = self.owned.get(row)
        if served or self.window <= 1:
            return served or []
        level = [row]
        for _ in range(self.window - 1):
            level = [child for each in level[:_MOST_OWNED] for child in self.index.children(each)]
            for child in level:
                if child in self.owned:
                    return self.owned[child]
        return []

    def state_extents(self) -> float:
        """Extents of one complete state or window of this namespace, 0 while none was stored."""
        extents = 0.0
        for group in self.index.others:
            totals = self.index.totals[group]
            if totals.objects:
                shards = int(self.index.full_masks[group]).bit_count()
                extents += totals.extents / totals.objects * shards
        return extents


class _Ranked(NamedTuple):
    value: float
    space: Space
    unit: Unit
    version: int


class ExpectedReturns:
    """Evicts the unit with the least expected return per byte, over all namespaces.

    ``clock`` gives seconds; the same traffic on the same clock evicts the same.
    """

    name: ClassVar[str] = "RETURNS"

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spaces: list[Space] = []
        self._evictable = Evictable()
        self._random = random.Random(1)  # noqa: S311  # samples for ranking; no secret
        self._ranked: deque[_Ranked] = deque()
        self._next: deque[tuple[int, int, int]] = deque()
        self._price = 0.0

    def add_namespace(self, index: NamespaceIndex) -> None:
        """See :class:`EvictionPolicy`."""
        space = Space(index, self._evictable)
        self._spaces.append(space)
        rows = sorted(index.rows(), key=index.chunk_index.view.__getitem__)
        begin = np.array(rows, dtype=np.int64)[:, None] * index.group_count
        entries = (begin + np.arange(index.group_count)).ravel()
        self.stored(index, entries[index.present.array[entries] != 0])

    # --- prompts -------------------------------------------------------------------------------------------------

    def asked(self, index: NamespaceIndex, prompt: Prompt) -> Sequence[int]:
        """See :class:`EvictionPolicy`."""
        space, now = self._spaces[index.slot], self._clock()
        chunks = len(prompt.keys)
        if not chunks:
            return ()
        self._learn_if_due(space, now)
        seen = space.memory.find_all(prompt.keys)
        known = prompt.attention
        for at in range(chunks - 1, known - 1, -1):
            if seen[at] >= 0:
                known = at + 1
                break
        is_end = space.memory.is_end.view
        turns = sum(is_end[each] for each in seen[:known] if each >= 0)
        self._came_back(space, prompt, seen, known, now)
        return self._leaves_behind(space, prompt, known, turns, now)

    def _came_back(self, space: Space, prompt: Prompt, seen: list[int], known: int, now: float) -> None:
        """The prompt matched ``known`` chunks of earlier ones: the deepest boundary up to there is returned to."""
        memory = space.memory
        at = known - 1
        while at >= 0 and seen[at] < 0:
            at -= 1
        if at >= 0:
            memory.came_back(seen[at], now)
            if at < known - 1:
                self._begin(space, prompt, at, memory.kind.view[seen[at]], now)
        if 0 < known < len(prompt.keys):
            found = seen[known - 1]
            returns = memory.returns.view[found] if found >= 0 else 1
            ended = found >= 0 and memory.is_end.view[found]
            kind = kinds.passed_end(returns) if ended else kinds.fork(returns)
            boundary = self._begin(space, prompt, known - 1, kind, now)
            memory.returns.view[boundary] = returns

    def _leaves_behind(
        self, space: Space, prompt: Prompt, known: int, turns: int, now: float
    ) -> Sequence[int]:
        """Boundaries that later prompts may come back to; those worth a snapshot are returned."""
        memory, chunks = space.memory, len(prompt.keys)
        wanted = [known] if prompt.hit < known < chunks else []
        if space.has_states:
            for step in range(kinds.TAILS):
                boundary = chunks - (1 << step)
                if boundary <= known:
                    break
                self._begin(space, prompt, boundary - 1, kinds.tail(step), now)
                if self._worth_a_snapshot(space, step, boundary - max(known, prompt.hit)):
                    wanted.append(boundary)
        end = memory.find(prompt.keys[-1])
        returns = memory.returns.view[end] if end >= 0 else 0
        kind = kinds.end_of_prompt(turns, kinds.novelty_of(chunks - known), returns)
        boundary = self._begin(space, prompt, chunks - 1, kind, now)
        memory.is_end.view[boundary] = 1
        return wanted

    def _begin(self, space: Space, prompt: Prompt, at: int, kind: int, now: float) -> int:
        """A life at the end of the prompt's chunk ``at``."""
        row = int(prompt.rows[at]) if at < len(prompt.rows) else -1
        if row >= 0 and not space.chains.has_attention.view[row] and not space.chains.serves.view[row]:
            row = -1
        if row >= 0:
            space.version.view[row] += 1
        if at + 1 >= prompt.hit:
            server = int(prompt.rows[prompt.hit - 1]) if prompt.hit else -1
        else:
            server = space.chains.serving_at(row) if row >= 0 else -1
        return space.begin(prompt.keys[at], kind, row, server, now)

    def _worth_a_snapshot(self, space: Space, step: int, gain_chunks: int) -> bool:
        kind = kinds.tail(step)
        if space.rates.chance[kind] * gain_chunks < _LEAST_GAIN_CHUNKS:
            return False
        extents = space.state_extents()
        if not extents:
            return True
        gain_tokens = gain_chunks * space.index.chunk_tokens
        return bool(space.rates.worth[kind, 0] * gain_tokens / extents >= self._price)

    def _learn_if_due(self, space: Space, now: float) -> None:
        space.asked += 1
        if space.asked - space.learned_at >= max(_LEARN_EVERY, len(space.memory) // 128):
            space.learned_at = space.asked
            space.memory.learn(now)
        if space.asked % _HALVE_EVERY == 0:
            space.rates.forget_half()

    # --- what enters and leaves ------------------------------------------------------------------------------------

    def touched(self, index: NamespaceIndex, entries: Entries) -> None:
        """See :class:`EvictionPolicy`. Reading says nothing that :meth:`asked` has not said."""

    def stored(self, index: NamespaceIndex, entries: Entries) -> None:
        """See :class:`EvictionPolicy`."""
        space = self._spaces[index.slot]
        servers: list[int] = []
        for entry in entries.tolist():
            row, group = divmod(entry, index.group_count)
            space.version.view[row] += 1
            if space.chains.stored(row, group):
                servers.append(row)
            if not space.boundary.view[row]:
                space.arrived(row, index.groups[group].kind is GroupKind.RECURRENT, self._clock())
        for row in servers:
            space.got_server(row)

    def demoted(self, index: NamespaceIndex, entries: Entries) -> None:
        """See :class:`EvictionPolicy`."""
        version = self._spaces[index.slot].version.view
        self._next.extendleft(
            (index.slot, entry, version[entry // index.group_count]) for entry in entries[::-1].tolist()
        )

    def removed(self, index: NamespaceIndex, entry: int) -> None:
        """See :class:`EvictionPolicy`."""
        space = self._spaces[index.slot]
        row, group = divmod(entry, index.group_count)
        if space.chains.removed(row, group):
            space.lost_server(row)
        if not space.chains.has_attention.view[row] and not space.chains.serves.view[row]:
            space.left(row)

    def covers(self, index: NamespaceIndex, entries: Entries) -> NDArray[np.bool_]:
        """See :class:`EvictionPolicy`. What others continue comes up when they have gone."""
        chains = self._spaces[index.slot].chains
        rows = entries // index.group_count
        covered: NDArray[np.bool_] = (chains.places.array[rows] != 0) | (chains.continued.array[rows] != 0)
        return covered

    # --- ranking ---------------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[tuple[int, int]]:
        """See :class:`EvictionPolicy`."""
        empty_handed = 0
        for _ in range(_LOOKS):
            while self._next:
                slot, entry, version = self._next.popleft()
                space = self._spaces[slot]
                if space.version.view[entry // space.index.group_count] == version:
                    if space.index.present.view[entry]:
                        yield slot, entry
            if not self._ranked:
                self._rank()
                empty_handed += not self._ranked
                if empty_handed > 1:
                    return
                continue
            ranked = self._ranked.popleft()
            if ranked.space.version.view[ranked.unit.rows[0]] == ranked.version:
                self._offer(ranked)

    def _offer(self, ranked: _Ranked) -> None:
        """The entries of a unit are next, if it is still what it was when it was ranked."""
        space, row = ranked.space, ranked.unit.rows[0]
        index = space.index
        place = space.chains.places.view[row]
        now_unit = space.chains.unit(row) if place else None
        if now_unit is None or now_unit.rows != ranked.unit.rows:
            return
        if ranked.value < math.inf:
            self._price += (ranked.value - self._price) * _PRICE_WEIGHT
        version = space.version.view
        groups = range(index.group_count) if space.chains.is_leaf(row) else index.others
        order = [*index.others, *index.attention] if len(groups) > len(index.others) else index.others
        self._next.extend((index.slot, row * index.group_count + group, version[row]) for group in order)
        for above in now_unit.rows[1:]:
            begin = above * index.group_count
            self._next.extend((index.slot, begin + group, version[above]) for group in index.attention)

    def _rank(self) -> None:
        """Draw a sample of evictable rows and keep the least valuable ones, in order."""
        rows = self._evictable.rows
        drawn = rows if len(rows) <= _SAMPLE else self._random.sample(rows, _SAMPLE)
        now = self._clock()
        found: list[tuple[Space, Unit]] = []
        for slot, row in drawn:
            unit = self._spaces[slot].chains.unit(row)
            if unit is not None:
                found.append((self._spaces[slot], unit))
        values = np.zeros(len(found))
        for space in self._spaces:
            mine = [at for at, (owner, _) in enumerate(found) if owner is space]
            if mine:
                values[mine] = self._values(space, [found[at][1] for at in mine], now)
        order = np.argsort(values, kind="stable")[: max(1, len(found) // _TAKEN)]
        for at in order.tolist():
            space, unit = found[at]
            self._ranked.append(_Ranked(float(values[at]), space, unit, space.version.view[unit.rows[0]]))

    def _values(self, space: Space, units: Sequence[Unit], now: float) -> NDArray[np.float64]:
        """Expected tokens saved per second and extent, of each unit."""
        served = [space.served_by(unit.rows[0]) for unit in units]
        counts = np.array([len(each) for each in served])
        flat = np.array([b for each in served for b in each], dtype=np.int64)
        worth = space.memory.worth_of(flat, now)
        sums = np.bincount(np.repeat(np.arange(len(units)), counts), weights=worth, minlength=len(units))
        gains = np.array([unit.gain_chunks for unit in units]) * space.index.chunk_tokens
        extents = np.array([max(1, unit.extents) for unit in units])
        values: NDArray[np.float64] = sums * gains / extents
        index = space.index
        for at in np.flatnonzero(counts == 0).tolist():
            row = units[at].rows[0]
            begin = row * index.group_count
            stored = max(index.stored_at.view[begin + group] for group in range(index.group_count))
            if space.chains.is_leaf(row) and stored + _FRESH_SECONDS > now:
                values[at] = math.inf
        return values
