"""One arena directory over several boots: each boot a real store over what the gates let through; no daemon around it."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from appliance.fingerprint import assemble
from appliance.geometry import ObjectGroup
from appliance.l1.eviction import make_policy
from appliance.l1.index import NamespaceIndex
from appliance.l1.namespaces import NamespaceDescriptor
from appliance.l1.opening import LOCK_NAME, NO_CLEARS, Opened, open_arena
from appliance.l1.rebuild import oldest_age, rebuild
from appliance.l1.recency import save_recency
from appliance.l1.space import Placement, split_address
from appliance.l1.store import Reserved, Store, Wanted
from tests.support.core_store import CHUNK, EXTENT, ROOT, Clock, Observer, attention, recurrent
from tests.support.core_wire import FACTS, LAYER

HYBRID = (attention(0), recurrent(1, shards=2))
WRITER = 0xBEEF


def descriptor_of(*groups: ObjectGroup, model: str = "m") -> NamespaceDescriptor:
    """A namespace whose fingerprint says these groups."""
    told = [
        {
            "kind": group.kind.value,
            "block_tokens": group.block_tokens,
            "shards": group.shards,
            "context_shards": group.context_shards,
            "window_tokens": group.window_tokens,
            "absent_shards": list(group.absent_shards),
            "page_bytes": 512,
            "spec": {"kind": group.kind.value},
        }
        for group in groups
    ]
    facts = {**FACTS, "model": {**FACTS["model"], "name": model}}
    return NamespaceDescriptor(assemble(facts, told, {"l0": LAYER}, CHUNK), tuple(groups), CHUNK)


@dataclass
class Boot:
    """One boot: the arena, a store with what was taken back, and writers that need no messages."""

    opened: Opened
    store: Store
    clock: Clock
    observer: Observer

    def namespace(self, descriptor: NamespaceDescriptor) -> NamespaceIndex:
        """Settle a namespace as an engine's registration does."""
        assert self.opened.namespaces.describe(descriptor)
        return self.store.namespace(
            descriptor.fingerprint.namespace,
            descriptor.fingerprint.model,
            descriptor.groups,
            descriptor.chunk_tokens,
        )

    def reserve(
        self,
        index: NamespaceIndex,
        keys: Sequence[bytes],
        chunk: int,
        group: int = 0,
        shard: int = 0,
        *,
        length: int = EXTENT,
        attach_id: int = WRITER,
    ) -> Reserved:
        """A reservation that must be granted."""
        parent = keys[chunk - 1] if chunk else ROOT
        wanted = Wanted(keys[chunk], parent, chunk, group, shard, length, bytes(16), attach_id)
        grant, reserved = self.store.reserve(index, wanted)
        assert reserved is not None, grant
        return reserved

    def put(
        self,
        index: NamespaceIndex,
        keys: Sequence[bytes],
        chunk: int,
        group: int = 0,
        shard: int = 0,
        **how: int,
    ) -> Placement:
        """Store one object whose bytes only it has."""
        reserved = self.reserve(index, keys, chunk, group, shard, **how)
        data = content(keys[chunk], group, shard, reserved.record.length)
        segment = self.opened.arena.spaces[reserved.placement.segment].segment
        segment.write_data(reserved.placement.runs, 0, memoryview(data))
        self.store.commit(reserved, zlib.crc32(data))
        entry = index.entry(reserved.row, group)
        self.store.touch(index, np.array([entry], dtype=np.int64))
        return reserved.placement

    def put_chain(self, index: NamespaceIndex, keys: Sequence[bytes], *, length: int = EXTENT) -> None:
        """Every object of every chunk."""
        for chunk in range(len(keys)):
            for group, each in enumerate(index.groups):
                for shard in range(each.shards):
                    self.put(index, keys, chunk, group, shard, length=length)

    def check_bytes(self) -> int:
        """Every object that the index offers is what was stored under its name; returns how many there are."""
        found = 0
        for index in self.store.by_slot:
            for row in index.rows():
                for group, each in enumerate(index.groups):
                    for shard in range(each.shards):
                        if index.present.view[index.entry(row, group)] >> shard & 1:
                            self._check(index, row, group, shard)
                            found += 1
        return found

    def _check(self, index: NamespaceIndex, row: int, group: int, shard: int) -> None:
        address = index.address(row, group, shard)
        number, word, length, checksum, runs = self.opened.arena.describe(address)
        segment = self.opened.arena.spaces[number].segment
        data = bytes(segment.read_data(runs, 0, length))
        assert data == content(index.key_of(row), group, shard, length), "an object has another one's bytes"
        assert checksum == zlib.crc32(data)
        assert segment.read_word(split_address(address)[1]) == word

    def names(self) -> set[tuple[str, bytes, int, int]]:
        """Namespace, key, group and shard of every object on offer."""
        return {
            (index.namespace.hex(), index.key_of(row), group, shard)
            for index in self.store.by_slot
            for row in index.rows()
            for group, each in enumerate(index.groups)
            for shard in range(each.shards)
            if index.present.view[index.entry(row, group)] >> shard & 1
        }

    def accounts_add_up(self) -> None:
        """Bytes by state, against the whole capacity."""
        account = self.opened.arena.account()
        parts = account.free + account.reserved + account.occupied + account.draining + account.limbo
        assert parts == account.populated == account.capacity


