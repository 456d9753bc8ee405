"""Rounds through a bounce buffer: which spans fit into it together, and where in it each lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from connector.client.device.runtime import PinnedMemory
from kernels import Spans

SLOT_ALIGNMENT_BYTES = 64
"""A slot begins like a run of a stream: as well aligned as the widest access of either side."""
SLICES = 4
"""A span is cut into slices of at most this part of the buffer, so that rounds fill it well."""


@dataclass(frozen=True)
class Round:
    """Spans whose bytes lie in the buffer together. Row by row the same bytes:

    `device_side` between engine memory and the buffer as the device sees it (in the place of the arena);
    `host_side` between the buffer as this process sees it (in the place of the engine) and the arena.
    """

    device_side: Spans
    host_side: Spans


def rounds(spans: Spans, bounce: PinnedMemory) -> Iterator[Round]:
    """Cut spans into rounds, in order. The buffer is at least 256 bytes long, a multiple of that."""
    slice_bytes = bounce.length_bytes // SLICES
    assert slice_bytes >= SLOT_ALIGNMENT_BYTES, "a buffer without room for one slot would give no round"
    assert slice_bytes % SLOT_ALIGNMENT_BYTES == 0, "a slice would end inside a word of the checksum"
    sliced = _slices(spans, slice_bytes)
    aligned = -(-sliced.length_bytes.astype(np.int64) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    ends = np.cumsum(aligned)
    first = 0
    while first < len(sliced):
        before = int(ends[first] - aligned[first])
        last = int(np.searchsorted(ends, before + bounce.length_bytes, side="right"))
        rows = sliced.rows(first, last)
        slots = (ends[first:last] - aligned[first:last] - before).astype(np.uint64)
        yield Round(
            Spans(
                rows.engine_address,
                slots + np.uint64(bounce.device_address),
                rows.length_bytes,
                rows.stream_offset,
                rows.object_index,
            ),
            Spans(
                slots + np.uint64(bounce.host_address),
                rows.arena_address,
                rows.length_bytes,
                rows.stream_offset,
                rows.object_index,
            ),
        )
        first = last


def _slices(spans: Spans, slice_bytes: int) -> Spans:
    lengths = spans.length_bytes.astype(np.int64)
    parts = -(-lengths // slice_bytes)
    row = np.repeat(np.arange(len(spans)), parts)
    begin = (np.arange(len(row)) - (np.cumsum(parts) - parts)[row]) * slice_bytes
    moved = begin.astype(np.uint64)
    return Spans(
        spans.engine_address[row] + moved,
        spans.arena_address[row] + moved,
        np.minimum(lengths[row] - begin, slice_bytes).astype(np.uint64),
        spans.stream_offset[row] + moved,
        spans.object_index[row],
    )
