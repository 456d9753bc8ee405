"""The boundaries that prompts ended or forked at, remembered longer than their bytes: keys and a few numbers each.

Without this memory a cache learns only from what it kept: a prompt that comes back after its pages were evicted would
look like a new one, and its class would seem never to return.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.l1.columns import Column
from appliance.l1.eviction.rates import ReturnRates, bucket_of

_FIRST_SIZE = 1024


class BoundaryMemory:
    """Boundaries of one namespace by chunk key; the one untouched for longest is forgotten first.

    A boundary is a small number, an index into the columns. ``row`` is its row in the namespace's index and ``owner`` the
    row whose state would serve a prompt that comes back to it; both are one higher, so that 0 means none.
    """

    def __init__(self, rates: ReturnRates, capacity: int) -> None:
        self._rates = rates
        self._capacity = capacity
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._free: list[int] = []
        self._made = 0
        self._returned: list[tuple[int, float]] = []
        self._forgotten: list[tuple[int, float]] = []
        self.since_ms = Column(_FIRST_SIZE, np.int64)
        self.kind = Column(_FIRST_SIZE, np.int64)
        self.returns = Column(_FIRST_SIZE, np.uint32)
        self.is_end = Column(_FIRST_SIZE, np.uint8)
        self.row = Column(_FIRST_SIZE, np.int64)
        self.owner = Column(_FIRST_SIZE, np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, key: bytes) -> int:
        """The boundary at this chunk's end, -1 if none is remembered."""
        return self._ids.get(key, -1)

    def find_all(self, keys: Sequence[bytes]) -> list[int]:
        """The boundaries at the ends of these chunks, -1 where none is remembered."""
        get = self._ids.get
        return [get(key, -1) for key in keys]

    def begin(self, key: bytes, kind: int, now: float) -> tuple[int, int]:
        """A life of this class begins at the end of a chunk; returns it, and the boundary forgotten for it or -1."""
        found = self._ids.get(key, -1)
        forgotten = -1
        if found < 0:
            if len(self._ids) >= self._capacity:
                forgotten = self._forget_oldest(now)
            found = self._make()
            self._ids[key] = found
        else:
            self._ids.move_to_end(key)
        self.since_ms.view[found] = int(now * 1000)
        self.kind.view[found] = kind
        return found, forgotten

    def came_back(self, boundary: int, now: float) -> None:
        """A prompt came back to it: its life ends with a return."""
        self._returned.append((self.kind.view[boundary], now - self.since_ms.view[boundary] / 1000))
        self.returns.view[boundary] += 1

    def worth_of(self, boundaries: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Expected returns per second to each of these boundaries, by class and age."""
        ages = now - self.since_ms.array[boundaries] / 1000
        worth: NDArray[np.float64] = self._rates.worth[self.kind.array[boundaries], bucket_of(ages)]
        return worth

    def learn(self, now: float) -> None:
        """Work what ended since the last time into what boundaries are worth; milliseconds."""
        for ended, returned in ((self._returned, True), (self._forgotten, False)):
            kinds = np.array([kind for kind, _ in ended], dtype=np.int64)
            self._rates.count(kinds, np.array([age for _, age in ended]), returned=returned)
            ended.clear()
        alive = np.fromiter(self._ids.values(), dtype=np.int64, count=len(self._ids))
        self._rates.learn(self.kind.array[alive], now - self.since_ms.array[alive] / 1000)

    def _forget_oldest(self, now: float) -> int:
        _, boundary = self._ids.popitem(last=False)
        self._forgotten.append((self.kind.view[boundary], now - self.since_ms.view[boundary] / 1000))
        self._free.append(boundary)
        return boundary

    def _make(self) -> int:
        if self._free:
            boundary = self._free.pop()
        else:
            boundary = self._made
            self._made += 1
            if boundary >= len(self.since_ms.array):
                for column in (self.since_ms, self.kind, self.returns, self.is_end, self.row, self.owner):
                    column.grow(2 * len(column.array))
        self.returns.view[boundary] = 0
        self.is_end.view[boundary] = 0
        self.row.view[boundary] = 0
        self.owner.view[boundary] = 0
        return boundary
