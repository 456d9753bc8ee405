"""Any history of stores, removals, clears and reservations, with orderly stops and kills anywhere in it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from appliance.l1.examine import ALL_NAMESPACES
from appliance.l1.removals import Removal
from appliance.protocol.liveness import INLINE_ATTACH_IDS
from tests.support.boots import HYBRID, WRITER, Boots, descriptor_of
from tests.support.core_store import EXTENT, attention, chain, scratch_directory

NAMESPACES = (descriptor_of(*HYBRID), descriptor_of(attention(0, shards=2), model="other"))
PROMPTS = (chain(1, 2, 3), chain(1, 2, 4), chain(9, 8))

namespaces = st.sampled_from(range(len(NAMESPACES)))
lengths = st.integers(1, 4 * EXTENT)


class RestartMachine(RuleBasedStateMachine):
    """The model is the set of names that were committed and not removed since."""

    @initialize()
    def begin(self) -> None:
        self.directory = scratch_directory()
        self.boots = Boots(self.directory, 48)
        self.boot = self.boots.start()
        self.stored: set[tuple[str, bytes, int, int]] = set()
        self.clears: dict[bytes, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "boots"):
            self.boots.end(clean=False)
            shutil.rmtree(self.directory)

    def _gone(self) -> None:
        """What the store evicted to make room is out of the model too."""
        self.stored &= self.boot.names()

    @rule(which=namespaces, prompt=st.sampled_from(PROMPTS), data=st.data(), length=lengths)
    def store(self, which: int, prompt: list[bytes], data: st.DataObject, length: int) -> None:
        descriptor = NAMESPACES[which]
        chunk = data.draw(st.integers(0, len(prompt) - 1))
        group = data.draw(st.sampled_from(descriptor.groups))
        shard = data.draw(st.integers(0, group.shards - 1))
        index = self.boot.namespace(descriptor)
        name = descriptor.fingerprint.namespace, prompt[chunk], group.index, shard
        row = index.find(prompt[chunk])
        if name in self.stored or (
            row >= 0 and index.doomed.view[index.entry(row, group.index)] >> shard & 1
        ):
            return
        if not self.boot.store.make_room(-(-length // EXTENT)):
            return
        self._gone()
        self.boot.put(index, prompt, chunk, group.index, shard, length=length)
        self.stored.add(name)

    @rule(data=st.data(), held=st.booleans())
    def remove(self, data: st.DataObject, held: bool) -> None:
        if not self.stored:
            return
        namespace, key, group, _ = data.draw(st.sampled_from(sorted(self.stored)))
        index = self.boot.store.namespaces[namespace]
        row = index.find(key)
        if held:
            self.boot.store.hold(index, np.array([index.entry(row, group)], dtype=np.int64))
        self.boot.store.remove(index, row, group, Removal.QUARANTINED)
        self.stored = {name for name in self.stored if name[:3] != (namespace, key, group)}

    @rule(which=st.none() | namespaces)
    def clear(self, which: int | None) -> None:
        namespace = None if which is None else NAMESPACES[which].fingerprint.namespace
        if namespace is not None and namespace not in self.boot.store.namespaces:
            return
        epoch, _, _ = self.boot.store.clear(namespace)
        self.clears[ALL_NAMESPACES if namespace is None else bytes.fromhex(namespace)] = epoch
        self.stored = {name for name in self.stored if namespace is not None and name[0] != namespace}

    @rule(length=lengths, inline=st.booleans())
    def leave_a_reservation(self, length: int, inline: bool) -> None:
        if self.boot.opened.arena.account().free < 8 * EXTENT:
            return
        index = self.boot.namespace(NAMESPACES[0])
        key = chain(1000 + self.boot.opened.arena.account().reserved)[0]
        row = index.find(key)
        if row < 0:
            self.boot.reserve(
                index, [key], 0, length=length, attach_id=INLINE_ATTACH_IDS + 1 if inline else WRITER
            )

    @rule(clean=st.booleans(), settles=st.booleans())
    def restart(self, clean: bool, settles: bool) -> None:
        self.boots.end(clean=clean)
        self.boot = self.boots.start(clears=self.clears)
        assert self.boot.opened.warm, self.boot.opened.reason
        if settles:
            self.boot.opened.arena.leave_limbo_of(WRITER)

    @rule(extents=st.integers(20, 80), clean=st.booleans())
    def restart_resized(self, extents: int, clean: bool) -> None:
        self.boots.end(clean=clean)
        self.boot = self.boots.start(extents=extents, clears=self.clears, spare_bytes=1 << 30)
        assert self.boot.opened.warm, self.boot.opened.reason
        left = self.boot.opened.left_behind.get("did_not_fit", 0)
        assert len(self.boot.names()) == len(self.stored) - left
        self._gone()

    @invariant()
    def exactly_what_was_stored_is_there(self) -> None:
        if hasattr(self, "boot"):
            assert self.boot.names() == self.stored
            assert self.boot.check_bytes() == len(self.stored)
            self.boot.accounts_add_up()

    @invariant()
    def clears_are_in_the_arena(self) -> None:
        clears: Mapping[bytes, int] = getattr(self, "clears", {})
        for namespace, epoch in clears.items():
            assert self.boot.opened.arena.clear_epoch_of(namespace) >= epoch


TestRestarts = RestartMachine.TestCase
TestRestarts.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
