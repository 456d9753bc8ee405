"""A real arena, store and hold tables over real files, with a clock that tests move; no daemon around them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from appliance.geometry import GroupKind, ObjectGroup
from appliance.hashing import ChunkHasher, PromptIdentity
from appliance.l1.arena import Arena
from appliance.l1.eviction import make_policy
from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Removal
from appliance.l1.segment import HeadRecord
from appliance.l1.space import Placement
from appliance.l1.store import Reserved, Store, Wanted
from appliance.leases import LeaseEnding, LeaseTable
from appliance.protocol.base import Grant
from appliance.reservations import Reservation, ReservationTable

EXTENT = 4096
CHUNK = 4
SHARED_MEMORY = Path("/dev/shm")


def scratch_directory() -> Path:
    """A directory of its own, in shared memory where there is some."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="pagewarden-test-", dir=parent))


class Clock:
    """Seconds that only :meth:`advance` moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


Gone = tuple[str, bytes, int, Removal, int]


class Observer:
    """Remembers what the store told; ``on_removed`` may look at each removal while it happens."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, bytes, int, int]] = []
        self.gone: list[Gone] = []
        self.on_removed: Callable[[Gone], None] = lambda _gone: None

    def stored(self, reserved: Reserved, record: HeadRecord) -> None:
        self.entered.append((reserved.index.namespace.hex(), record.key, record.group, record.shard))

    def removed(self, index: NamespaceIndex, row: int, group: int, cause: Removal, extents: int) -> None:
        gone = (index.namespace.hex(), index.key_of(row), group, cause, extents)
        self.gone.append(gone)
        self.on_removed(gone)


def attention(index: int, shards: int = 1) -> ObjectGroup:
    return ObjectGroup(index, f"attention{index}", GroupKind.ATTENTION, CHUNK, shards, 1)


def recurrent(index: int, shards: int = 1) -> ObjectGroup:
    return ObjectGroup(index, f"recurrent{index}", GroupKind.RECURRENT, CHUNK, shards, 1)


def sliding(index: int, window_chunks: int, shards: int = 1) -> ObjectGroup:
    """A window of exactly ``window_chunks`` chunks."""
    return ObjectGroup(
        index,
        f"sliding{index}",
        GroupKind.SLIDING,
        CHUNK,
        shards,
        1,
        window_tokens=window_chunks * CHUNK + 1,
    )


def namespace_id(number: int) -> str:
    return f"{number:032x}"


def chain(*chunks: int) -> list[bytes]:
    """Chunk keys of a prompt; ``chunks`` are numbers, a chunk's tokens repeat its number."""
    tokens = [number for number in chunks for _ in range(CHUNK)]
    return ChunkHasher(CHUNK, PromptIdentity()).keys(tokens)


ROOT = ChunkHasher(CHUNK, PromptIdentity()).root


@dataclass
class World:
    """Everything but the loop. ``segments`` are extents per segment file."""

    segments: Sequence[int] = (64,)
    engine_limit_bytes: int = 1 << 40
    policy: str = "LRU"
    directory: Path = field(default_factory=scratch_directory)

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.observer = Observer()
        self.endings: list[LeaseEnding] = []
        self.arena = Arena(self.directory, b"n" * 16, EXTENT)
        for extents in self.segments:
            space = self.arena.create_segment(extents, b"b" * 16)
            space.segment.populate(0, extents)
            space.add_populated(extents)
        self.store = Store(self.arena, make_policy(self.policy, self.clock), self.observer, self.clock)
        self.leases = LeaseTable(self.store, self.clock, self.endings.append, first_id=1 << 24)
        self.reservations = ReservationTable(self.store, self.clock, 1 << 24, self.engine_limit_bytes)
        self.files = [os.open(space.segment.path, os.O_RDWR) for space in self.arena.spaces]

    def close(self) -> None:
        for descriptor in self.files:
            os.close(descriptor)
        self.arena.close(clean=False)
        shutil.rmtree(self.directory)

    def namespace(self, number: int, *groups: ObjectGroup, model: str = "m") -> NamespaceIndex:
        return self.store.namespace(namespace_id(number), model, groups, CHUNK)

    # --- a writer --------------------------------------------------------------------------------------------

    def reserve(
        self,
        index: NamespaceIndex,
        keys: Sequence[bytes],
        chunk: int,
        group: int,
        shard: int = 0,
        *,
        length: int = EXTENT,
        attach_id: int = 7,
        session: bytes = b"w",
        engine: str = "e",
        ttl_seconds: float = 600.0,
    ) -> tuple[Grant, Reservation | None]:
        wanted = Wanted(
            key=keys[chunk],
            parent=keys[chunk - 1] if chunk else ROOT,
            chunk_index=chunk,
            group=group,
            shard=shard,
            length=length,
            salt=bytes(16),
            attach_id=attach_id,
        )
        return self.reservations.reserve(session, engine, index, wanted, ttl_seconds)

    def put(
        self,
        index: NamespaceIndex,
        keys: Sequence[bytes],
        chunk: int,
        group: int,
        shard: int = 0,
        *,
        length: int = EXTENT,
    ) -> int:
        """Reserve, commit and touch one object; its entry."""
        grant, reservation = self.reserve(index, keys, chunk, group, shard, length=length)
        assert reservation is not None, grant
        assert self.reservations.commit(b"w", reservation.reservation_id, 0) is reservation
        entry = index.entry(reservation.reserved.row, group)
        self.store.touch(index, np.array([entry], dtype=np.int64))
        return entry

    def put_chain(self, index: NamespaceIndex, keys: Sequence[bytes], *, length: int = EXTENT) -> None:
        """Every object of every chunk, then touched as a commit does it."""
        row = -1
        for chunk in range(len(keys)):
            for group in range(index.group_count):
                for shard in range(index.groups[group].shards):
                    self.put(index, keys, chunk, group, shard, length=length)
            row = index.find(keys[chunk])
        self.store.touch_chain(index, row, np.empty(0, dtype=np.int64))

    # --- bytes -------------------------------------------------------------------------------------------------

    def write(self, placement: Placement, data: bytes) -> None:
        """As a worker writes: past the daemon, into the file."""
        shape = self.arena.spaces[placement.segment].segment.shape
        at = 0
        for first, count in placement.runs:
            piece = data[at : at + count * EXTENT]
            os.pwrite(self.files[placement.segment], piece, shape.extent_offset(first))
            at += len(piece)

    def read(self, placement: Placement, length: int) -> bytes:
        shape = self.arena.spaces[placement.segment].segment.shape
        pieces = [
            os.pread(self.files[placement.segment], count * EXTENT, shape.extent_offset(first))
            for first, count in placement.runs
        ]
        return b"".join(pieces)[:length]
