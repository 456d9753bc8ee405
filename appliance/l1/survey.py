"""An arena directory from outside: what is in it, what a start would make of it, and how to empty it.

For ``pagewarden arena``. Only :func:`clear_arena` changes anything, and never under a running daemon.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from appliance.l1.examine import UNFINISHED_FILES, SegmentFile, check_headers, find_segment_files
from appliance.l1.gates import GateLog, GateName, GateResult
from appliance.l1.namespaces import NAMESPACE_FILES, NamespaceDescriptor, NamespaceFiles
from appliance.l1.opening import LOCK_NAME, fit_gate, lock_directory, walk_gate
from appliance.l1.plan import plan_size
from appliance.l1.recency import RECENCY_FILE
from appliance.l1.segment import Segment
from appliance.l1.walk import Walk, walk_tables
from appliance.protocol.arena_layout import SegmentLayout
from appliance.protocol.liveness import is_locked

_ATTACH_FILES = "attach-*.lock"


@dataclass(frozen=True, slots=True)
class NamespaceFound:
    """One namespace in the arena's files; bytes are those stored, not whole extents."""

    namespace: str
    model: str
    objects: int
    bytes: int


@dataclass(slots=True)
class Survey:
    """What a directory holds. Without ``running`` the gates say what a start would find; it changes nothing.

    ``attachments`` are processes that have the arena mapped and live.
    """

    directory: Path
    running: bool
    attachments: int
    files: Sequence[SegmentFile]
    gates: list[GateResult] = field(default_factory=list)
    warm: bool = False
    reason: str = ""
    namespaces: list[NamespaceFound] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "arena_dir": str(self.directory),
            "running": self.running,
            "attachments": self.attachments,
            "files": [
                {
                    "name": each.path.name,
                    "bytes": each.size_bytes,
                    "memory_bytes": _memory(each.path),
                    "extents": each.shape.extent_count,
                    "extent_bytes": each.shape.extent_bytes,
                    "clean": each.clean,
                }
                for each in self.files
            ],
            "next_start": None if self.running else ("warm" if self.warm else "cold"),
            "reason": self.reason,
            "gates": [gate.to_plain() for gate in self.gates],
            "namespaces": [
                {
                    "namespace": each.namespace,
                    "model": each.model,
                    "objects": each.objects,
                    "bytes": each.bytes,
                }
                for each in self.namespaces
            ],
            "faults": self.faults,
            "unreadable": self.unreadable,
        }


def survey_arena(
    directory: Path, wanted: SegmentLayout, clears: Mapping[bytes, int], spare_bytes: int
) -> Survey:
    """Look at a directory as :func:`open_arena` would, without touching it.

    Raises:
        OSError: if it cannot be read.
    """
    running = is_locked(directory / LOCK_NAME)
    attachments = sum(is_locked(path) for path in directory.glob(_ATTACH_FILES))
    survey = Survey(directory, running, attachments, find_segment_files(directory))
    if running:
        survey.reason = "A daemon uses the directory; its own status says how it began."
        return survey
    gates = GateLog()
    gates.passed(GateName.LOCK, f"No daemon uses {directory}.")
    check_headers(survey.files, clears, gates)
    if gates.open:
        _look_inside(survey, wanted, spare_bytes, gates)
    survey.gates, survey.warm, survey.reason = gates.complete(), gates.warm, gates.reason
    return survey


def _look_inside(survey: Survey, wanted: SegmentLayout, spare_bytes: int, gates: GateLog) -> None:
    segments = [
        Segment.open(each.path, each.segment, each.nonce, each.shape, writable=False) for each in survey.files
    ]
    try:
        descriptors, survey.unreadable = NamespaceFiles(survey.directory).read()
        everything, epochs = segments[0].read_epochs()
        walk = walk_tables(segments, descriptors, epochs, everything)
    finally:
        for segment in segments:
            segment.close()
    survey.faults = dict(walk.left_out + walk.faults)
    survey.namespaces = [_found(walk, each) for each in descriptors.values()]
    walk_gate(survey.files, walk, gates)
    if gates.open:
        counts = [each.shape.extent_count for each in survey.files]
        extent_bytes = survey.files[0].shape.extent_bytes
        object_bytes = walk.object_bytes
        fit_gate(
            plan_size(counts, extent_bytes, wanted, object_bytes=object_bytes, spare_bytes=spare_bytes), gates
        )


def _found(walk: Walk, descriptor: NamespaceDescriptor) -> NamespaceFound:
    objects = size = 0
    for walked in walk.segments:
        records = walked.records[walked.objects.heads]
        mine = records[records["namespace"] == np.void(descriptor.namespace)]
        objects += len(mine)
        size += int(mine["length"].sum())
    return NamespaceFound(descriptor.fingerprint.namespace, descriptor.fingerprint.model, objects, size)


def _memory(path: Path) -> int:
    """Bytes of memory that a file really takes; 0 if it went meanwhile."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def clear_arena(directory: Path) -> tuple[int, int]:
    """Give up every file of an arena that no daemon uses; returns files removed and the bytes of memory they took.

    Processes that still map it keep that memory until they let go; nobody new can attach to it.

    Raises:
        ArenaInUse: a daemon uses it. ArenaUnusable: it cannot be read or written.
    """
    lock = lock_directory(directory)
    try:
        files = find_segment_files(directory)
        memory = sum(_memory(each.path) for each in files)
        for each in files:
            Segment.open(each.path, each.segment, each.nonce, each.shape).poison_and_unlink()
        others = [
            path
            for pattern in (UNFINISHED_FILES, NAMESPACE_FILES, RECENCY_FILE)
            for path in directory.glob(pattern)
        ]
        others += [path for path in directory.glob(_ATTACH_FILES) if not is_locked(path)]
        for path in others:
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)
    return len(files) + len(others), memory
