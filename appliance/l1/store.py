"""The store: what is in the arena, under which key, and what goes when room is wanted.

The one owner of every transition that touches both the arena and an index, so that they cannot disagree: each method
leaves both in step, with the file written before it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.geometry import ObjectGroup
from appliance.l1.arena import Arena
from appliance.l1.eviction import EvictionPolicy
from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Ghosts, Removal
from appliance.l1.segment import HeadRecord
from appliance.l1.space import Placement
from appliance.protocol.arena_layout import STATE_COMMITTED, STATE_WRITING
from appliance.protocol.base import Grant

Entries = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One object that a writer wants to store."""

    key: bytes
    parent: bytes
    chunk_index: int
    group: int
    shard: int
    length: int
    salt: bytes
    attach_id: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """A granted reservation as the store knows it."""

    index: NamespaceIndex
    row: int
    record: HeadRecord
    placement: Placement

    @property
    def extents(self) -> int:
        """Extents it holds."""
        return self.record.extent_count


class StoreObserver(Protocol):
    """Told what entered and left the cache; must return at once."""

    def stored(self, reserved: Reserved, record: HeadRecord) -> None:
        """An object can be found now."""

    def removed(self, index: NamespaceIndex, row: int, group: int, cause: Removal, extents: int) -> None:
        """An entry cannot be found any more."""


