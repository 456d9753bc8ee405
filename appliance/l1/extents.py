"""Free extents of one segment.

A stack of extent numbers: what was freed last is handed out first, so that a pool under churn stays in the pages that
are warm. An allocation is sorted and returned as runs of neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, int]
"""First extent and number of extents."""


class ExtentAllocator:
    """Hands out extents that were added; an extent is free or handed out, never both."""

    __slots__ = ("_free", "_is_free", "_top")

    def __init__(self, extent_count: int) -> None:
        self._free: NDArray[np.uint32] = np.zeros(extent_count, dtype=np.uint32)
        self._is_free: NDArray[np.bool_] = np.zeros(extent_count, dtype=np.bool_)
        self._top = 0

    @property
    def free_extents(self) -> int:
        """Extents that can be handed out now."""
        return self._top

    @property
    def free_mask(self) -> NDArray[np.bool_]:
        """Which extents are free, as it changes; not to be written."""
        return self._is_free

    def allocate(self, count: int) -> list[Run] | None:
        """``count`` extents as runs in ascending order, or ``None`` if there are not so many."""
        if count > self._top or count < 1:
            return None
        picked = np.sort(self._free[self._top - count : self._top])
        self._top -= count
        self._is_free[picked] = False
        breaks = np.flatnonzero(np.diff(picked) != 1) + 1
        firsts = np.concatenate(([0], breaks))
        lasts = np.concatenate((breaks, [count]))
        return [(int(picked[a]), int(b - a)) for a, b in zip(firsts, lasts, strict=True)]

    def release(self, runs: Iterable[Run]) -> None:
        """Take extents back, or in for the first time."""
        for first, count in runs:
            span = self._is_free[first : first + count]
            assert not span.any(), (
                f"extents {first}..{first + count - 1} are freed twice: two objects would share them"
            )
            span[:] = True
            # Descending, so that the next allocation takes the lowest neighbours first.
            self._free[self._top : self._top + count] = np.arange(
                first + count - 1, first - 1, -1, dtype=np.uint32
            )
            self._top += count

    def is_free(self, extent: int) -> bool:
        """Whether the extent is in the pool."""
        return bool(self._is_free[extent])
