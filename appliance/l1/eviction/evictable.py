"""All evictable rows of all namespaces, dense, so that a sample of them costs the same however many there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from appliance.l1.columns import Column

Rows = NDArray[np.int64]

_SLOT_SHIFT = 40
_ROW_MASK = (1 << _SLOT_SHIFT) - 1
_FIRST_SIZE = 1024


class Evictable:
    """A set of (namespace slot, row)."""

    def __init__(self, seed: int = 1) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._packed = Column(_FIRST_SIZE, np.int64)
        self._count = 0
        self._places: dict[int, Column] = {}

    def __len__(self) -> int:
        return self._count

    def add_namespace(self, slot: int, places: Column) -> None:
        """``places`` holds each row's position here, one higher."""
        self._places[slot] = places

    def add(self, slot: int, row: int) -> None:
        """Put a row in; doing so twice is harmless."""
        places = self._places[slot].view
        if places[row]:
            return
        if self._count == len(self._packed.array):
            self._packed.grow(2 * self._count)
        self._packed.view[self._count] = (slot << _SLOT_SHIFT) | row
        self._count += 1
        places[row] = self._count

    def discard(self, slot: int, row: int) -> None:
        """Take a row out; the last one takes its place."""
        places = self._places[slot].view
        place = places[row]
        if not place:
            return
        self._count -= 1
        if place <= self._count:
            last = self._packed.view[self._count]
            self._packed.view[place - 1] = last
            self._places[last >> _SLOT_SHIFT].view[last & _ROW_MASK] = place
        places[row] = 0

    def draw(self, count: int) -> list[tuple[int, Rows]]:
        """At most so many different rows at random, by namespace slot."""
        packed = self._packed.array[: self._count]
        if self._count > count:
            packed = np.unique(packed[self._random.integers(0, self._count, count)])
        slots = packed >> _SLOT_SHIFT
        return [(slot, packed[slots == slot] & _ROW_MASK) for slot in np.unique(slots).tolist()]
