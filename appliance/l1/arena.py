"""The arena: segments, who may write where, and exact accounting of every byte.

The arena knows allocations, not what they mean: keys and holds are the index's. Every change is in the file before the
caller can tell a peer of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.l1.extents import Run
from appliance.l1.segment import HeadRecord, Segment
from appliance.l1.space import ExtentState, Placement, SegmentSpace, split_address
from appliance.protocol.arena_layout import MAX_EPOCH_ROWS, SegmentLayout, word_of


@dataclass(frozen=True, slots=True)
class ArenaBytes:
    """Bytes by state, in whole extents; they add up to ``populated``."""

    capacity: int
    populated: int
    free: int
    reserved: int
    occupied: int
    draining: int
    limbo: int


class Arena:
    """All segments. ``limbo_by_attach`` maps a writer to the allocations it may still write."""

    def __init__(self, directory: Path, nonce: bytes, extent_bytes: int) -> None:
        self.directory = directory
        self.nonce = nonce
        self.extent_bytes = extent_bytes
        self.spaces: list[SegmentSpace] = []
        self.limbo_by_attach: dict[int, set[int]] = {}
        self.global_clear_epoch = 0
        self.clear_epoch_floor = 0  # a new arena goes on counting where the catalog's clears left off
        self._clear_epochs: dict[bytes, int] = {}

    # --- segments ---------------------------------------------------------------------------------------------

    def add_segment(self, segment: Segment) -> SegmentSpace:
        """Take a segment in; its extents come with :meth:`SegmentSpace.add_populated`."""
        assert segment.index == len(self.spaces), "addresses would name another segment than the file does"
        space = SegmentSpace(segment)
        self.spaces.append(space)
        if segment.index == 0:
            self.global_clear_epoch, self._clear_epochs = segment.read_epochs()
        return space

    def create_segment(self, extent_count: int, boot: bytes, *, finished: bool = True) -> SegmentSpace:
        """A new segment file of this arena; see :meth:`Segment.create`."""
        shape = SegmentLayout(extent_count, self.extent_bytes)
        number = len(self.spaces)
        return self.add_segment(
            Segment.create(self.directory, number, self.nonce, shape, boot, finished=finished)
        )

    @property
    def extent_count(self) -> int:
        """Extents of all segments, populated or not."""
        return sum(space.segment.shape.extent_count for space in self.spaces)

    def extents_of(self, length: int) -> int:
        """Extents that an object of ``length`` bytes takes."""
        return -(-length // self.extent_bytes)

    # --- allocations --------------------------------------------------------------------------------------------

    def has_room(self, extent_count: int) -> bool:
        """Whether one segment has so many free extents."""
        return any(space.allocator.free_extents >= extent_count for space in self.spaces if not space.retired)

    def could_ever_hold(self, extent_count: int) -> bool:
        """Whether an object of so many extents fits into an empty segment."""
        return any(
            space.segment.shape.extent_count >= extent_count for space in self.spaces if not space.retired
        )

    def reserve(self, record: HeadRecord) -> Placement | None:
        """Memory for an object, entered as WRITING under the record's attach id; ``None`` where none is free."""
        for space in self.spaces:
            if not space.retired and space.allocator.free_extents >= record.extent_count:
                return space.reserve(record.extent_count, record)
        return None

    def commit(self, address: int, record: HeadRecord) -> int:
        """Make the reservation at ``address`` an object; returns its commit word."""
        segment, extent = split_address(address)
        return self.spaces[segment].commit(extent, record)

    def to_limbo(self, address: int, attach_id: int) -> None:
        """End a reservation whose writer has not said that it stopped."""
        segment, extent = split_address(address)
        self.spaces[segment].to_limbo(extent)
        self.limbo_by_attach.setdefault(attach_id, set()).add(address)

    def leave_limbo(self, address: int, attach_id: int) -> int:
        """Free an allocation in limbo: its writer has stopped. Returns its extents, 0 if it was not there."""
        held = self.limbo_by_attach.get(attach_id)
        if held is None or address not in held:
            return 0
        held.discard(address)
        if not held:
            del self.limbo_by_attach[attach_id]
        return self.free(address)

    def leave_limbo_of(self, attach_id: int) -> int:
        """Free everything a writer held in limbo: it is proven dead, or said that nothing is in flight."""
        return sum(
            self.leave_limbo(address, attach_id) for address in list(self.limbo_by_attach.get(attach_id, ()))
        )

    def limbo_bytes_of(self, attach_id: int) -> int:
        """Bytes in limbo under one writer."""
        total = 0
        for address in self.limbo_by_attach.get(attach_id, ()):
            segment, extent = split_address(address)
            total += self.spaces[segment].extent_counts[extent]
        return total * self.extent_bytes

    def to_draining(self, address: int) -> None:
        """An object left the index while a reader holds it."""
        segment, extent = split_address(address)
        self.spaces[segment].to_draining(extent)

    def free(self, address: int) -> int:
        """Free an allocation that nobody reads or writes; returns its extents."""
        segment, extent = split_address(address)
        return self.spaces[segment].free(extent)

    # --- what is where --------------------------------------------------------------------------------------------

    def extents_at(self, address: int) -> int:
        """Extents of the allocation at ``address``."""
        segment, extent = split_address(address)
        return self.spaces[segment].extent_counts[extent]

    def word_at(self, address: int) -> int:
        """The commit word of the object at ``address``."""
        segment, extent = split_address(address)
        space = self.spaces[segment]
        return word_of(space.generations[extent], committed=space.states[extent] >= ExtentState.OCCUPIED)

    def describe(self, address: int) -> tuple[int, int, int, int, list[Run]]:
        """Segment, commit word, length, checksum and runs of the object at ``address``."""
        segment, extent = split_address(address)
        space = self.spaces[segment]
        word = word_of(space.generations[extent], committed=True)
        return segment, word, space.lengths[extent], space.checksums[extent], space.runs(extent)

    def account(self) -> ArenaBytes:
        """The accounting at this moment."""
        by_state = [sum(space.extents_by_state[state] for space in self.spaces) for state in ExtentState]
        return ArenaBytes(
            capacity=self.extent_count * self.extent_bytes,
            populated=sum(space.populated_extents for space in self.spaces) * self.extent_bytes,
            free=by_state[ExtentState.FREE] * self.extent_bytes,
            reserved=by_state[ExtentState.RESERVED] * self.extent_bytes,
            occupied=by_state[ExtentState.OCCUPIED] * self.extent_bytes,
            draining=by_state[ExtentState.DRAINING] * self.extent_bytes,
            limbo=by_state[ExtentState.LIMBO] * self.extent_bytes,
        )

    # --- clear epochs ----------------------------------------------------------------------------------------------

    def clear_epoch_of(self, namespace: bytes) -> int:
        """The epoch that a record of this namespace must have to count."""
        return max(self.global_clear_epoch, self._clear_epochs.get(namespace, 0))

    def raise_clear_epoch(self, namespace: bytes | None) -> int:
        """A new epoch for one namespace or all, in the header before it is acknowledged. Returns it."""
        epoch = 1 + max([self.clear_epoch_floor, self.global_clear_epoch, *self._clear_epochs.values()])
        if namespace is None:
            self.global_clear_epoch = epoch
            self._clear_epochs.clear()
        else:
            self._clear_epochs[namespace] = epoch
            self._fold_epochs()
        self.spaces[0].segment.write_epochs(self.global_clear_epoch, self._clear_epochs)
        return epoch

    def adopt_epochs(self, global_epoch: int, epochs: dict[bytes, int]) -> None:
        """Go on with the clear epochs of the arena that this one replaces."""
        self.global_clear_epoch, self._clear_epochs = global_epoch, dict(epochs)
        self.spaces[0].segment.write_epochs(global_epoch, epochs)

    def begin_at_epoch(self, epoch: int) -> None:
        """Count every clear up to ``epoch`` as carried out here: the arena is empty."""
        self.global_clear_epoch = epoch
        self._clear_epochs.clear()
        self.spaces[0].segment.write_epochs(epoch, {})

    def _fold_epochs(self) -> None:
        """Keep the table in its bounds: the oldest clear becomes one of all namespaces.

        No clear is undone. Older objects of other namespaces stay in the cache until the next start and are lost there.
        """
        while len(self._clear_epochs) > MAX_EPOCH_ROWS:
            self.global_clear_epoch = min(self._clear_epochs.values())
            self._clear_epochs = {
                each: epoch for each, epoch in self._clear_epochs.items() if epoch > self.global_clear_epoch
            }

    def close(self, *, clean: bool) -> None:
        """Close every file; ``clean`` sets the flag that a warm start asks for, last of all."""
        for space in self.spaces:
            if clean:
                space.segment.mark_clean()
            space.segment.close()
