"""The reference that no policy can follow: it has read the rest of the trace.

A state is stored only where the reuse by a later prompt will end. What is needed furthest in the future goes first, and of
what is needed at the same time, the deepest. That is Belady's rule for entries of several sizes that are needed together: not
the best possible, but a bound that is close where memory is scarce.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from appliance.l1.columns import Column
from appliance.l1.eviction import Prompt
from appliance.l1.index import NamespaceIndex

_NEVER = 1 << 40
_DEPTHS = 1 << 22


class Clairvoyant:
    """Belady's rule over attention chunks and states; :meth:`asked` must be called with exactly the prompts it was made with."""

    name: ClassVar[str] = "REFERENCE"

    def __init__(self, prompts: Sequence[Sequence[bytes]]) -> None:
        self._prompts = prompts
        self._at = -1
        self._read_next: dict[bytes, list[int]] = {}
        self._ended_next: dict[bytes, list[int]] = {}
        for number, keys in enumerate(prompts):
            reach = 0
            for key in keys:
                reach += key in self._read_next
                self._read_next.setdefault(key, []).append(number)
            if reach:
                self._ended_next.setdefault(keys[reach - 1], []).append(number)
        for following in (self._read_next, self._ended_next):
            for numbers in following.values():
                numbers.reverse()
        self._rank = Column(0, np.int64)
        self._extents = Column(0, np.uint32)
        self._heap: list[tuple[int, int]] = []
        self._states: list[int] = []

    def add_namespace(self, index: NamespaceIndex) -> None:
        """See :class:`EvictionPolicy`. A replay has one namespace, empty at first."""
        self._rank = Column(len(index.present.array), np.int64)
        self._extents = index.extents
        self._states = index.others

    def asked(self, index: NamespaceIndex, prompt: Prompt) -> Sequence[int]:
        """See :class:`EvictionPolicy`. The boundaries at which later prompts will part from this one."""
        self._at += 1
        assert prompt.keys == self._prompts[self._at], (
            "another prompt than the one foreseen: the future would be wrong"
        )
        for row, key in zip(prompt.rows.tolist(), prompt.keys, strict=True):
            if row >= 0:
                self._foresee(index, row, key)
        if not index.others:
            return ()
        return [
            b for b, key in enumerate(prompt.keys, start=1) if self._next_of(self._ended_next, key) < _NEVER
        ]

    def _foresee(self, index: NamespaceIndex, row: int, key: bytes) -> None:
        begin = row * index.group_count
        present = index.present.view
        read, ended = self._next_of(self._read_next, key), self._next_of(self._ended_next, key)
        for entry in range(begin, begin + index.group_count):
            if present[entry]:
                self._expect(index, entry, ended if entry - begin in self._states else read)

    def _next_of(self, following: dict[bytes, list[int]], key: bytes) -> int:
        numbers = following.get(key)
        if not numbers:
            return _NEVER
        while numbers and numbers[-1] <= self._at:
            numbers.pop()
        return numbers[-1] if numbers else _NEVER

    def _expect(self, index: NamespaceIndex, entry: int, needed: int) -> None:
        depth = 2 * index.chunk_index.view[entry // index.group_count] + (
            entry % index.group_count in self._states
        )
        rank = needed * _DEPTHS + depth
        if self._rank.view[entry] != rank:
            self._rank.view[entry] = rank
            heapq.heappush(self._heap, (-rank, entry))

    def touched(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`. The past says nothing."""

    def stored(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`."""
        keys = self._prompts[self._at]
        depth, groups = index.chunk_index.view, index.group_count
        for entry in entries.tolist():
            following = self._ended_next if entry % groups in self._states else self._read_next
            self._expect(index, entry, self._next_of(following, keys[depth[entry // groups]]))

    def demoted(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`. What lies behind is needed no sooner, so it has gone already or goes next."""

    def removed(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:  # noqa: ARG002
        """See :class:`EvictionPolicy`."""
        self._rank.array[entries] = 0

    def covers(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> NDArray[np.bool_]:  # noqa: ARG002
        """See :class:`EvictionPolicy`."""
        covered: NDArray[np.bool_] = self._rank.array[entries] != 0
        return covered

    def candidates(self, extents: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """See :class:`EvictionPolicy`. What the consumer leaves stays for the next time."""
        left: list[tuple[int, int]] = []
        try:
            while batch := self._furthest(extents):
                left += batch
                yield 0, np.array([entry for _, entry in batch], dtype=np.int64)
        finally:
            for ranked in left:
                if self._rank.view[ranked[1]] == -ranked[0]:
                    heapq.heappush(self._heap, ranked)

    def _furthest(self, extents: int) -> list[tuple[int, int]]:
        batch: list[tuple[int, int]] = []
        while self._heap and extents > 0:
            ranked = heapq.heappop(self._heap)
            if self._rank.view[ranked[1]] == -ranked[0]:
                batch.append(ranked)
                extents -= self._extents.view[ranked[1]]
        return batch
