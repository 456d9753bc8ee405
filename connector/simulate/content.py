"""What every page must hold: a function of the chunk key and the page's place, so that any engine can check any page."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8
_PLACE = struct.Struct("<IIII")
_STRIDE = 0x9E3779B97F4A7C15
"""An odd number: word i of two pages is equal only if the pages are, and no two words of one page are."""

Words = NDArray[np.uint64]


class Content:
    """Fills and checks pages of up to ``page_bytes``, a multiple of 8."""

    def __init__(self, page_bytes: int) -> None:
        assert page_bytes % WORD_BYTES == 0, "the end of a page would never be compared"
        steps = np.arange(page_bytes // WORD_BYTES, dtype=np.uint64)
        with np.errstate(over="ignore"):
            self._steps: Words = steps * np.uint64(_STRIDE)

    @staticmethod
    def seed(key: bytes, group: int, shard: int, layer: int, block: int) -> np.uint64:
        """The number that tells a page from all others; ``block`` counts within the chunk."""
        digest = hashlib.blake2b(key + _PLACE.pack(group, shard, layer, block), digest_size=8)
        return np.uint64(int.from_bytes(digest.digest(), "little"))

    def fill(self, page: Words, seed: np.uint64) -> None:
        """Write what a page must hold."""
        np.add(self._steps[: len(page)], seed, out=page)

    def first_difference(self, page: Words, seed: np.uint64) -> int:
        """The offset in bytes of the first wrong word, -1 if there is none."""
        expected = self._steps[: len(page)] + seed
        if np.array_equal(page, expected):
            return -1
        return int(np.flatnonzero(page != expected)[0]) * WORD_BYTES

    @staticmethod
    def poison(page: Words) -> None:
        """Make sure that a page which nobody writes is found wrong, whatever it held before."""
        np.invert(page, out=page)
