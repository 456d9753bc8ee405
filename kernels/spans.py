"""Spans: the list of byte ranges that one copy call moves between engine memory and the arena."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

WORD_BYTES = 8
"""The checksum works on words of this many bytes, so a span starts at a multiple of it in its stream."""

_COLUMNS: dict[str, type[np.generic]] = {
    "engine_address": np.uint64,
    "arena_address": np.uint64,
    "length_bytes": np.uint64,
    "stream_offset": np.uint64,
    "object_index": np.int32,
}


class Direction(Enum):
    """Which way bytes travel."""

    STORE = "store"
    """From engine memory into the arena."""
    LOAD = "load"
    """From the arena into engine memory."""


def read_only_column(values: ArrayLike, dtype: type[np.generic], name: str) -> NDArray[np.generic]:
    """Return `values` as a contiguous read-only vector of `dtype`.

    Raises ValueError when it is not one-dimensional or a value does not fit (negative, fractional, too large).
    """
    # Python integers stay themselves until checked: numpy would make floats of a mix of large and small ones.
    given = values if isinstance(values, np.ndarray) else np.array(values, dtype=object)
    if given.ndim != 1:
        raise ValueError(f"{name} must be a vector, got an array of shape {given.shape}")
    if given.size and given.dtype != dtype:
        limits = np.iinfo(np.dtype(dtype).name)
        whole = given.dtype.kind in "iu" or all(isinstance(value, int | np.integer) for value in given)
        if not whole or int(given.min()) < limits.min or int(given.max()) > limits.max:
            raise ValueError(f"{name} holds a value that {np.dtype(dtype).name} cannot hold")
    column: NDArray[np.generic] = np.ascontiguousarray(given, dtype=dtype)
    # A view, so that the caller's own array stays writable.
    column = column.view()
    column.flags.writeable = False
    return column


@dataclass(frozen=True, eq=False)
class Spans:
    """Equal-length columns, one row per contiguous copy.

    `engine_address`, `arena_address`: uint64 addresses in this process. `length_bytes`: uint64, at least 1.
    `stream_offset`: uint64, position in bytes of the row in its object's stream, a multiple of 8 because the
    checksum is mixed with the word's position. `object_index`: int32, the object of the batch that the row
    belongs to, at least 0. Columns are stored as read-only views.

    Raises ValueError when columns differ in length or break a rule above.
    """

    engine_address: NDArray[np.uint64]
    arena_address: NDArray[np.uint64]
    length_bytes: NDArray[np.uint64]
    stream_offset: NDArray[np.uint64]
    object_index: NDArray[np.int32]

    def __post_init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            object.__setattr__(self, name, read_only_column(getattr(self, name), dtype, name))
        rows = {name: len(getattr(self, name)) for name in _COLUMNS}
        if len(set(rows.values())) != 1:
            raise ValueError(f"span columns differ in length: {rows}")
        if not len(self):
            return
        if not self.length_bytes.all():
            raise ValueError("a span of zero bytes")
        if (self.stream_offset & np.uint64(WORD_BYTES - 1)).any():
            raise ValueError(
                f"a span starts inside a checksum word: stream_offset must be a multiple of {WORD_BYTES}"
            )
        if int(self.object_index.min()) < 0:
            raise ValueError("a negative object_index")
        for name in ("engine_address", "arena_address"):
            start = getattr(self, name)
            if not start.all():
                raise ValueError(f"a null {name}")
            if (start + self.length_bytes < start).any():
                raise ValueError(f"{name} + length_bytes passes the end of the address space")

    def __len__(self) -> int:
        return len(self.length_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that one copy of these spans moves."""
        return int(self.length_bytes.sum(dtype=np.uint64))

    @property
    def object_count(self) -> int:
        """One more than the largest object index; 0 without rows."""
        return int(self.object_index.max()) + 1 if len(self) else 0

    @classmethod
    def empty(cls) -> Spans:
        """Return a list of no spans."""
        return cls(*(np.empty(0, dtype=dtype) for dtype in _COLUMNS.values()))

    @classmethod
    def concatenate(cls, parts: Sequence[Spans]) -> Spans:
        """Return the rows of all parts in order; object indices are kept as they are."""
        if not parts:
            return cls.empty()
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS))

    def rows(self, start: int, stop: int) -> Spans:
        """Return rows `start` to `stop`, for copying a batch in pieces or on several threads."""
        return Spans(*(getattr(self, name)[start:stop] for name in _COLUMNS))

    def ends(self, direction: Direction) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return (source addresses, destination addresses) for a direction."""
        if direction is Direction.STORE:
            return self.engine_address, self.arena_address
        return self.arena_address, self.engine_address
