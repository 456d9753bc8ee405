"""The numba backend: span copies with non-temporal stores and the checksum fused, one call without the GIL a batch.

Importing this module compiles it (seconds) or loads it from numba's cache (a fraction of a second), so that no
copy ever waits for a compiler. Addresses are raw: the caller holds the memory mapped and unfreed during a call.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit, types

from kernels import checksum, intrinsics
from kernels.reference import check_object_count, checked_runs
from kernels.spans import WORD_BYTES

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import ArrayLike, NDArray

    from kernels.spans import Direction, Spans

if sys.byteorder != "little":
    raise ImportError("the numba backend reads words in the host's byte order, which must be little-endian")

# Typed, because numba turns uint64 combined with a plain integer into a float.
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_WORD = np.uint64(WORD_BYTES)
_LINE = np.uint64(intrinsics.LINE_BYTES)
_LINE_MASK = np.uint64(intrinsics.LINE_BYTES - 1)
_LINE_WORDS = np.uint64(intrinsics.LINE_WORDS)
_WORD_MASK = np.uint64(WORD_BYTES - 1)
_WORD_SHIFT = np.uint64(3)
_LINE_SHIFT = np.uint64(6)

STREAM_MINIMUM_BYTES = 1024
"""Spans shorter than this use ordinary stores; see docs/performance.md for the measurement."""
PREFETCH_BYTES = 4096
"""Reads run this far ahead, over the end of a span into the next: hardware prefetchers stop at a page's end."""
_STREAM_MINIMUM = np.uint64(STREAM_MINIMUM_BYTES)
_PREFETCH = np.uint64(PREFETCH_BYTES)

_COLUMN = types.Array(types.uint64, 1, "C", readonly=True)
_OWNERS = types.Array(types.int32, 1, "C", readonly=True)
_SUMS = types.Array(types.uint64, 1, "C")


def _sources_revision() -> int | None:
    """Digest the modules that the compiled code is made from, None when their text is not at hand.

    Numba's cache looks at the file and the closure of the cached function alone, so a change elsewhere would run
    stale machine code.
    """
    digest = hashlib.sha256()
    try:
        for module in (checksum, intrinsics):
            digest.update(Path(str(module.__file__)).read_bytes())
    except OSError:
        return None
    return int.from_bytes(digest.digest()[:7], "little")


def _compiled(signature: Any, function: Any, *, cache: bool) -> Any:
    """Compile for exactly this signature, cached on disk where there is a place for it."""
    if cache:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):
            # Read-only installation without a home, or a full disk: the cache saves start-up time, nothing else.
            pass
    return njit(signature, nogil=True)(function)


@njit(nogil=True)
def _prefetch_ahead(destination, source, end_of_span, next_destination, next_source):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return where the piece after this one is read; warm the translation of where it is written.

    A non-temporal store that misses the TLB stalls the store queue for the walk.
    """
    if end_of_span:
        destination, source = next_destination, next_source
    intrinsics.prefetch_line(destination)
    return source


@njit(nogil=True)
def _copy_span(destination, source, length, next_destination, next_source):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    if length < _STREAM_MINIMUM:
        intrinsics.copy_bytes(destination, source, length)
        return
    done = (_LINE - destination) & _LINE_MASK
    intrinsics.copy_bytes(destination, source, done)
    end = length - ((length - done) & _LINE_MASK)
    while done < end:
        piece = min(_PREFETCH, end - done)
        after = done + piece
        ahead = _prefetch_ahead(
            destination + after, source + after, after == end, next_destination, next_source
        )
        intrinsics.stream_lines(destination + done, source + done, piece >> _LINE_SHIFT, ahead)
        done = after
    intrinsics.copy_bytes(destination + done, source + done, length - done)


@njit(nogil=True)
def _copy_sum_words(destination, source, length, word_index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Word by word, the last one zero-filled: for heads and tails."""
    total = _ZERO
    done = _ZERO
    while length - done >= _WORD:
        word = intrinsics.load_unaligned_word(source + done)
        intrinsics.store_unaligned_word(destination + done, word)
        total += intrinsics.mix_word(word, word_index)
        word_index += _ONE
        done += _WORD
    if done < length:
        word = _ZERO
        shift = _ZERO
        while done < length:
            byte = intrinsics.load_byte(source + done)
            intrinsics.store_byte(destination + done, byte)
            word |= byte << shift
            shift += _WORD
            done += _ONE
        total += intrinsics.mix_word(word, word_index)
    return total


@njit(nogil=True)
def _copy_sum_span(destination, source, length, word_index, next_destination, next_source):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    streaming = length >= _STREAM_MINIMUM and destination & _WORD_MASK == _ZERO
    done = (_LINE - destination) & _LINE_MASK if streaming else _ZERO
    total = _copy_sum_words(destination, source, done, word_index)
    end = length - ((length - done) & _LINE_MASK)
    while done < end:
        piece = min(_PREFETCH, end - done)
        after = done + piece
        ahead = _prefetch_ahead(
            destination + after, source + after, after == end, next_destination, next_source
        )
        lines, word = piece >> _LINE_SHIFT, word_index + (done >> _WORD_SHIFT)
        if streaming:
            total += intrinsics.stream_sum_lines(destination + done, source + done, lines, word, ahead)
        else:
            total += intrinsics.store_sum_lines(destination + done, source + done, lines, word, ahead)
        done = after
    return total + _copy_sum_words(
        destination + done, source + done, length - done, word_index + (done >> _WORD_SHIFT)
    )


