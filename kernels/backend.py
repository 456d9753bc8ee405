"""The choice of a copy backend: compiled code where numba can be imported, numpy elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from _typeshed import ReadableBuffer
    from numpy.typing import ArrayLike, NDArray

    from kernels.spans import Direction, Spans


@dataclass(frozen=True)
class Backend:
    """The operations of one backend; all backends give the same bytes and the same sums.

    Their contracts are those of the functions of the same names in `kernels.reference`.
    """

    name: str
    """`numba` or `numpy`."""
    copy_spans: Callable[[Spans, Direction], None]
    copy_spans_checksummed: Callable[[Spans, Direction, int], NDArray[np.uint64]]
    checksum_bytes: Callable[[ReadableBuffer, ArrayLike], int]
    acquire_fence: Callable[[], None]
    load_word: Callable[[int], int]


def reference_backend() -> Backend:
    """Return the numpy backend."""
    from kernels import reference

    return Backend(
        name="numpy",
        copy_spans=reference.copy_spans,
        copy_spans_checksummed=reference.copy_spans_checksummed,
        checksum_bytes=reference.checksum_bytes,
        acquire_fence=reference.acquire_fence,
        load_word=reference.load_word,
    )


@lru_cache(maxsize=1)
def load_backend() -> Backend:
    """Return the fastest backend that this process can import.

    The first call may compile for seconds where nothing is cached: make it at start, not in a step of the engine.
    """
    try:
        from kernels import cpu
    except ImportError:
        return reference_backend()
    return Backend(
        name="numba",
        copy_spans=cpu.copy_spans,
        copy_spans_checksummed=cpu.copy_spans_checksummed,
        checksum_bytes=cpu.checksum_bytes,
        acquire_fence=cpu.acquire_fence,
        load_word=cpu.load_word,
    )
