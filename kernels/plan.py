"""Planning: cut an object's stream where its extents end, giving the spans to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels.pages import RUN_ALIGNMENT_BYTES
from kernels.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kernels.pages import StreamRuns

EXTENT_ALIGNMENT_BYTES = 4096
"""Extent sizes and the data area's address are multiples of this."""


class ExtentError(ValueError):
    """The extents given for an object cannot hold it or lie outside the arena."""


def extents_needed(stream_bytes: int, extent_bytes: int) -> int:
    """Return how many extents hold a stream of this many bytes."""
    return -(-stream_bytes // extent_bytes)


def plan_object(
    runs: StreamRuns,
    extents: Sequence[tuple[int, int]],
    *,
    extent_bytes: int,
    data_base_address: int,
    extent_limit: int,
    object_index: int = 0,
) -> Spans:
    """Intersect one object's stream runs with its extents.

    `extents` are packed runs (first extent, count) in stream order. `data_base_address` is where extent 0 of the
    segment is mapped in this process, `extent_limit` how many extents that mapping has, `extent_bytes` the size of
    each. Every span of the result carries `object_index`.

    Raises ExtentError when the extents are shorter than the stream or reach past `extent_limit`, both of which
    would touch memory of somebody else, and ValueError for sizes that are not multiples of 4096.
    """
    if extent_bytes < 1 or extent_bytes % EXTENT_ALIGNMENT_BYTES:
        raise ValueError(f"extent_bytes {extent_bytes} is not a multiple of {EXTENT_ALIGNMENT_BYTES}")
    if data_base_address < 1 or data_base_address % RUN_ALIGNMENT_BYTES:
        raise ValueError(
            f"data_base_address {data_base_address:#x} is not a multiple of {RUN_ALIGNMENT_BYTES}"
        )
    packed = np.array(extents, dtype=np.int64).reshape(-1, 2)
    first, count = packed[:, 0], packed[:, 1]
    if len(packed) and (
        int(first.min()) < 0 or int(count.min()) < 1 or int((first + count).max()) > extent_limit
    ):
        raise ExtentError(f"extents {list(extents)} outside a segment of {extent_limit} extents")
    capacity_bytes = int(count.sum()) * extent_bytes
    if capacity_bytes < runs.stream_bytes:
        raise ExtentError(f"extents hold {capacity_bytes} bytes, the object's stream has {runs.stream_bytes}")
    if not len(runs):
        return Spans.empty()

    # Everything below is in stream coordinates: pieces begin where a run begins or where an extent run begins.
    segment_end = np.cumsum(count.astype(np.uint64)) * np.uint64(extent_bytes)
    segment_start = np.concatenate((np.zeros(1, dtype=np.uint64), segment_end[:-1]))
    segment_address = first.astype(np.uint64) * np.uint64(extent_bytes) + np.uint64(data_base_address)
    start: NDArray[np.uint64] = np.unique(np.concatenate((runs.stream_offset, segment_start)))
    run = np.searchsorted(runs.stream_offset, start, side="right") - 1
    run_end = runs.stream_offset + runs.length_bytes
    # An extent may begin in the padding between two runs, before the first or after the last.
    inside = (run >= 0) & (start < run_end[run])
    start, run = start[inside], run[inside]
    segment = np.searchsorted(segment_start, start, side="right") - 1
    end = np.minimum(run_end[run], segment_end[segment])
    assert not (start % np.uint64(8)).any(), "a cut inside a word would change the checksum"
    return Spans(
        engine_address=runs.engine_address[run] + (start - runs.stream_offset[run]),
        arena_address=segment_address[segment] + (start - segment_start[segment]),
        length_bytes=end - start,
        stream_offset=start,
        object_index=np.full(len(start), object_index, dtype=np.int32),
    )
