"""The bytes of a segment file: the contract between the daemon and every process that maps the arena.

::

    0            HEADER_BYTES      records_offset             links_offset          data_offset (2 MiB aligned)
    | header     | (epoch table)   | record 0 .. record E-1   | link 0 .. link E-1  | extent 0 .. extent E-1
    <------------------------- tables: mapped read-only --------------------------><-- data: read-write -->

Header, tables and data of a segment are one file, so that a generation can never be separated from its bytes. An object
lies within one segment, in one or more runs of neighbouring extents; its head record is the record of its first extent.
The link of a run's first extent holds the run's length and the first extent of the next run. The commit word of a record is ``generation << 1 | committed``: one aligned 8-byte store both clears and bumps.

All integers are little-endian. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

MAGIC: Final = b"PWARENA1"
POISONED: Final = b"PWPOISON"
LAYOUT_VERSION: Final = 1

HEADER_BYTES: Final = 4096
EPOCH_TABLE_BYTES: Final = 64 * 1024
DATA_ALIGNMENT: Final = 2 * 1024 * 1024
MIN_EXTENT_BYTES: Final = 4096
RECORD_BYTES: Final = 192
LINK_BYTES: Final = 8
NO_LINK: Final = 0xFFFF_FFFF

HEADER = np.dtype(
    {
        "names": [
            "magic",
            "layout",
            "clean",
            "nonce",
            "segment",
            "extent_count",
            "extent_bytes",
            "records_offset",
            "links_offset",
            "data_offset",
            "file_bytes",
            "boot",
            "boot_count",
            "global_clear_epoch",
            "epoch_rows",
        ],
        "formats": [
            "S8",
            "<u4",
            "<u4",
            "V16",
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "V16",
            "<u8",
            "<u4",
            "<u4",
        ],
        "offsets": [0, 8, 12, 16, 32, 36, 40, 48, 56, 64, 72, 80, 96, 104, 108],
        "itemsize": HEADER_BYTES,
    }
)
"""``clean`` is the last thing an orderly stop writes and the first thing a start clears."""

EPOCH_ROW = np.dtype({"names": ["namespace", "clear_epoch"], "formats": ["V16", "<u4"], "itemsize": 32})
"""One row a cleared namespace, behind the header of segment 0: records below its epoch are gone for good."""

MAX_EPOCH_ROWS: Final = EPOCH_TABLE_BYTES // EPOCH_ROW.itemsize

RECORD = np.dtype(
    {
        "names": [
            "commit_word",
            "key",
            "parent",
            "namespace",
            "salt",
            "length",
            "checksum",
            "attach_id",
            "stored_unix_ms",
            "clear_epoch",
            "extent_count",
            "chunk_index",
            "group",
            "shard",
            "state",
            "crc",
        ],
        "formats": [
            "<u8",
            "V32",
            "V32",
            "V16",
            "V16",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u4",
            "<u4",
            "<u4",
            "<u2",
            "<u2",
            "<u1",
            "<u4",
        ],
        "offsets": [0, 8, 40, 72, 88, 104, 112, 120, 128, 136, 140, 144, 148, 150, 152, 160],
        "itemsize": RECORD_BYTES,
    }
)
"""The head record of an object. ``crc`` is the CRC-32 of bytes 8 to 160, so that a torn record is seen at a restart."""

LINK = np.dtype([("count", "<u4"), ("next", "<u4")])
"""Written for the first extent of a run only: extents in the run, first extent of the next run or ``NO_LINK``."""

CRC_BEGIN: Final = 8
CRC_END: Final = 160

STATE_OFFSET: Final = 152

STATE_FREE: Final = 0
STATE_WRITING: Final = 1
STATE_COMMITTED: Final = 2
STATE_DOOMED: Final = 3
"""Removed while a lease reads it: still committed for that reader, gone for everybody else and for the next start."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where everything lies in a segment file of ``extent_count`` extents of ``extent_bytes`` each."""

    extent_count: int
    extent_bytes: int

    @property
    def records_offset(self) -> int:
        """Offset of the head records."""
        return HEADER_BYTES + EPOCH_TABLE_BYTES

    @property
    def links_offset(self) -> int:
        """Offset of the link table."""
        return self.records_offset + self.extent_count * RECORD_BYTES

    @property
    def data_offset(self) -> int:
        """Offset of extent 0."""
        end = self.links_offset + self.extent_count * LINK_BYTES
        return -(-end // DATA_ALIGNMENT) * DATA_ALIGNMENT

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.extent_count * self.extent_bytes

    def record_offset(self, extent: int) -> int:
        """Offset of the record of ``extent``; its first 8 bytes are the commit word."""
        return self.records_offset + extent * RECORD_BYTES

    def extent_offset(self, extent: int) -> int:
        """Offset of the bytes of ``extent``."""
        return self.data_offset + extent * self.extent_bytes


def word_of(generation: int, *, committed: bool) -> int:
    """The commit word of a generation."""
    return generation << 1 | int(committed)


def lock_name(attach_id: int) -> str:
    """The file, beside the segments, whose POSIX record lock proves that the attached process lives."""
    return f"attach-{attach_id:016x}.lock"


def segment_name(nonce: bytes, segment: int) -> str:
    """The file of a segment: the nonce keeps a replaced arena's files apart from the new one's."""
    return f"segment-{nonce.hex()}-{segment:04d}.arena"


def unfinished_name(nonce: bytes, segment: int) -> str:
    """The file of a segment while it is being made or filled; a start removes what a crash left of one."""
    return f"unfinished-{nonce.hex()}-{segment:04d}.arena"
