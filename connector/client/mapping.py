"""The arena as this process maps it: tables read-only, data read-write."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from appliance.errors import ArenaUnreachable
from appliance.protocol import arena_layout as layout
from appliance.protocol.messages import SegmentInfo


@dataclass(frozen=True, slots=True)
class MappedSegment:
    """One segment's addresses in this process; the mappings live as long as this object."""

    segment: int
    nonce: bytes
    extent_bytes: int
    extent_count: int
    data_address: int
    _tables_address: int
    _shape: layout.SegmentLayout
    _tables: mmap.mmap
    _data: mmap.mmap
    _path: Path
    _file: tuple[int, int]

    @property
    def data_bytes(self) -> int:
        """Length of the data, whether it has memory yet or not."""
        return len(self._data)

    def populated_bytes(self) -> int:
        """How much of the data, from its beginning, the daemon has given memory; -1 if the file is gone from its place.

        The daemon allocates the tables first and then the data in order, so the file's blocks say it.
        """
        try:
            status = self._path.stat()
        except OSError:
            return -1
        if (status.st_dev, status.st_ino) != self._file:
            return -1
        return max(0, min(self.data_bytes, status.st_blocks * 512 - self._shape.data_offset))

    def word_address(self, extent: int) -> int:
        """Where the commit word of the object that begins at ``extent`` lies."""
        return self._tables_address + self._shape.record_offset(extent)


def map_segment(info: SegmentInfo, arena_dir: str | None) -> MappedSegment:
    """Map one segment.

    Raises:
        ArenaUnreachable: if the file is not there, is another arena's, or cannot be mapped.
    """
    path = Path(info.path) if arena_dir is None else Path(arena_dir) / Path(info.path).name
    shape = layout.SegmentLayout(info.extent_count, info.extent_bytes)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaUnreachable(
            f"The arena segment {path} cannot be opened: {error.strerror}.",
            remedy="Mount the daemon's --arena-dir here, or name its place with pagewarden.arena_dir.",
        ) from error
    try:
        header = np.frombuffer(os.pread(descriptor, layout.HEADER_BYTES, 0), dtype=layout.HEADER)[0]
        if bytes(header["magic"]) != layout.MAGIC or header["nonce"].tobytes() != info.nonce:
            raise ArenaUnreachable(f"The file {path} is not the segment that the daemon means.")
        status = os.fstat(descriptor)
        if status.st_size != shape.file_bytes:
            raise ArenaUnreachable(f"The file {path} is not as large as the daemon says.")
        tables = mmap.mmap(descriptor, shape.data_offset, mmap.MAP_SHARED, mmap.PROT_READ)
        size = shape.file_bytes - shape.data_offset
        data = mmap.mmap(
            descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=shape.data_offset
        )
    except (OSError, IndexError, ValueError) as error:
        raise ArenaUnreachable(f"The arena segment {path} cannot be mapped: {error}.") from error
    finally:
        os.close(descriptor)
    return MappedSegment(
        segment=info.segment,
        nonce=info.nonce,
        extent_bytes=info.extent_bytes,
        extent_count=info.extent_count,
        data_address=_address(data),
        _tables_address=_address(tables),
        _shape=shape,
        _tables=tables,
        _data=data,
        _path=path,
        _file=(status.st_dev, status.st_ino),
    )


def _address(mapped: mmap.mmap) -> int:
    view = np.frombuffer(mapped, dtype=np.uint8)
    return int(view.__array_interface__["data"][0])


class SegmentWatcher(Protocol):
    """Who must know what is mapped, because a device may reach into it. All methods return at once but ``close``."""

    def mapped(self, segment: MappedSegment) -> None:
        """A segment was mapped."""

    def retired(self, segment: MappedSegment) -> None:
        """No copy of this segment will begin any more. It stays mapped as long as the watcher holds it."""

    def close(self) -> None:
        """Nothing is used any more: let go of everything, bounded."""


class ArenaMapping:
    """All segments of the arena of one boot; replaced as a whole when the daemon comes back with another arena."""

    def __init__(self, arena_dir: str | None, watcher: SegmentWatcher | None = None) -> None:
        self._arena_dir = arena_dir
        self._watcher = watcher
        self._segments: dict[int, MappedSegment] = {}

    @property
    def known(self) -> int:
        """Number of segments mapped."""
        return len(self._segments)

    def attached(self, infos: list[SegmentInfo]) -> None:
        """Map the segments of the daemon attached to, all of them: what an earlier boot had besides is forgotten.

        Raises:
            ArenaUnreachable: see :func:`map_segment`.
        """
        present = {info.segment for info in infos}
        for number, mine in list(self._segments.items()):
            # A number may come back with another file behind it, so its place says what is current.
            if number not in present or mine.populated_bytes() < 0:
                self._retire(self._segments.pop(number))
        self.update(infos)

    def _retire(self, segment: MappedSegment) -> None:
        if self._watcher is not None:
            self._watcher.retired(segment)

    def update(self, infos: list[SegmentInfo]) -> None:
        """Map what is new; a segment that was replaced is mapped again.

        Raises:
            ArenaUnreachable: see :func:`map_segment`.
        """
        for info in infos:
            mine = self._segments.get(info.segment)
            if mine is None or mine.nonce != info.nonce:
                fresh = self._segments[info.segment] = map_segment(info, self._arena_dir)
                if mine is not None:
                    self._retire(mine)
                if self._watcher is not None:
                    self._watcher.mapped(fresh)

    def close(self) -> None:
        """Forget all segments: no copy runs any more."""
        self._segments.clear()
        if self._watcher is not None:
            self._watcher.close()

    def segment(self, number: int) -> MappedSegment:
        """A mapped segment.

        Raises:
            ArenaUnreachable: if the daemon named one that was never announced.
        """
        found = self._segments.get(number)
        if found is None:
            raise ArenaUnreachable(f"Segment {number} is not mapped yet; the next heartbeat brings it.")
        return found
