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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from appliance.errors import ArenaInUse, ArenaUnusable
from appliance.l1.arena import Arena
from appliance.l1.examine import (
    ALL_NAMESPACES,
    UNFINISHED_FILES,
    SegmentFile,
    check_headers,
    find_segment_files,
)
from appliance.l1.gates import GateLog, GateName, GateResult
from appliance.l1.namespaces import NamespaceDescriptor, NamespaceFiles
from appliance.l1.plan import SizePlan, plan_size
from appliance.l1.segment import Segment
from appliance.l1.space import ExtentState, address_of
from appliance.l1.walk import Walk, WalkedSegment, walk_tables
from appliance.protocol import arena_layout as layout
from appliance.protocol.liveness import is_inline, take_lock
from appliance.protocol.wire import ID_BYTES

LOCK_NAME = "daemon.lock"
NO_CLEARS: Mapping[bytes, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Taken:
    """Objects of one segment that were taken back; ``heads`` are their first extents, ``records`` theirs alone."""

    segment: int
    heads: NDArray[np.int64]
    records: NDArray[np.void]


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
) -> Opened:
    """Lock ``directory`` and make an arena of ``size_bytes`` in it, with what is there if every gate opens.

    ``clears`` are the acknowledged clears that the catalog knows, see :func:`check_headers`.

    Raises:
        ArenaInUse: another daemon holds it. ArenaUnusable: it cannot be created or written.
    """
    lock = _lock_directory(directory)
    gates = GateLog()
    gates.passed(GateName.LOCK, f"No other daemon uses {directory}.")
    for path in directory.glob(UNFINISHED_FILES):
        path.unlink(missing_ok=True)
    opening = _Opening(directory, max(1, size_bytes // extent_bytes), extent_bytes, boot, clears, lock, gates)
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


@dataclass(slots=True)
class _Opening:
    """One start, between the lock and the arena."""

    directory: Path
    wanted_extents: int
    extent_bytes: int
    boot: bytes
    clears: Mapping[bytes, int]
    lock: int
    gates: GateLog

    def run(self) -> Opened:
        files = find_segment_files(self.directory)
        namespaces = NamespaceFiles(self.directory)
        check_headers(files, self.clears, self.gates)
        if not self._tables_can_be_read():
            return self._replace(files, namespaces)
        segments = [Segment.open(each.path, each.segment, each.nonce, each.shape) for each in files]
        descriptors, _ = namespaces.read()
        everything, epochs = segments[0].read_epochs()
        walk = walk_tables(segments, descriptors, epochs, everything)
        plan = plan_size(
            [each.shape.extent_count for each in segments],
            segments[0].shape.extent_bytes,
            self.wanted_extents,
            self.extent_bytes,
        )
        if self.gates.open:
            walk_gate(files, walk, self.gates)
        if self.gates.open:
            self._fit(plan)
        if self.gates.warm:
            return self._warm(files, segments, walk, plan, namespaces, descriptors)
        if plan.as_it_is and walk.tables_hold:
            return self._reuse(files, segments, walk, namespaces)
        for segment in segments:
            segment.close()
        return self._replace(files, namespaces)

    def _tables_can_be_read(self) -> bool:
        """Whether the headers hold; a clear that they lack says nothing against the tables."""
        return len(self.gates.results) > list(GateName).index(GateName.EPOCHS)

    def _fit(self, plan: SizePlan) -> None:
        if plan.refusal:
            self.gates.failed(GateName.FIT, plan.refusal)
        else:
            self.gates.passed(
                GateName.FIT, plan.reason, kept_segments=plan.keep, new_extents=plan.add_extents
            )

    def _warm(
        self,
        files: Sequence[SegmentFile],
        segments: Sequence[Segment],
        walk: Walk,
        plan: SizePlan,
        namespaces: NamespaceFiles,
        descriptors: dict[bytes, NamespaceDescriptor],
    ) -> Opened:
        arena = Arena(self.directory, segments[0].nonce, self.extent_bytes)
        opened = self._opened(arena, namespaces, files)
        for walked in walk.segments:
            walked.segment.begin_boot(self.boot)
            opened.limbo_objects += self._take_over(arena, walked)
            records = walked.records[walked.objects.heads]
            opened.taken.append(Taken(walked.segment.index, walked.objects.heads, records))
        if plan.add_extents:
            arena.create_segment(plan.add_extents, self.boot)
        opened.left_behind = {cause: n for cause, n in (walk.left_out + walk.faults).items() if n}
        opened.descriptors = {
            name: each
            for name, each in descriptors.items()
            if any((taken.records["namespace"] == np.void(name)).any() for taken in opened.taken)
        }
        namespaces.keep_only({name.hex() for name in opened.descriptors})
        return opened

    def _take_over(self, arena: Arena, walked: WalkedSegment) -> int:
        """Adopt one segment into the arena; returns what went to limbo. Freed words are in the file before anything else."""
        words = walked.records["commit_word"].copy()
        words[walked.dropped] = ((words[walked.dropped] >> np.uint64(1)) + np.uint64(1)) << np.uint64(1)
        for head in walked.dropped.tolist():
            walked.segment.write_freed(head, int(words[head]) >> 1, was_writing=False)
        space = arena.add_segment(walked.segment)
        space.adopt_generations(words)
        space.adopt(walked.objects, walked.records, ExtentState.OCCUPIED)
        return self._to_limbo(arena, walked)

    def _to_limbo(self, arena: Arena, walked: WalkedSegment) -> int:
        """Fence what was being written: it stays out until its writer attaches again, acknowledges, or is dead.

        An inline client writes through the daemon, which is the one that died.
        """
        space = arena.spaces[walked.segment.index]
        attach_ids = walked.records["attach_id"][walked.writing.heads].tolist()
        fenced = np.array([not is_inline(each) for each in attach_ids], dtype=np.bool_)
        for head in walked.writing.heads[~fenced].tolist():
            space.generations[head] += 1
            walked.segment.write_freed(head, space.generations[head], was_writing=True)
        chains = walked.writing.of(fenced)
        space.adopt(chains, walked.records, ExtentState.LIMBO)
        for head in chains.heads.tolist():
            attach_id = int(walked.records["attach_id"][head])
            arena.limbo_by_attach.setdefault(attach_id, set()).add(address_of(walked.segment.index, head))
        return len(chains.heads)

    def _reuse(
        self,
        files: Sequence[SegmentFile],
        segments: Sequence[Segment],
        walk: Walk,
        namespaces: NamespaceFiles,
    ) -> Opened:
        """A cold start on the same files: their memory stays where it is."""
        arena = Arena(self.directory, segments[0].nonce, self.extent_bytes)
        opened = self._opened(arena, namespaces, files)
        for walked in walk.segments:
            walked.segment.begin_boot(self.boot)
            opened.limbo_objects += self._empty(arena, walked)
        opened.left_behind = {"cold": walk.object_count}
        self._adopt_clears(arena)
        namespaces.keep_only(set())
        return opened

    def _empty(self, arena: Arena, walked: WalkedSegment) -> int:
        """Raise every generation of a segment: cheaper than finding those in use, and no reader can be missed."""
        # Byte for byte: a copy of records leaves out what lies between their fields.
        records = np.frombuffer(bytearray(walked.records.tobytes()), dtype=layout.RECORD)
        records["commit_word"] = ((records["commit_word"] >> np.uint64(1)) + np.uint64(1)) << np.uint64(1)
        keep = np.zeros(len(records), dtype=np.bool_)
        keep[walked.writing.heads] = True
        records["state"][~keep] = layout.STATE_FREE
        walked.segment.write_words(records)
        space = arena.add_segment(walked.segment)
        space.adopt_generations(records["commit_word"])
        return self._to_limbo(arena, walked)

    def _replace(self, files: Sequence[SegmentFile], namespaces: NamespaceFiles) -> Opened:
        """A cold start on new files."""
        for each in files:
            Segment.open(each.path, each.segment, each.nonce, each.shape).poison_and_unlink()
        namespaces.keep_only(set())
        arena = Arena(self.directory, secrets.token_bytes(ID_BYTES), self.extent_bytes)
        arena.create_segment(self.wanted_extents, self.boot)
        self._adopt_clears(arena)
        return self._opened(arena, namespaces, files)

    def _adopt_clears(self, arena: Arena) -> None:
        """An empty arena begins behind every clear that was acknowledged, so that the next start finds them in it."""
        highest = max(self.clears.values(), default=0)
        if arena.clear_epoch_of(ALL_NAMESPACES) < highest:
            arena.begin_at_epoch(highest)

    def _opened(self, arena: Arena, namespaces: NamespaceFiles, files: Sequence[SegmentFile]) -> Opened:
        return Opened(
            arena=arena,
            lock_descriptor=self.lock,
            gates=self.gates.complete(),
            warm=self.gates.warm,
            reason=self.gates.reason,
            clean_stop=bool(files) and all(each.clean for each in files),
            namespaces=namespaces,
        )


def _lock_directory(directory: Path) -> int:
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
