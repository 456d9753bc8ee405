"""One segment file: header, tables and data, written with ``pwrite`` only.

The daemon never maps a segment: a file truncated under it gives an error it can handle, where a mapping would kill it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.errors import ArenaUnusable
from appliance.l1.extents import Run
from appliance.protocol import arena_layout as layout

_RECORD = struct.Struct("<Q32s32s16s16sQQQQIIIHHB7xI28x")
_WORD = struct.Struct("<Q")
_LINK = struct.Struct("<II")
assert _RECORD.size == layout.RECORD_BYTES, "records would overlap their neighbours"


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """What the table says of one object; see ``arena_layout.RECORD``."""

    key: bytes
    parent: bytes
    namespace: bytes
    salt: bytes
    length: int
    checksum: int
    attach_id: int
    stored_unix_ms: int
    clear_epoch: int
    extent_count: int
    chunk_index: int
    group: int
    shard: int
    state: int

    def pack(self, word: int) -> bytes:
        """The record's bytes with its CRC."""
        body = bytearray(
            _RECORD.pack(
                word,
                self.key,
                self.parent,
                self.namespace,
                self.salt,
                self.length,
                self.checksum,
                self.attach_id,
                self.stored_unix_ms,
                self.clear_epoch,
                self.extent_count,
                self.chunk_index,
                self.group,
                self.shard,
                self.state,
                0,
            )
        )
        crc = zlib.crc32(memoryview(body)[layout.CRC_BEGIN : layout.CRC_END])
        struct.pack_into("<I", body, layout.CRC_END, crc)
        return bytes(body)


def read_epoch_table(descriptor: int) -> tuple[int, dict[bytes, int]]:
    """The global clear epoch and those of single namespaces, from an open file of segment 0."""
    raw = os.pread(descriptor, layout.HEADER_BYTES + layout.EPOCH_TABLE_BYTES, 0)
    header = np.frombuffer(raw, dtype=layout.HEADER, count=1)[0]
    count = min(int(header["epoch_rows"]), layout.MAX_EPOCH_ROWS)
    rows = np.frombuffer(raw, dtype=layout.EPOCH_ROW, count=count, offset=layout.HEADER_BYTES)
    return int(header["global_clear_epoch"]), {
        row["namespace"].tobytes(): int(row["clear_epoch"]) for row in rows
    }


