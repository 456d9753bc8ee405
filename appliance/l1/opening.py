"""Starting on an arena directory: through the gates, and warm or cold behind them.

Warm: the segments go on as they are. What is provably committed is taken back, what an earlier boot's writers may still
write goes to limbo under them, and everything else is free with a new generation. Cold: where the files' tables can be
trusted they are reused in place, with every generation raised; else new files replace them, and the old ones' memory
goes with the last process that maps them.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from appliance.errors import ArenaInUse, ArenaUnusable
from appliance.l1.arena import Arena
from appliance.l1.examine import UNFINISHED_FILES, SegmentFile, check_headers, find_segment_files
from appliance.l1.gates import GateLog, GateName, GateResult
from appliance.l1.moving import move_objects
from appliance.l1.namespaces import NamespaceDescriptor, NamespaceFiles
from appliance.l1.plan import SizeChange, SizePlan, plan_size
from appliance.l1.recency import Recency, take_recency
from appliance.l1.segment import Segment
from appliance.l1.taking import Taken, objects_of, take_empty, take_over
from appliance.l1.walk import Walk, WalkedSegment, walk_tables
from appliance.protocol import arena_layout as layout
from appliance.protocol.liveness import take_lock
from appliance.protocol.wire import ID_BYTES

LOCK_NAME = "daemon.lock"
NO_CLEARS: Mapping[bytes, int] = MappingProxyType({})


@dataclass(slots=True)
class Opened:
    """An arena ready for its first boot message, and what the gates found on the way.

    ``taken`` is what a warm start brings back, to be entered into the index; ``left_behind`` counts the objects that it
    does not bring back, by cause. ``limbo_objects`` are allocations that an earlier boot's writers may still write.
    """

    arena: Arena
    lock_descriptor: int
    gates: list[GateResult]
    warm: bool
    reason: str
    clean_stop: bool
    namespaces: NamespaceFiles
    descriptors: dict[bytes, NamespaceDescriptor] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    left_behind: dict[str, int] = field(default_factory=dict)
    limbo_objects: int = 0

    @property
    def object_count(self) -> int:
        """Objects taken back."""
        return sum(len(each.heads) for each in self.taken)


def open_arena(
    directory: Path,
    *,
    size_bytes: int,
    extent_bytes: int,
    boot: bytes,
    clears: Mapping[bytes, int] = NO_CLEARS,
    spare_bytes: int = 0,
) -> Opened:
    """Lock ``directory`` and make an arena of ``size_bytes`` in it, with what is there if every gate opens.

    ``clears`` are the acknowledged clears that the catalog knows, see :func:`check_headers`. ``spare_bytes`` is the memory
    that objects may be copied to while the files that they come from are still there.

    Raises:
        ArenaInUse: another daemon holds it. ArenaUnusable: it cannot be created or written.
    """
    lock = lock_directory(directory)
    gates = GateLog()
    gates.passed(GateName.LOCK, f"No other daemon uses {directory}.")
    for path in directory.glob(UNFINISHED_FILES):
        path.unlink(missing_ok=True)
    wanted = layout.SegmentLayout(max(1, size_bytes // extent_bytes), extent_bytes)
    opening = _Opening(directory, wanted, boot, clears, spare_bytes, lock, gates)
    return opening.run()


def walk_gate(files: Sequence[SegmentFile], walk: Walk, gates: GateLog) -> None:
    """Judge a walk: after an orderly stop everything must add up, after a crash what does not is left out."""
    facts = {
        "objects": walk.object_count,
        "writing": walk.writing_count,
        **walk.left_out,
        **walk.faults,
    }
    faults = sum(walk.faults.values())
    if walk.unfenced:
        gates.failed(GateName.TABLE_WALK, walk.unfenced, **facts)
    elif faults and all(each.clean for each in files):
        gates.failed(
            GateName.TABLE_WALK,
            f"{walk.first_fault} After an orderly stop every record adds up; {faults} do not.",
            **facts,
        )
    else:
        without = f", {faults} without proof are left out" if faults else ""
        gates.passed(
            GateName.TABLE_WALK, f"{walk.object_count} objects are provably committed{without}.", **facts
        )


def fit_gate(plan: SizePlan, gates: GateLog) -> None:
    """Judge a plan: whether the objects can be brought into the size asked for."""
    facts = {"kept_segments": plan.keep, "new_extents": plan.new_extents}
    if plan.refusal:
        gates.failed(GateName.FIT, plan.refusal, **facts)
    else:
        gates.passed(GateName.FIT, plan.reason, **facts)


@dataclass(slots=True)
class _Opening:
    """One start, between the lock and the arena."""

    directory: Path
    wanted: layout.SegmentLayout
    boot: bytes
    clears: Mapping[bytes, int]
    spare_bytes: int
    lock: int
    gates: GateLog
    now_unix: float = field(default_factory=time.time)

    def run(self) -> Opened:
        files = find_segment_files(self.directory)
        recency = take_recency(self.directory, self.now_unix)
        check_headers(files, self.clears, self.gates)
        if not self._tables_can_be_read():
            return self._replace(files)
        segments = [Segment.open(each.path, each.segment, each.nonce, each.shape) for each in files]
        descriptors, _ = NamespaceFiles(self.directory).read()
        everything, epochs = segments[0].read_epochs()
        walk = walk_tables(segments, descriptors, epochs, everything)
        plan = plan_size(
            [each.shape.extent_count for each in segments],
            segments[0].shape.extent_bytes,
            self.wanted,
            object_bytes=walk.object_bytes,
            spare_bytes=self.spare_bytes,
        )
        if self.gates.open:
            walk_gate(files, walk, self.gates)
        if self.gates.open:
            fit_gate(plan, self.gates)
        if self.gates.warm:
            return self._warm(files, walk, plan, recency, descriptors)
        if plan.change is SizeChange.NONE and walk.tables_hold:
            return self._reuse(files, walk)
        for segment in segments:
            segment.close()
        return self._replace(files, walk.object_count)

    def _tables_can_be_read(self) -> bool:
        """Whether the headers hold; a clear that they lack says nothing against the tables."""
        return len(self.gates.results) > list(GateName).index(GateName.EPOCHS)

    def _warm(
        self,
        files: Sequence[SegmentFile],
        walk: Walk,
        plan: SizePlan,
        recency: Recency,
        descriptors: dict[bytes, NamespaceDescriptor],
    ) -> Opened:
        kept, gone = walk.segments[: plan.keep], walk.segments[plan.keep :]
        opened = self._opened(self._new_arena(kept[0].segment.nonce if kept else b""), files)
        for walked in kept:
            walked.segment.begin_boot(self.boot)
            opened.limbo_objects += take_over(opened.arena, walked)
            opened.taken.append(objects_of(walked, recency))
        if plan.new_extents:
            # Segments that are added to an arena are a part of it at once, one that replaces it only when it is full.
            opened.arena.create_segment(plan.new_extents, self.boot, finished=bool(kept))
        if gone:
            self._move(opened, walk, gone, recency)
        opened.left_behind = {cause: n for cause, n in (walk.left_out + walk.faults).items() if n}
        missing = walk.object_count - opened.object_count
        if missing:
            opened.left_behind["did_not_fit"] = missing
        opened.descriptors = {
            name: each
            for name, each in descriptors.items()
            if any((taken.records["namespace"] == np.void(name)).any() for taken in opened.taken)
        }
        opened.namespaces.keep_only({name.hex() for name in opened.descriptors})
        return opened

    def _move(self, opened: Opened, walk: Walk, gone: Sequence[WalkedSegment], recency: Recency) -> None:
        """Bring what fits of the segments that go into those that stay, or into the one that replaces them."""
        arena = opened.arena
        replaced = len(gone) == len(walk.segments)
        if replaced:
            arena.adopt_epochs(*gone[0].segment.read_epochs())
        for walked in gone:
            walked.segment.begin_boot(self.boot)
        sources = [(walked, objects_of(walked, recency)) for walked in gone]
        opened.taken += move_objects(sources, arena.spaces, self.now_unix)
        for walked in gone:
            walked.segment.poison_and_unlink()
        if replaced:
            arena.spaces[0].segment.finish()

    def _reuse(self, files: Sequence[SegmentFile], walk: Walk) -> Opened:
        """A cold start on the same files: their memory stays where it is."""
        opened = self._opened(self._new_arena(walk.segments[0].segment.nonce), files)
        for walked in walk.segments:
            walked.segment.begin_boot(self.boot)
            opened.limbo_objects += take_empty(opened.arena, walked)
        return self._cold(opened, walk.object_count)

    def _replace(self, files: Sequence[SegmentFile], objects: int = 0) -> Opened:
        """A cold start on new files; ``objects`` is how many are known to be in the old ones."""
        for each in files:
            Segment.open(each.path, each.segment, each.nonce, each.shape).poison_and_unlink()
        opened = self._opened(self._new_arena(), files)
        opened.arena.create_segment(self.wanted.extent_count, self.boot)
        return self._cold(opened, objects)

    def _cold(self, opened: Opened, objects: int) -> Opened:
        """An empty arena begins behind every clear that was acknowledged, so that the next start finds them in it."""
        opened.left_behind = {"cold": objects} if objects else {}
        opened.namespaces.keep_only(set())
        highest = max(self.clears.values(), default=0)
        if opened.arena.global_clear_epoch < highest:
            opened.arena.begin_at_epoch(highest)
        return opened

    def _new_arena(self, nonce: bytes = b"") -> Arena:
        return Arena(self.directory, nonce or secrets.token_bytes(ID_BYTES), self.wanted.extent_bytes)

    def _opened(self, arena: Arena, files: Sequence[SegmentFile]) -> Opened:
        return Opened(
            arena=arena,
            lock_descriptor=self.lock,
            gates=self.gates.complete(),
            warm=self.gates.warm,
            reason=self.gates.reason,
            clean_stop=bool(files) and all(each.clean for each in files),
            namespaces=NamespaceFiles(self.directory),
        )


def lock_directory(directory: Path) -> int:
    """Make the directory where it is not there, and take the lock of its one daemon; returns its descriptor.

    Raises:
        ArenaInUse, ArenaUnusable: see :func:`open_arena`.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = directory.stat()
        lock = take_lock(directory / LOCK_NAME)
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
