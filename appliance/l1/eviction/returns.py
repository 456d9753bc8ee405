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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from appliance.l1.eviction import kinds
from appliance.l1.eviction.evictable import Evictable
from appliance.l1.eviction.namespace_returns import NamespaceReturns
from appliance.l1.eviction.policy import Prompt
from appliance.l1.index import NamespaceIndex

Entries = NDArray[np.int64]
Rows = NDArray[np.int64]

_LOOKS = 4096
_SAMPLE = 256
_TAKEN = 16
"""The lowest sixteenth of a sample goes before the next one is drawn."""
_LEARN_EVERY = 64
_HALVE_EVERY = 16_384
_FRESH_SECONDS = 120
"""A leaf that no boundary stands on is a prompt still being stored, for so long."""
_LEAST_GAIN_CHUNKS = 1 / 32
"""A snapshot splits a step of the engine, which costs about as much as computing a few tokens."""
_PRICE_WEIGHT = 0.02


class _Ranked(NamedTuple):
    value: float
    space: NamespaceReturns
    row: int
    version: int


class _Batch(NamedTuple):
    space: NamespaceReturns
    entries: Entries
    versions: NDArray[np.uint32]


class ExpectedReturns:
    """Evicts the unit with the least expected return per byte, over all namespaces.

    ``clock`` gives seconds; the same traffic on the same clock evicts the same.
    """

    name: ClassVar[str] = "RETURNS"

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spaces: list[NamespaceReturns] = []
        self._evictable = Evictable()
        self._ranked: deque[_Ranked] = deque()
        self._first: deque[_Batch] = deque()
        self._price = 0.0

    def add_namespace(self, index: NamespaceIndex) -> None:
        """See :class:`EvictionPolicy`."""
        space = NamespaceReturns(index, self._evictable)
        self._spaces.append(space)
        rows = sorted(index.rows(), key=index.chunk_index.view.__getitem__)
        begin = np.array(rows, dtype=np.int64)[:, None] * index.group_count
        entries = (begin + np.arange(index.group_count)).ravel()
        present = entries[index.present.array[entries] != 0]
        space.take_over(present, self._clock())

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

    def _came_back(
        self, space: NamespaceReturns, prompt: Prompt, seen: list[int], known: int, now: float
    ) -> None:
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
        self, space: NamespaceReturns, prompt: Prompt, known: int, turns: int, now: float
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

    def _begin(self, space: NamespaceReturns, prompt: Prompt, at: int, kind: int, now: float) -> int:
        """A life at the end of the prompt's chunk ``at``."""
        row = int(prompt.rows[at]) if at < len(prompt.rows) else -1
        if row >= 0 and not space.is_here(row):
            row = -1
        if at + 1 >= prompt.hit:
            server = space.chains.serving_at(int(prompt.rows[prompt.hit - 1])) if prompt.hit else -1
        else:
            server = space.chains.serving_at(row) if row >= 0 else -1
        return space.begin(prompt.keys[at], kind, row, server, now)

    def _worth_a_snapshot(self, space: NamespaceReturns, step: int, gain_chunks: int) -> bool:
        kind = kinds.tail(step)
        if space.rates.chance[kind] * gain_chunks < _LEAST_GAIN_CHUNKS:
            return False
        extents = space.state_extents()
        if not extents:
            return True
        gain_tokens = gain_chunks * space.index.chunk_tokens
        return bool(space.rates.worth[kind, 0] * gain_tokens / extents >= self._price)

    def _learn_if_due(self, space: NamespaceReturns, now: float) -> None:
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
        self._spaces[index.slot].stored(entries, self._clock())

    def demoted(self, index: NamespaceIndex, entries: Entries) -> None:
        """See :class:`EvictionPolicy`."""
        if len(entries):
            self._go_first(self._spaces[index.slot], entries)

    def _go_first(self, space: NamespaceReturns, entries: Entries) -> None:
        versions = space.version.array[entries // space.index.group_count]
        self._first.appendleft(_Batch(space, entries, versions))

    def removed(self, index: NamespaceIndex, entries: Entries) -> None:
        """See :class:`EvictionPolicy`."""
        self._spaces[index.slot].removed(entries)

    def covers(self, index: NamespaceIndex, entries: Entries) -> NDArray[np.bool_]:
        """See :class:`EvictionPolicy`. What others continue comes up when they have gone."""
        chains = self._spaces[index.slot].chains
        rows = entries // index.group_count
        covered: NDArray[np.bool_] = (chains.places.array[rows] != 0) | (chains.continued.array[rows] != 0)
        return covered

    # --- ranking ---------------------------------------------------------------------------------------------------

    def candidates(self, extents: int) -> Iterator[tuple[int, Entries]]:
        """See :class:`EvictionPolicy`. A batch is what is left of the last one, or one or more whole units."""
        for _ in range(_LOOKS):
            batch = self._next_first() or self._next_units(extents)
            if batch is not None:
                space, entries = batch
                try:
                    yield space.index.slot, entries
                finally:
                    self._keep_rest(space, entries)
            elif not self._ranked and not self._rank():
                break
        else:
            return
        yield from self._below_what_is_held()

    def _below_what_is_held(self) -> Iterator[tuple[int, Entries]]:
        """Only leaves that cannot go are left: what they stand on goes, rather than nothing."""
        for slot, rows in self._evictable.draw(_LOOKS):
            space = self._spaces[slot]
            for row in rows.tolist():
                entries = space.entries_below(row)
                if len(entries):
                    yield slot, entries

    def _keep_rest(self, space: NamespaceReturns, entries: Entries) -> None:
        """What lies behind the last entry that the consumer took comes next time: nothing serves it any more.

        Where attention alone serves, what is left of a unit serves in its stead.
        """
        if space.chains.attention_only:
            return
        taken = np.flatnonzero(space.index.present.array[entries] == 0)
        if len(taken) and taken[-1] + 1 < len(entries):
            self._go_first(space, entries[taken[-1] + 1 :])

    def _next_first(self) -> tuple[NamespaceReturns, Entries] | None:
        while self._first:
            space, entries, versions = self._first.popleft()
            # Stored anew since: its number may even stand for another chunk now.
            same = space.version.array[entries // space.index.group_count] == versions
            left = entries[same & (space.index.present.array[entries] != 0)]
            if len(left):
                return space, left
        return None

    def _next_units(self, extents: int) -> tuple[NamespaceReturns, Entries] | None:
        """Ranked units of one namespace that are still what they were when they were ranked.

        A leaf comes alone: what goes before it may lengthen its unit.
        """
        entries: list[int] = []
        of: NamespaceReturns | None = None
        while self._ranked and extents > 0:
            value, space, row, version = self._ranked[0]
            is_leaf = space.chains.is_leaf(row)
            if entries and (is_leaf or of is not space):
                break
            self._ranked.popleft()
            if space.version.view[row] == version and space.chains.is_measured(row):
                of = space
                unit = _entries_of_unit(space, row)
                entries.extend(unit)
                extents -= sum(space.index.extents.view[entry] for entry in unit)
                if value < math.inf:
                    self._price += (value - self._price) * _PRICE_WEIGHT
                if is_leaf:
                    break
        return (of, np.array(entries, dtype=np.int64)) if of is not None else None

    def _rank(self) -> bool:
        """Draw a sample of evictable rows and keep the least valuable ones, in order; whether there are any."""
        now = self._clock()
        found: list[tuple[NamespaceReturns, Rows, NDArray[np.float64]]] = []
        for slot, drawn in self._evictable.draw(_SAMPLE):
            rows, values = self._values(self._spaces[slot], drawn, now)
            found.append((self._spaces[slot], rows, values))
        order = [(space, row) for space, rows, _ in found for row in rows.tolist()]
        values = np.concatenate([each for _, _, each in found]) if order else np.empty(0)
        for at in np.argsort(values, kind="stable")[: max(1, len(order) // _TAKEN)].tolist():
            space, row = order[at]
            self._ranked.append(_Ranked(float(values[at]), space, row, space.version.view[row]))
        return bool(order)

    def _values(self, space: NamespaceReturns, rows: Rows, now: float) -> tuple[Rows, NDArray[np.float64]]:
        """Those of the rows that can go now, and of each the expected tokens saved per second and extent."""
        figures = space.chains.figures(rows)
        returns, serves = space.expected_returns(rows, now)
        values = returns * figures.gain_chunks * space.index.chunk_tokens / figures.extents
        stored = space.index.stored_at.array.reshape(-1, space.index.group_count)[rows].max(axis=1)
        values[~serves & figures.is_leaf & (stored + _FRESH_SECONDS > now)] = math.inf
        return rows[figures.free], values[figures.free]


def _entries_of_unit(space: NamespaceReturns, row: int) -> list[int]:
    """The unit's entries in the order in which they go: states, then attention from the deepest chunk up."""
    index = space.index
    present, groups = index.present.view, index.group_count
    entries = [row * groups + group for group in index.others]
    for each in space.chains.unit(row):
        entries.extend([each * groups + group for group in index.attention])
    return [entry for entry in entries if present[entry]]
