"""The numpy backend: what every other backend must equal bit for bit, and what runs where numba is absent.

Addresses are raw: the caller holds the memory mapped and unfreed during a call. Long copies release the GIL.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import numpy as np

from kernels.checksum import raw_sum
from kernels.spans import WORD_BYTES

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import ArrayLike, NDArray

    from kernels.spans import Direction, Spans

_PIECE_BYTES = 1 << 18
_WORD_MASK = 2**64 - 1
_fence_lock = threading.Lock()


def memory_view(address: int, length_bytes: int) -> NDArray[np.uint8]:
    """Return a writable byte vector over memory of this process; it keeps nothing alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * length_bytes).from_address(address)), dtype=np.uint8)


def check_object_count(spans: Spans, object_count: int) -> None:
    """Raise ValueError unless every span's object has a place among `object_count` sums."""
    if spans.object_count > object_count:
        raise ValueError(f"spans of {spans.object_count} objects for {object_count} sums")


def checked_runs(buffer: NDArray[np.uint8], runs: ArrayLike) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return (stream offsets, lengths) of `runs`, an (n, 2) array of bytes, all inside `buffer`.

    Raises ValueError for a run that starts inside a word or ends after the buffer.
    """
    pairs = np.array(runs, dtype=np.int64).reshape(-1, 2)
    offsets, lengths = pairs[:, 0], pairs[:, 1]
    if len(pairs) and (int(pairs.min()) < 0 or (offsets > len(buffer) - lengths).any()):
        raise ValueError(f"runs outside a buffer of {len(buffer)} bytes")
    if (offsets % WORD_BYTES).any():
        raise ValueError(f"a run starts inside a checksum word: offsets must be multiples of {WORD_BYTES}")
    return offsets.astype(np.uint64), lengths.astype(np.uint64)


def copy_spans(spans: Spans, direction: Direction) -> None:
    """Copy every span in the given direction; source and destination of a span must not overlap."""
    sources, destinations = spans.ends(direction)
    rows = zip(sources.tolist(), destinations.tolist(), spans.length_bytes.tolist(), strict=True)
    for source, destination, length in rows:
        ctypes.memmove(destination, source, length)


def copy_spans_checksummed(spans: Spans, direction: Direction, object_count: int) -> NDArray[np.uint64]:
    """Copy like `copy_spans` and return the raw sum of each object, uint64[object_count].

    The sums are over the bytes that were stored: the source is read once. An object without spans sums to 0.
    Raises ValueError when a span's object index is not below `object_count`.
    """
    check_object_count(spans, object_count)
    sums = [0] * object_count
    sources, destinations = spans.ends(direction)
    columns = (sources, destinations, spans.length_bytes, spans.stream_offset, spans.object_index)
    for source, destination, length, offset, owner in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        for done in range(0, length, _PIECE_BYTES):
            piece_bytes = min(_PIECE_BYTES, length - done)
            # A private copy, so that a source changing meanwhile cannot part the sum from the bytes stored.
            piece = memory_view(source + done, piece_bytes).copy()
            memory_view(destination + done, piece_bytes)[:] = piece
            sums[owner] = (sums[owner] + raw_sum(piece, offset + done)) & _WORD_MASK
    return np.array(sums, dtype=np.uint64)


def checksum_bytes(buffer: ReadableBuffer, runs: ArrayLike) -> int:
    """Return the raw sum of a stream that lies whole in `buffer`.

    `runs` is an (n, 2) array of (stream offset, length) in bytes. Raises ValueError as `checked_runs` does.
    """
    stream = np.frombuffer(memoryview(buffer), dtype=np.uint8)
    total = 0
    offsets, lengths = checked_runs(stream, runs)
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        for start in range(offset, offset + length, _PIECE_BYTES):
            total += raw_sum(stream[start : min(start + _PIECE_BYTES, offset + length)], start)
    return total & _WORD_MASK


def acquire_fence() -> None:
    """Order earlier reads before later ones, between a copy and the re-read of a generation."""
    # Two lock rounds: reads may move into a critical section but not across a release and the next acquire.
    for _ in range(2):
        with _fence_lock:
            pass


def load_word(address: int) -> int:
    """Return the 8-byte word at `address`, read in one access. Raises ValueError when it is not aligned to 8."""
    if address % WORD_BYTES or address <= 0:
        raise ValueError(f"address {address:#x} is not that of an aligned word")
    return ctypes.c_uint64.from_address(address).value
