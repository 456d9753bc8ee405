"""Columns: fixed-size arrays of integers, read one by one as plain ``int`` and in bulk through numpy.

Memory comes from the kernel zeroed and only where it is touched, so a column may be as long as the arena is large.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Column:
    """``view[i]`` reads and writes one value fast; ``array`` is the same memory for whole-column work."""

    __slots__ = ("array", "view")

    def __init__(self, length: int, dtype: type[np.integer[Any]]) -> None:
        self.array: NDArray[Any] = np.zeros(length, dtype=dtype)
        self.view: memoryview[int] = self.array.data

    def grow(self, length: int) -> None:
        """Make the column longer; views taken before are of the old memory."""
        longer = np.zeros(length, dtype=self.array.dtype)
        longer[: len(self.array)] = self.array
        self.array = longer
        self.view = longer.data
