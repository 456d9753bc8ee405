"""The pointer table: spans as rows that a device kernel works through, and what a row means, in numpy.

A table is int64[5, rows], one column of it a row of work. Rows are cut so that each is a bounded amount of work: a
long span becomes several rows, which any number of programs may take in any order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from kernels.checksum import raw_sum
from kernels.reference import memory_view
from kernels.spans import WORD_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kernels.spans import Direction, Spans

ROW_BYTES = 1 << 15
"""Longest row: long enough that a row's fixed cost is small, short enough to spread one page over several programs."""


class Column(IntEnum):
    """The columns, in the order of the table's first dimension."""

    SOURCE = 0
    """Address of the first byte to read, as the device sees it."""
    DESTINATION = 1
    """Address of the first byte to write, as the device sees it."""
    LENGTH = 2
    """Bytes, at least 1."""
    WORD = 3
    """Index of the first word in its object's stream."""
    OBJECT = 4
    """Index of the object whose sum the row adds to."""


def pointer_table(spans: Spans, direction: Direction, *, row_bytes: int = ROW_BYTES) -> NDArray[np.int64]:
    """Return the table of these spans, int64[5, rows], C-contiguous.

    Addresses are taken as they stand in `spans`: they must be those that the device uses. `row_bytes` is a multiple
    of 16, so that a row is as well aligned as its span.
    """
    assert row_bytes > 0, "rows of no bytes would never end"
    assert row_bytes % 16 == 0, "a row would begin where no 128-bit access may"
    sources, destinations = spans.ends(direction)
    lengths = spans.length_bytes.astype(np.int64)
    rows_of_span = -(-lengths // row_bytes)
    span = np.repeat(np.arange(len(spans)), rows_of_span)
    first_row = np.cumsum(rows_of_span) - rows_of_span
    start = (np.arange(len(span)) - first_row[span]) * row_bytes
    table = np.empty((len(Column), len(span)), dtype=np.int64)
    table[Column.SOURCE] = sources.view(np.int64)[span] + start
    table[Column.DESTINATION] = destinations.view(np.int64)[span] + start
    table[Column.LENGTH] = np.minimum(lengths[span] - start, row_bytes)
    table[Column.WORD] = (spans.stream_offset.view(np.int64)[span] + start) // WORD_BYTES
    table[Column.OBJECT] = spans.object_index[span]
    return table


def run_table(table: NDArray[np.int64], sums: NDArray[np.int64]) -> None:
    """Do what a kernel does with a table, on this host's memory: copy each row and add its raw sum.

    `sums` is int64[objects], of which the bits are those of unsigned sums. What device kernels are tested against.
    """
    unsigned = sums.view(np.uint64)
    for source, destination, length, word, owner in table.T.tolist():
        piece = memory_view(source, length).copy()
        memory_view(destination, length)[:] = piece
        unsigned[owner : owner + 1] += np.uint64(raw_sum(piece, word * WORD_BYTES))
