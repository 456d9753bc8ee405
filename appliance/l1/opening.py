"""Starting on an arena directory: take it over, fence what an earlier boot left, or begin anew.

Old files of the same shape are reused in place: every used generation is bumped, so that a reader of the earlier boot
finds out, and what was being written goes to limbo under its writer, never to free. Files of another shape are
poisoned and unlinked; their memory goes when the last process that maps them lets go.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.errors import ArenaInUse, ArenaUnusable
from appliance.l1.arena import Arena
from appliance.l1.extents import Run
from appliance.l1.segment import Segment
from appliance.protocol import arena_layout as layout
from appliance.protocol.liveness import is_alive, take_lock
from appliance.protocol.wire import ID_BYTES

_LOCK_NAME = "daemon.lock"


@dataclass(slots=True)
class Opened:
    """An arena ready for its first boot message, and what was found on the way.

    ``held_extents`` are, per segment, extents that writers of an earlier boot may still write.
    """

    arena: Arena
    lock_descriptor: int
    reused: bool
    reason: str
    former_objects: int = 0
    limbo_objects: int = 0
    held_extents: list[set[int]] = field(default_factory=list)


def open_arena(directory: Path, *, size_bytes: int, extent_bytes: int, boot: bytes) -> Opened:
    """Lock ``directory`` and make an empty arena of ``size_bytes`` in it.

    Raises:
        ArenaInUse: another daemon holds it. ArenaUnusable: it cannot be created or written.
    """
    lock = _lock_directory(directory)
    extent_count = max(1, size_bytes // extent_bytes)
    shape = layout.SegmentLayout(extent_count, extent_bytes)
    found = _existing_segments(directory)
    if len(found) == 1 and found[0].shape == shape and found[0].index == 0:
        return _reuse(directory, found[0], lock, boot)
    for segment in found:
        segment.poison_and_unlink()
    arena = Arena(directory, secrets.token_bytes(ID_BYTES), extent_bytes)
    arena.create_segment(extent_count, boot)
    reason = "the arena's size or layout changed" if found else "there was no arena"
    return Opened(arena, lock, reused=False, reason=reason, held_extents=[set()])


def _lock_directory(directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = directory.stat()
        lock = take_lock(directory / _LOCK_NAME)
    except OSError as error:
        raise ArenaUnusable(
            f"The arena directory {directory} cannot be used: {error.strerror}.",
            remedy="Choose a writable directory on a shared-memory mount with --arena-dir.",
        ) from error
    if mode.st_uid == os.geteuid() and mode.st_mode & stat.S_IWOTH:
        os.close(lock) if lock is not None else None
        raise ArenaUnusable(
            f"The arena directory {directory} can be written by everybody.",
            remedy=f"Run `chmod o-w {directory}`: whoever can write there can change cached bytes.",
        )
    if lock is None:
        raise ArenaInUse(
            f"Another daemon uses the arena directory {directory}.",
            remedy="Stop it, or give this one a directory of its own with --arena-dir.",
        )
    return lock


def _existing_segments(directory: Path) -> list[Segment]:
    segments = []
    for path in sorted(directory.glob("segment-*.arena")):
        segment = Segment.open(path)
        if segment is None:
            path.unlink(missing_ok=True)
        else:
            segments.append(segment)
    return segments


def _reuse(directory: Path, segment: Segment, lock: int, boot: bytes) -> Opened:
    """A cold start on files of the same shape."""
    segment.begin_boot(boot)
    records = segment.read_records().copy()
    links = segment.read_links()
    arena = Arena(directory, segment.nonce, segment.shape.extent_bytes)
    space = arena.add_segment(segment)
    words = records["commit_word"]
    former_objects = int(np.count_nonzero((words & 1) == 1))
    writing = np.flatnonzero(records["state"] == layout.STATE_WRITING)
    # One bump for every record: cheaper than finding those in use, and no reader of the earlier boot can be missed.
    records["commit_word"] = ((words >> np.uint64(1)) + np.uint64(1)) << np.uint64(1)
    still_written = [int(head) for head in writing if is_alive(directory, int(records["attach_id"][head]))]
    keep = np.zeros(len(records), dtype=np.bool_)
    keep[still_written] = True
    records["state"][~keep] = layout.STATE_FREE
    segment.write_words(records)
    generations = np.frombuffer(space.generations, dtype=np.uint64)
    generations[:] = records["commit_word"] >> np.uint64(1)
    held: set[int] = set()
    for head in still_written:
        runs = _runs_of(links, head, int(records["extent_count"][head]))
        space.adopt_limbo(head, runs, int(generations[head]))
        arena.limbo_by_attach.setdefault(int(records["attach_id"][head]), set()).add(head)
        held.update(extent for first, count in runs for extent in range(first, first + count))
    return Opened(
        arena,
        lock,
        reused=True,
        reason="the arena of an earlier boot was taken over empty",
        former_objects=former_objects,
        limbo_objects=len(still_written),
        held_extents=[held],
    )


def _runs_of(links: NDArray[np.void], head: int, extent_count: int) -> list[Run]:
    """The runs of a record of the file; a chain that does not add up is cut to what it surely covers."""
    runs: list[Run] = []
    first, left = head, extent_count
    while left > 0 and first < len(links):
        count = min(int(links["count"][first]), left, len(links) - first)
        if count < 1:
            break
        runs.append((first, count))
        left -= count
        first = int(links["next"][first])
    return runs or [(head, 1)]