class Segment:
    """An open segment file."""

    def __init__(
        self, path: Path, descriptor: int, index: int, nonce: bytes, shape: layout.SegmentLayout
    ) -> None:
        self.path = path
        self.index = index
        self.nonce = nonce
        self.shape = shape
        self._fd = descriptor

    @classmethod
    def create(
        cls,
        directory: Path,
        index: int,
        nonce: bytes,
        shape: layout.SegmentLayout,
        boot: bytes,
        *,
        finished: bool = True,
    ) -> Segment:
        """A new file with its tables allocated and empty; its data is allocated by :meth:`populate`.

        Until it is ``finished`` its name is one that no start looks for, so that a crash leaves no half of an arena.

        Raises:
            ArenaUnusable: if the mount has no room for the tables.
        """
        path = directory / layout.unfinished_name(nonce, index)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        segment = cls(path, descriptor, index, nonce, shape)
        try:
            os.ftruncate(descriptor, shape.file_bytes)
            os.posix_fallocate(descriptor, 0, shape.data_offset)
        except OSError as error:
            segment.close()
            path.unlink(missing_ok=True)
            raise ArenaUnusable(
                f"The arena's tables cannot be allocated in {directory}: {error.strerror}."
            ) from error
        segment._write_header(boot, boot_count=1)
        if finished:
            segment.finish()
        return segment

    def finish(self) -> None:
        """Give the file its name: from now on a start finds it."""
        self.path = self.path.rename(self.path.with_name(layout.segment_name(self.nonce, self.index)))

    @classmethod
    def open(
        cls, path: Path, index: int, nonce: bytes, shape: layout.SegmentLayout, *, writable: bool = True
    ) -> Segment:
        """An existing file whose header was examined before."""
        mode = os.O_RDWR if writable else os.O_RDONLY
        return cls(path, os.open(path, mode | os.O_CLOEXEC), index, nonce, shape)

    def _write_header(self, boot: bytes, *, boot_count: int) -> None:
        header = np.zeros(1, dtype=layout.HEADER)
        header["magic"] = layout.MAGIC
        header["layout"] = layout.LAYOUT_VERSION
        header["nonce"] = np.void(self.nonce)
        header["segment"] = self.index
        header["extent_count"] = self.shape.extent_count
        header["extent_bytes"] = self.shape.extent_bytes
        header["records_offset"] = self.shape.records_offset
        header["links_offset"] = self.shape.links_offset
        header["data_offset"] = self.shape.data_offset
        header["file_bytes"] = self.shape.file_bytes
        header["boot"] = np.void(boot)
        header["boot_count"] = boot_count
        self._write(header.tobytes(), 0)

    def begin_boot(self, boot: bytes) -> None:
        """Mark the segment as in use by this boot: the clean flag goes first."""
        self._write_field("clean", 0)
        count = int(self.header()["boot_count"]) + 1
        self._write(boot, self._field_offset("boot"))
        self._write_field("boot_count", count)

    def mark_clean(self) -> None:
        """The last thing an orderly stop writes."""
        self._write_field("clean", 1)

    def header(self) -> np.void:
        """The header as it stands in the file."""
        record: np.void = np.frombuffer(self._read(layout.HEADER_BYTES, 0), dtype=layout.HEADER)[0]
        return record

    def _field_offset(self, name: str) -> int:
        fields = layout.HEADER.fields
        assert fields is not None, "the header would have no layout"
        return int(fields[name][1])

    def _write_field(self, name: str, value: int) -> None:
        self._write(np.array(value, dtype=layout.HEADER[name]).tobytes(), self._field_offset(name))

    # --- clear epochs (segment 0) -------------------------------------------------------------------------

    def read_epochs(self) -> tuple[int, dict[bytes, int]]:
        """The global clear epoch and those of single namespaces."""
        return read_epoch_table(self._fd)

    def write_epochs(self, global_epoch: int, epochs: dict[bytes, int]) -> None:
        """Set the clear epochs: the global one first, which stands in for rows that go; the row count last."""
        assert len(epochs) <= layout.MAX_EPOCH_ROWS, "the epoch table would run into the head records"
        rows = np.zeros(len(epochs), dtype=layout.EPOCH_ROW)
        for position, (namespace, epoch) in enumerate(epochs.items()):
            rows[position] = (np.void(namespace), epoch)
        self._write_field("global_clear_epoch", global_epoch)
        self._write(rows.tobytes(), layout.HEADER_BYTES)
        self._write_field("epoch_rows", len(epochs))

    # --- records and links ----------------------------------------------------------------------------------

    def write_writing(self, extent: int, generation: int, record: HeadRecord, runs: list[Run]) -> None:
        """Enter a reservation: links first, then the record in state WRITING with an uncommitted word."""
        for position, (first, count) in enumerate(runs):
            following = runs[position + 1][0] if position + 1 < len(runs) else layout.NO_LINK
            self._write(_LINK.pack(count, following), self.shape.links_offset + first * layout.LINK_BYTES)
        word = layout.word_of(generation, committed=False)
        self._write(record.pack(word), self.shape.record_offset(extent))

    def write_committed(self, extent: int, generation: int, record: HeadRecord) -> int:
        """Make an object findable: everything but the word, then the word. Returns the word."""
        offset = self.shape.record_offset(extent)
        word = layout.word_of(generation, committed=True)
        self._write(record.pack(word)[_WORD.size :], offset + _WORD.size)
        self._write(_WORD.pack(word), offset)
        return word

    def write_doomed(self, extent: int) -> None:
        """Mark an object as removed. Its word stays, for the reader that holds it; so its CRC fits no more."""
        self._write(bytes((layout.STATE_DOOMED,)), self.shape.record_offset(extent) + layout.STATE_OFFSET)

    def write_freed(self, extent: int, generation: int, *, was_writing: bool) -> None:
        """End an object: one store clears the committed bit and sets the new generation."""
        offset = self.shape.record_offset(extent)
        if was_writing:
            self._write(bytes((layout.STATE_FREE,)), offset + layout.STATE_OFFSET)
        self._write(_WORD.pack(layout.word_of(generation, committed=False)), offset)

    def read_records(self, first: int = 0, count: int | None = None) -> NDArray[np.void]:
        """The record table: ``count`` records from ``first`` on, all of them by default."""
        count = self.shape.extent_count - first if count is None else count
        raw = self._read(count * layout.RECORD_BYTES, self.shape.record_offset(first))
        return np.frombuffer(raw, dtype=layout.RECORD)

    def read_record(self, extent: int) -> bytes:
        """The bytes of one record."""
        return self._read(layout.RECORD_BYTES, self.shape.record_offset(extent))

    def read_links(self) -> NDArray[np.void]:
        """The whole link table."""
        raw = self._read(self.shape.extent_count * layout.LINK_BYTES, self.shape.links_offset)
        return np.frombuffer(raw, dtype=layout.LINK)

    def write_words(self, records: NDArray[np.void]) -> None:
        """Write the record table back as a whole: only a start does this, before anybody was answered."""
        self._write(records.tobytes(), self.shape.records_offset)

    # --- the file ---------------------------------------------------------------------------------------------

    def populate(self, first_extent: int, count: int) -> None:
        """Allocate the memory of extents, so that a later write cannot fail.

        Raises:
            OSError: ENOSPC if the mount is full.
        """
        os.posix_fallocate(self._fd, self.shape.extent_offset(first_extent), count * self.shape.extent_bytes)

    def read_bytes(self, extent: int, length: int, offset: int = 0) -> bytes:
        """Bytes of one extent on."""
        return self._read(length, self.shape.extent_offset(extent) + offset)

    def write_data(self, runs: Sequence[Run], offset: int, data: memoryview) -> None:
        """Bytes of an object's stream, from ``offset`` on. From any thread."""
        done = 0
        for position, length in self._pieces(runs, offset, len(data)):
            self._write(data[done : done + length], position)
            done += length

    def read_data(self, runs: Sequence[Run], offset: int, length: int) -> bytearray:
        """Bytes of an object's stream, from ``offset`` on. From any thread."""
        data = bytearray(length)
        view = memoryview(data)
        for position, piece in self._pieces(runs, offset, length):
            done = 0
            while done < piece:
                got = os.preadv(self._fd, [view[done:piece]], position + done)
                if not got:
                    raise ArenaUnusable(f"The segment {self.path.name} ends before byte {position + piece}.")
                done += got
            view = view[piece:]
        return data

    def read_word(self, extent: int) -> int:
        """The commit word of the object that begins at ``extent``, as it stands in the file. From any thread."""
        word: int = _WORD.unpack(self._read(_WORD.size, self.shape.record_offset(extent)))[0]
        return word

    def _pieces(self, runs: Sequence[Run], offset: int, length: int) -> Iterator[tuple[int, int]]:
        """Where a piece of a stream lies: offsets and lengths in the file."""
        for first, count in runs:
            size = count * self.shape.extent_bytes
            if offset < size and length > 0:
                piece = min(size - offset, length)
                yield self.shape.extent_offset(first) + offset, piece
                length -= piece
                offset += piece
            offset -= size
        assert length <= 0, "bytes beyond an object's extents would be somebody else's"

    def poison_and_unlink(self) -> None:
        """Make the file unusable for a new reader, and let its memory go with the last mapping."""
        self._write(layout.POISONED, 0)
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the descriptor; mappings of other processes are untouched."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, length: int, offset: int) -> bytes:
        pieces = []
        while length > 0:
            piece = os.pread(self._fd, min(length, 1 << 30), offset)
            if not piece:
                raise ArenaUnusable(f"The segment {self.path.name} ends before byte {offset + length}.")
            pieces.append(piece)
            length -= len(piece)
            offset += len(piece)
        return b"".join(pieces)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view = view[written:]
            offset += written