def _define(revision: int) -> tuple[Any, Any, Any]:
    """Return the batch functions; `revision` is in their closures and so in the key of numba's cache."""

    def copy_batch(destinations, sources, lengths):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        _ = revision
        rows = lengths.size
        for row in range(rows):
            following = min(row + 1, rows - 1)
            _copy_span(
                destinations[row], sources[row], lengths[row], destinations[following], sources[following]
            )
        # By the thread that copied: another thread's fence would not cover these stores.
        intrinsics.fence_stores()

    def copy_sum_batch(destinations, sources, lengths, offsets, owners, sums):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        _ = revision
        rows = lengths.size
        for row in range(rows):
            following = min(row + 1, rows - 1)
            sums[owners[row]] += _copy_sum_span(
                destinations[row],
                sources[row],
                lengths[row],
                offsets[row] >> _WORD_SHIFT,
                destinations[following],
                sources[following],
            )
        intrinsics.fence_stores()

    def sum_batch(base, offsets, lengths):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        _ = revision
        total = _ZERO
        for row in range(lengths.size):
            source = base + offsets[row]
            word_index = offsets[row] >> _WORD_SHIFT
            lines = lengths[row] >> _LINE_SHIFT
            total += intrinsics.sum_lines(source, lines, word_index)
            total += _sum_words(
                source + lines * _LINE, lengths[row] - lines * _LINE, word_index + lines * _LINE_WORDS
            )
        return total

    return copy_batch, copy_sum_batch, sum_batch


@njit(nogil=True)
def _sum_words(source, length, word_index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    total = _ZERO
    done = _ZERO
    while length - done >= _WORD:
        total += intrinsics.mix_word(intrinsics.load_unaligned_word(source + done), word_index)
        word_index += _ONE
        done += _WORD
    if done < length:
        word = _ZERO
        shift = _ZERO
        while done < length:
            word |= intrinsics.load_byte(source + done) << shift
            shift += _WORD
            done += _ONE
        total += intrinsics.mix_word(word, word_index)
    return total


def _load_word_body(address):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return intrinsics.load_atomic_word(address)


def _fence_body():  # type: ignore[no-untyped-def]  # noqa: ANN202
    intrinsics.fence_acquire()


_revision = _sources_revision()
_copy_body, _copy_sum_body, _sum_body = _define(_revision or 0)
_cache = _revision is not None
_copy_batch = _compiled(types.void(_COLUMN, _COLUMN, _COLUMN), _copy_body, cache=_cache)
_copy_sum_batch = _compiled(
    types.void(_COLUMN, _COLUMN, _COLUMN, _COLUMN, _OWNERS, _SUMS), _copy_sum_body, cache=_cache
)
_sum_batch = _compiled(types.uint64(types.uint64, _COLUMN, _COLUMN), _sum_body, cache=_cache)
_load_word = _compiled(types.uint64(types.uint64), _load_word_body, cache=_cache)
_fence = _compiled(types.void(), _fence_body, cache=_cache)


def copy_spans(spans: Spans, direction: Direction) -> None:
    """Copy every span in the given direction; source and destination of a span must not overlap.

    The calling thread's stores are fenced when this returns.
    """
    sources, destinations = spans.ends(direction)
    _copy_batch(destinations, sources, spans.length_bytes)


def copy_spans_checksummed(spans: Spans, direction: Direction, object_count: int) -> NDArray[np.uint64]:
    """Copy like `copy_spans` and return the raw sum of each object, uint64[object_count].

    The sums are taken from the registers that are stored. An object without spans sums to 0.
    Raises ValueError when a span's object index is not below `object_count`.
    """
    check_object_count(spans, object_count)
    sums = np.zeros(object_count, dtype=np.uint64)
    sources, destinations = spans.ends(direction)
    _copy_sum_batch(destinations, sources, spans.length_bytes, spans.stream_offset, spans.object_index, sums)
    return sums


def checksum_bytes(buffer: ReadableBuffer, runs: ArrayLike) -> int:
    """Return the raw sum of a stream that lies whole in `buffer`.

    `runs` is an (n, 2) array of (stream offset, length) in bytes. Raises ValueError for a run that starts inside
    a word or ends after the buffer.
    """
    stream = np.frombuffer(memoryview(buffer), dtype=np.uint8)
    offsets, lengths = checked_runs(stream, runs)
    return int(_sum_batch(stream.ctypes.data, offsets, lengths))


def acquire_fence() -> None:
    """Order earlier reads before later ones, between a copy and the re-read of a generation."""
    _fence()


def load_word(address: int) -> int:
    """Return the 8-byte word at `address`, read in one access. Raises ValueError when it is not aligned to 8."""
    if address % WORD_BYTES or address <= 0:
        raise ValueError(f"address {address:#x} is not that of an aligned word")
    return int(_load_word(address))