def content(key: bytes, group: int, shard: int, length: int) -> bytes:
    """What the object of a name holds."""
    seed = key + bytes((group, shard))
    return (seed * (length // len(seed) + 1))[:length]


class Boots:
    """Starts and ends boots on ``directory``; one at a time."""

    def __init__(self, directory: Path, extents: int = 64) -> None:
        self.directory = directory
        self.extents = extents
        self._boot: Boot | None = None

    def start(
        self,
        *,
        extents: int | None = None,
        extent_bytes: int = EXTENT,
        clears: Mapping[bytes, int] = NO_CLEARS,
        now_unix: float | None = None,
        spare_bytes: int = 0,
    ) -> Boot:
        """The next boot, fully populated."""
        assert self._boot is None, "two boots at once"
        self.extents = self.extents if extents is None else extents
        opened = open_arena(
            self.directory,
            size_bytes=self.extents * extent_bytes,
            extent_bytes=extent_bytes,
            boot=os.urandom(16),
            clears=clears,
            spare_bytes=spare_bytes,
        )
        opened.arena.clear_epoch_floor = max(clears.values(), default=0)
        now_unix = time.time() if now_unix is None else now_unix
        clock = Clock()
        clock.now = oldest_age(opened.taken, now_unix)
        observer = Observer()
        store = Store(opened.arena, make_policy("LRU", clock), observer, clock)
        if opened.taken:
            assert rebuild(store, opened.taken, opened.descriptors, now_unix=now_unix) == opened.object_count
        for space in opened.arena.spaces:
            count = space.segment.shape.extent_count
            space.segment.populate(0, count)
            space.add_populated(count)
        self._boot = Boot(opened, store, clock, observer)
        return self._boot

    def end(self, *, clean: bool) -> None:
        """An orderly stop, or what a SIGKILL leaves."""
        if self._boot is not None:
            boot = self._boot
            if clean:
                save_recency(self.directory, boot.store.by_slot, boot.clock(), time.time())
            boot.opened.arena.close(clean=clean)
            os.close(self._boot.opened.lock_descriptor)
            self._boot = None

    def forget_lock(self) -> None:
        """Let go of the directory after a start that ended in the middle, as the death of its process would."""
        descriptor = os.open(self.directory / LOCK_NAME, os.O_RDWR)
        os.close(descriptor)  # closing any descriptor of the file drops this process's lock on it

    def segments(self) -> list[Path]:
        """The segment files, by number."""
        return sorted(self.directory.glob("segment-*.arena"))
