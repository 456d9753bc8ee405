"""The gates that headers decide: which files an arena directory holds, and whether they are one arena of ours.

Reads only, so that ``pagewarden arena status`` can ask the same questions of a directory that another process uses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from appliance.l1.gates import GateLog, GateName
from appliance.l1.segment import read_epoch_table
from appliance.protocol import arena_layout as layout

SEGMENT_FILES = "segment-*.arena"
UNFINISHED_FILES = "unfinished-*.arena"

ALL_NAMESPACES = b""
"""Stands for a clear of every namespace in a map of clear epochs."""


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A file that may be a segment: its size, and its first bytes read as a header (zero beyond the file's end)."""

    path: Path
    size_bytes: int
    header: np.void

    @property
    def segment(self) -> int:
        """The number that its header gives it."""
        return int(self.header["segment"])

    @property
    def nonce(self) -> bytes:
        """The arena that its header says it belongs to."""
        nonce: bytes = self.header["nonce"].tobytes()
        return nonce

    @property
    def shape(self) -> layout.SegmentLayout:
        """The shape that its header gives it."""
        return layout.SegmentLayout(int(self.header["extent_count"]), int(self.header["extent_bytes"]))

    @property
    def clean(self) -> bool:
        """Whether an orderly stop was the last to write it."""
        return int(self.header["clean"]) == 1


def find_segment_files(directory: Path) -> list[SegmentFile]:
    """The segment files of a directory, by name."""
    return [_read(path) for path in sorted(directory.glob(SEGMENT_FILES))]


def _read(path: Path) -> SegmentFile:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        raw = os.pread(descriptor, layout.HEADER_BYTES, 0).ljust(layout.HEADER_BYTES, b"\0")
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    return SegmentFile(path, size, np.frombuffer(raw, dtype=layout.HEADER)[0])


def check_headers(files: Sequence[SegmentFile], clears: Mapping[bytes, int], gates: GateLog) -> None:
    """Pass the gates from SIZE to EPOCHS, as far as they open.

    ``clears`` are the newest acknowledged clears of the catalog: namespace (or ``ALL_NAMESPACES``) to epoch.
    """
    if not files:
        gates.nothing_there("There was no arena.")
        return
    for check in (_size, _magic, _schema, _layout):
        check(files, gates)
        if not gates.open:
            return
    _epochs(files, clears, gates)


def _size(files: Sequence[SegmentFile], gates: GateLog) -> None:
    for each in files:
        told = int(each.header["file_bytes"])
        if each.size_bytes != told:
            gates.failed(
                GateName.SIZE,
                f"The file {each.path.name} has {each.size_bytes} bytes, but its header says {told}.",
            )
            return
    total = sum(each.size_bytes for each in files)
    gates.passed(
        GateName.SIZE, f"{_files(files)} of {total} bytes, as written.", files=len(files), bytes=total
    )


def _magic(files: Sequence[SegmentFile], gates: GateLog) -> None:
    for each in files:
        found = bytes(each.header["magic"])
        if found == layout.POISONED:
            gates.failed(
                GateName.MAGIC, f"The file {each.path.name} was given up: another arena replaced it."
            )
            return
        if found != layout.MAGIC:
            gates.failed(GateName.MAGIC, f"The file {each.path.name} is no segment of an arena.")
            return
    gates.passed(GateName.MAGIC, "Every file is a segment of an arena.")


def _schema(files: Sequence[SegmentFile], gates: GateLog) -> None:
    for each in files:
        version = int(each.header["layout"])
        if version != layout.LAYOUT_VERSION:
            gates.failed(
                GateName.SCHEMA,
                f"The file {each.path.name} has arena layout version {version}; this daemon reads "
                f"{layout.LAYOUT_VERSION}.",
            )
            return
    gates.passed(GateName.SCHEMA, f"Arena layout version {layout.LAYOUT_VERSION}.")


def _layout(files: Sequence[SegmentFile], gates: GateLog) -> None:
    wrong = _wrong_layout(files)
    if wrong:
        gates.failed(GateName.LAYOUT, wrong)
        return
    extents = sum(each.shape.extent_count for each in files)
    gates.passed(
        GateName.LAYOUT,
        f"{extents} extents of {files[0].shape.extent_bytes} bytes in one arena.",
        extents=extents,
        extent_bytes=files[0].shape.extent_bytes,
    )


def _wrong_layout(files: Sequence[SegmentFile]) -> str:
    """What makes these files no single arena, in a sentence; empty if nothing does."""
    first = files[0]
    for number, each in enumerate(files):
        shape, header = each.shape, each.header
        offsets = {
            "records_offset": shape.records_offset,
            "links_offset": shape.links_offset,
            "data_offset": shape.data_offset,
            "file_bytes": shape.file_bytes,
        }
        for name, expected in offsets.items():
            if int(header[name]) != expected:
                return (
                    f"The file {each.path.name} has {name} {int(header[name])} in its header, where its extents give "
                    f"{expected}."
                )
        if shape.extent_bytes < layout.MIN_EXTENT_BYTES or not shape.extent_count:
            return (
                f"The file {each.path.name} has {shape.extent_count} extents of {shape.extent_bytes} bytes."
            )
        if each.nonce != first.nonce or shape.extent_bytes != first.shape.extent_bytes:
            return f"The files {first.path.name} and {each.path.name} are of two arenas."
        if each.segment != number or each.path.name != layout.segment_name(each.nonce, number):
            return (
                f"The file {each.path.name} calls itself segment {each.segment}, where {number} is expected."
            )
    return ""


def _epochs(files: Sequence[SegmentFile], clears: Mapping[bytes, int], gates: GateLog) -> None:
    descriptor = os.open(files[0].path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        everything, epochs = read_epoch_table(descriptor)
    finally:
        os.close(descriptor)
    for namespace, acknowledged in clears.items():
        written = max(everything, epochs.get(namespace, 0) if namespace else 0)
        if written < acknowledged:
            whose = f"namespace {namespace.hex()}" if namespace else "every namespace"
            gates.failed(
                GateName.EPOCHS,
                f"A clear of {whose} was acknowledged in epoch {acknowledged}, but the arena knows of {written} only.",
            )
            return
    gates.passed(
        GateName.EPOCHS,
        "Every acknowledged clear is in the arena.",
        global_epoch=everything,
        namespaces_cleared=len(epochs),
        clears_compared=len(clears),
    )


def _files(files: Sequence[SegmentFile]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"
