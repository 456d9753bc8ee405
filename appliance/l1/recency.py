"""How long ago each object was last used, kept over an orderly stop, so that eviction goes on where it was.

One file beside the segments, written last but for the clean flag and removed by the next start. After a crash it is not
there; then an object counts as used when it was stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.l1.index import NamespaceIndex
from appliance.l1.space import address_of

RECENCY_FILE = "recency.bin"
UNKNOWN = np.nan

_HEADER = np.dtype(
    [("magic", "S8"), ("saved_unix", "<f8"), ("rows", "<u8"), ("crc", "<u4"), ("spare", "<u4")]
)
_ROW = np.dtype([("address", "<i8"), ("idle_seconds", "<f4"), ("spare", "<u4")])
_MAGIC = b"PWRECEN1"


def save_recency(
    directory: Path, indexes: Sequence[NamespaceIndex], now_seconds: float, now_unix: float
) -> int:
    """Write the file; ``now_seconds`` is the clock that the indexes' times are of. Returns the objects in it.

    Raises:
        OSError: if the mount is full.
    """
    rows = np.concatenate([_rows_of(index, now_seconds) for index in indexes] or [np.zeros(0, dtype=_ROW)])
    rows = np.sort(rows, order="address")
    body = rows.tobytes()
    header = np.array([(_MAGIC, now_unix, len(rows), zlib.crc32(body), 0)], dtype=_HEADER)
    (directory / RECENCY_FILE).write_bytes(header.tobytes() + body)
    return len(rows)


def _rows_of(index: NamespaceIndex, now_seconds: float) -> NDArray[np.void]:
    addresses = index.addresses_of_rows(0, index.rows_made)
    groups, _ = index.object_columns
    used_at = index.used_at.array[: index.rows_made * index.group_count].reshape(-1, index.group_count)
    idle = np.maximum(0.0, now_seconds - used_at[:, groups])
    stored = addresses >= 0
    rows = np.zeros(int(np.count_nonzero(stored)), dtype=_ROW)
    rows["address"], rows["idle_seconds"] = addresses[stored], idle[stored]
    return rows


@dataclass(frozen=True, slots=True)
class Recency:
    """What a stop knew: rows in the order of their addresses, and how long ago that was."""

    rows: NDArray[np.void]
    saved_ago: float

    def idle_seconds(self, segment: int, heads: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds since each object was last used, ``UNKNOWN`` for those that the stop did not know."""
        addresses = address_of(segment, 0) + heads
        idle = np.full(len(heads), UNKNOWN)
        if len(self.rows):
            at = np.minimum(np.searchsorted(self.rows["address"], addresses), len(self.rows) - 1)
            known = self.rows["address"][at] == addresses
            idle[known] = self.rows["idle_seconds"][at[known]] + self.saved_ago
        return idle


def take_recency(directory: Path, now_unix: float) -> Recency:
    """Read the file and remove it; nothing is known if it is missing or damaged."""
    path = directory / RECENCY_FILE
    nothing = Recency(np.zeros(0, dtype=_ROW), 0.0)
    try:
        raw = path.read_bytes()
        path.unlink()
    except FileNotFoundError:
        return nothing
    if len(raw) < _HEADER.itemsize:
        return nothing
    header = np.frombuffer(raw, dtype=_HEADER, count=1)[0]
    body = raw[_HEADER.itemsize :]
    if (
        bytes(header["magic"]) != _MAGIC
        or len(body) != int(header["rows"]) * _ROW.itemsize
        or zlib.crc32(body) != int(header["crc"])
    ):
        return nothing
    saved_ago = max(0.0, now_unix - float(header["saved_unix"]))
    return Recency(np.frombuffer(body, dtype=_ROW), saved_ago)