class Store:
    """All namespaces in one arena. ``clock`` gives seconds that never run while the daemon is stopped."""

    def __init__(
        self, arena: Arena, policy: EvictionPolicy, observer: StoreObserver, clock: Callable[[], float]
    ) -> None:
        self.arena = arena
        self.policy = policy
        self.observer = observer
        self.ghosts = Ghosts()
        self.namespaces: dict[str, NamespaceIndex] = {}
        self.by_slot: list[NamespaceIndex] = []
        self.incomplete_grace_seconds = 600.0
        self.amnesty = False  # after a restart: nothing is evicted
        self._clock = clock
        self._incomplete: dict[tuple[int, int], float] = {}

    def namespace(
        self, namespace: str, model: str, groups: Sequence[ObjectGroup], chunk_tokens: int
    ) -> NamespaceIndex:
        """The index of a namespace, made when it is first named."""
        index = self.namespaces.get(namespace)
        if index is None:
            index = self.make_namespace(namespace, model, groups, chunk_tokens)
            self.policy.add_namespace(index)
        return index

    def use_policy(self, policy: EvictionPolicy) -> None:
        """Another policy from now on; it takes over what is in the cache."""
        for index in self.by_slot:
            policy.add_namespace(index)
        self.policy = policy

    def make_namespace(
        self, namespace: str, model: str, groups: Sequence[ObjectGroup], chunk_tokens: int
    ) -> NamespaceIndex:
        """An empty index that a restart fills; :meth:`taken_back` follows."""
        slot = len(self.by_slot)
        index = NamespaceIndex(
            slot, bytes.fromhex(namespace), model, groups, chunk_tokens, self.arena.extent_count
        )
        self.namespaces[namespace] = index
        self.by_slot.append(index)
        return index

    def taken_back(self, index: NamespaceIndex) -> None:
        """The index holds what an earlier boot stored: from now on it may be evicted, incomplete sets first."""
        self.policy.add_namespace(index)
        masks = index.present.array[: index.rows_made * index.group_count].reshape(-1, index.group_count)
        lacking = np.flatnonzero((masks != 0) & (masks != index.full_masks))
        self._incomplete.update(((index.slot, entry), self._clock()) for entry in lacking.tolist())

    @property
    def now_seconds(self) -> int:
        """The store's clock, as in the columns of times."""
        return int(self._clock())

    # --- writing ---------------------------------------------------------------------------------------------

    def reserve(self, index: NamespaceIndex, wanted: Wanted) -> tuple[Grant, Reserved | None]:
        """Memory for one object, unless it exists, is being written, or no room can be made."""
        row = index.find(wanted.key)
        bit = 1 << wanted.shard
        if row >= 0:
            entry = index.entry(row, wanted.group)
            if index.present.view[entry] & bit:
                return Grant.EXISTS, None
            if (index.pending.view[entry] | index.doomed.view[entry]) & bit:
                return Grant.PENDING, None
        record = self._record_of(index, wanted)
        if not self.make_room(record.extent_count):
            return Grant.WARMING if self.amnesty else Grant.OUT_OF_SPACE, None
        placement = self.arena.reserve(record)
        assert placement is not None, "room was made and yet there is none"
        row = index.ensure_row(wanted.key, wanted.parent, wanted.chunk_index)
        index.set_pending(row, wanted.group, wanted.shard, record.extent_count)
        return Grant.GRANTED, Reserved(index, row, record, placement)

    def _record_of(self, index: NamespaceIndex, wanted: Wanted) -> HeadRecord:
        return HeadRecord(
            key=wanted.key,
            parent=wanted.parent,
            namespace=index.namespace,
            salt=wanted.salt,
            length=wanted.length,
            checksum=0,
            attach_id=wanted.attach_id,
            stored_unix_ms=time.time_ns() // 1_000_000,
            clear_epoch=self.arena.clear_epoch_of(index.namespace),
            extent_count=self.arena.extents_of(wanted.length),
            chunk_index=wanted.chunk_index,
            group=wanted.group,
            shard=wanted.shard,
            state=STATE_WRITING,
        )

    def commit(self, reserved: Reserved, checksum: int) -> None:
        """The writer's bytes are in place: the object can be found from now on."""
        index, row, record = reserved.index, reserved.row, reserved.record
        committed = replace(record, checksum=checksum, state=STATE_COMMITTED)
        self.arena.commit(reserved.placement.address, committed)
        index.end_pending(row, record.group, record.shard, record.extent_count)
        now = int(self._clock())
        where = index.slot, index.entry(row, record.group)
        is_first = not index.present.view[where[1]]
        index.set_present(
            row, record.group, record.shard, reserved.placement.address, record.extent_count, now
        )
        if is_first:
            self.policy.stored(index, np.array([where[1]], dtype=np.int64))
        if index.is_full(row, record.group):
            self._incomplete.pop(where, None)
        else:
            self._incomplete.setdefault(where, self._clock())
        self.observer.stored(reserved, committed)

    def end_reservation(self, reserved: Reserved, cause: Removal, *, writer_stopped: bool) -> None:
        """A reservation ends without an object: its key is free now, its memory once the writer has stopped."""
        index, row, record = reserved.index, reserved.row, reserved.record
        index.end_pending(row, record.group, record.shard, record.extent_count)
        address = reserved.placement.address
        if writer_stopped:
            self.arena.free(address)
        else:
            self.arena.to_limbo(address, record.attach_id)
        entry = index.entry(row, record.group)
        # An abort says nothing about the object: why it was missing before still holds.
        if cause is not Removal.NONE and not index.present.view[entry]:
            index.removal.view[entry] = cause
        self._recycle(index, row, Removal(index.removal.view[entry]))

    # --- reading -----------------------------------------------------------------------------------------------

    def hold(self, index: NamespaceIndex, entries: Entries) -> None:
        """A lease takes these distinct entries."""
        index.hold(entries)

    def unhold(self, index: NamespaceIndex, entries: Entries) -> None:
        """A lease lets go; what was removed meanwhile and nobody else holds is freed."""
        freed = index.unhold(entries)
        for entry in freed[index.doomed.array[freed] != 0]:
            row, group = divmod(int(entry), index.group_count)
            for address in index.take_doomed(row, group):
                self.arena.free(address)
            self._recycle(index, row, Removal(index.removal.view[entry]))
        self.touch(index, freed[index.present.array[freed] != 0])

    def touch(self, index: NamespaceIndex, entries: Entries) -> None:
        """Entries were used, the first to go first."""
        if len(entries):
            index.used_at.array[entries] = int(self._clock())
            self.policy.touched(index, entries)

    def touch_chain(self, index: NamespaceIndex, row: int, also: Entries) -> None:
        """Stamp the attention chunks from ``row`` back to the first, and ``also``: deep chunks go first."""
        chain = []
        while row >= 0:
            chain.append(row)
            row = index.parent_of(row)
        rows = np.array(chain, dtype=np.int64)[:, None] * index.group_count
        attention = (rows + np.array(index.attention, dtype=np.int64)[None, :]).ravel()
        entries = np.concatenate((also[~np.isin(also, attention)], attention))
        depth = index.chunk_index.array[entries // index.group_count].astype(np.int64)
        entries = entries[np.argsort(-depth, kind="stable")]
        self.touch(index, entries[index.present.array[entries] != 0])

    # --- removing ------------------------------------------------------------------------------------------------

    def make_room(self, extents: int) -> bool:
        """Evict until one segment has so many free extents; ``False`` if that cannot be had now."""
        if self.arena.has_room(extents):
            return True
        if self.amnesty or not self.arena.could_ever_hold(extents):
            return False
        for slot, entry in self._overdue_incomplete():
            self._evict(self.by_slot[slot], entry, Removal.STRANDED)
            if self.arena.has_room(extents):
                return True
        for slot, entries in self.policy.candidates(extents):
            for entry in entries.tolist():
                if self._evict(self.by_slot[slot], entry, Removal.EVICTED) and self.arena.has_room(extents):
                    return True
        return False

    def evict_down_to(self, occupied_bytes: int, *, at_most: int) -> int:
        """Evict in the background until no more than so many bytes are occupied; returns entries evicted."""
        evicted = 0
        excess = self.arena.account().occupied - occupied_bytes
        if self.amnesty or excess <= 0:
            return 0
        for slot, entries in self.policy.candidates(self.arena.extents_of(excess)):
            for entry in entries.tolist():
                evicted += self._evict(self.by_slot[slot], entry, Removal.EVICTED)
                if evicted >= at_most or self.arena.account().occupied <= occupied_bytes:
                    return evicted
        return evicted

    def remove(self, index: NamespaceIndex, row: int, group: int, cause: Removal) -> int:
        """Take one entry out of the cache, held or not; returns its extents."""
        extents = self._take_out(index, row, group, cause)
        if extents:
            self._recycle(index, row, cause)
        return extents

    def _take_out(self, index: NamespaceIndex, row: int, group: int, cause: Removal) -> int:
        entry = index.entry(row, group)
        if not index.present.view[entry]:
            return 0
        extents: int = index.extents.view[entry]
        held = index.holds.view[entry] > 0
        for address in index.take_present(row, group, cause):
            if held:
                self.arena.to_draining(address)
            else:
                self.arena.free(address)
        self.policy.removed(index, np.array([entry], dtype=np.int64))
        self._incomplete.pop((index.slot, entry), None)
        self.observer.removed(index, row, group, cause, extents)
        return extents

    def clear(self, namespace: str | None) -> tuple[int, int, int]:
        """Forget every object of a namespace, or of all.

        The epoch is in the header first. Returns the epoch, objects and extents removed. Reservations must have been
        ended by the caller.
        """
        epoch = self.arena.raise_clear_epoch(None if namespace is None else bytes.fromhex(namespace))
        indexes = list(self.namespaces.values()) if namespace is None else [self.namespaces[namespace]]
        objects = extents = 0
        for index in indexes:
            for row in list(index.rows()):
                for group in range(index.group_count):
                    objects += index.present.view[index.entry(row, group)].bit_count()
                    extents += self._take_out(index, row, group, Removal.CLEARED)
                index.unmap(row)
                self._recycle(index, row, Removal.CLEARED)
        return epoch, objects, extents

    def _overdue_incomplete(self) -> list[tuple[int, int]]:
        """Sets that lack a shard for longer than a writer may take: nobody can hit them."""
        limit = self._clock() - self.incomplete_grace_seconds
        return [where for where, since in self._incomplete.items() if since <= limit]

    def _evict(self, index: NamespaceIndex, entry: int, cause: Removal) -> bool:
        view = index.present.view[entry]
        if not view or index.holds.view[entry] or index.pins.view[entry] or index.pending.view[entry]:
            return False
        row, group = divmod(entry, index.group_count)
        if group in index.attention and cause is Removal.EVICTED:
            # Nothing at or behind its boundary can be hit without this chunk's attention.
            self.policy.demoted(index, index.entries_behind(row))
        self.remove(index, row, group, cause)
        return True

    def _recycle(self, index: NamespaceIndex, row: int, cause: Removal) -> None:
        key = index.key_of(row)
        evicted = index.groups_removed(row, Removal.EVICTED)
        if index.recycle_if_empty(row) and cause is not Removal.NONE:
            self.ghosts.remember(index.slot, key, cause, evicted)
