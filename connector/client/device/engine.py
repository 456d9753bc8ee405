"""The copy engine of a GPU: pages in device memory, the arena in host memory, two side streams between them.

What is safe about it, in this order for each batch:

1. The lane waits for the mark that the engine's thread recorded, so that pages are read after they were computed and
   written after their former owner's last kernel.
2. The kernel copies from a pointer table and sums what it stores.
3. The copy thread waits for an event behind all of it. Only then does it read sums, generations and bounce buffers, and
   only after that does its caller commit.
4. What was used directly stays registered until then, and what is registered stays mapped.

A batch that fails half way is waited for before its error is raised: to the caller, an error means that nothing is in
flight any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from appliance.errors import UnsupportedGeometry
from connector.client.device.bounce import rounds
from connector.client.device.pinning import PinnedArena, Segment
from connector.client.device.runtime import DeviceRuntime, Lane
from kernels import Backend, Direction, Spans, load_backend
from kernels.checksum import raw_sum
from kernels.pointer_table import pointer_table
from kernels.reference import check_object_count, memory_view

UNPIN_SECONDS = 30.0
"""How long a stop waits for registrations to be undone."""
SELF_TEST_PIECES = ((0, 40_008, 0), (40_008, 20_000, 0), (60_008, 9_993, 1))
"""Start, length, shift on the device: one piece for each alignment that the kernel treats in its own way, with tails."""


class DeviceCopies:
    """Copies between one device's memory and the arena; safe to use from one saving and one loading thread.

    Raises UnsupportedGeometry when the device does not copy as the reference does: checked once, before anything is
    stored.
    """

    def __init__(self, runtime: DeviceRuntime, pinned: PinnedArena | None = None) -> None:
        self._runtime = runtime
        self._host = load_backend()
        self.pinned = pinned or PinnedArena(runtime)
        self._lanes: dict[Direction, Lane] = {each: runtime.make_lane(each) for each in Direction}
        self._busy = {each: threading.Lock() for each in Direction}
        # On a thread like those that copy later, so that the engine's own stays as it is.
        with ThreadPoolExecutor(1, "pagewarden-self-test") as pool:
            pool.submit(self._self_test).result()

    @property
    def backend(self) -> Backend:
        """This engine in the form that the client's transfers use."""
        return Backend(
            name=self._runtime.name,
            copy_spans=self.copy_spans,
            copy_spans_checksummed=self.copy_spans_checksummed,
            checksum_bytes=self._host.checksum_bytes,
            acquire_fence=self._host.acquire_fence,
            load_word=self._host.load_word,
        )

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def mark(self, direction: Direction) -> Callable[[], None]:
        """Record where the engine's stream is now; the result, called on a copy thread, has that thread's lane wait."""
        mark, lane = self._runtime.mark(), self._lanes[direction]
        return lambda: lane.wait_for(mark)

    # --- segments: see connector.client.mapping --------------------------------------------------------------------

    def mapped(self, segment: Segment) -> None:
        """A segment was mapped."""
        self.pinned.adopt(segment)

    def retired(self, segment: Segment) -> None:
        """A segment is not used any more; it is unmapped when it is not registered any more."""
        self.pinned.retire(segment)

    def close(self) -> None:
        """Undo all registrations, bounded. No copy is under way."""
        self.pinned.close(UNPIN_SECONDS)

    # --- copy threads ----------------------------------------------------------------------------------------------

    def copy_spans(self, spans: Spans, direction: Direction) -> None:
        """Copy every span; the bytes have arrived when this returns."""
        self.copy_spans_checksummed(spans, direction, spans.object_count)

    def copy_spans_checksummed(
        self, spans: Spans, direction: Direction, object_count: int
    ) -> NDArray[np.uint64]:
        """Copy every span and return the raw sum of each object, uint64[object_count], made on the device.

        Raises ValueError when a span's object index is not below `object_count`.
        """
        check_object_count(spans, object_count)
        lane = self._lanes[direction]
        with self._busy[direction], self.pinned.use(spans) as routed:
            try:
                lane.begin(object_count)
                direct = _rows(routed.spans, routed.direct)
                if len(direct):
                    at = routed.device_address[routed.direct]
                    lane.launch(pointer_table(_with_arena(direct, at), direction))
                through_buffer = _rows(routed.spans, ~routed.direct)
                if len(through_buffer):
                    self._bounce(through_buffer, direction, lane)
                return lane.finish()
            except BaseException:
                # Whatever was launched still runs: the caller takes an error as the word that nothing does.
                lane.synchronize()
                raise

    def _bounce(self, spans: Spans, direction: Direction, lane: Lane) -> None:
        for each in rounds(spans, lane.bounce):
            table = pointer_table(each.device_side, direction)
            if direction is Direction.STORE:
                lane.launch(table)
                lane.synchronize()
                self._host.copy_spans(each.host_side, direction)
            else:
                self._host.copy_spans(each.host_side, direction)
                lane.launch(table)
                lane.synchronize()

    # --- start -----------------------------------------------------------------------------------------------------

    def _self_test(self) -> None:
        """Copy a pattern to the device and back on both lanes. Compiles the kernel, so that no step waits for it."""
        starts, lengths, shifts = np.array(SELF_TEST_PIECES, dtype=np.uint64).T
        size = int(starts[-1] + lengths[-1])
        pattern = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        on_device = np.uint64(self._runtime.scratch(size + int(shifts.max())))
        sums = []
        for direction in (Direction.LOAD, Direction.STORE):
            lane = self._lanes[direction]
            buffer = memory_view(lane.bounce.host_address, size)
            buffer[:] = pattern if direction is Direction.LOAD else 0
            lane.begin(1)
            spans = Spans(
                on_device + starts + shifts,
                np.uint64(lane.bounce.device_address) + starts,
                lengths,
                starts,
                np.zeros(len(starts), dtype=np.int32),
            )
            lane.launch(pointer_table(spans, direction))
            sums.append(int(lane.finish()[0]))
            arrived = buffer.copy()
        expected = raw_sum(pattern, 0)
        if sums != [expected, expected] or not np.array_equal(arrived, pattern):
            raise UnsupportedGeometry(
                f"The copy kernel on {self._runtime.name} does not give the bytes and sums of the reference.",
                remedy="Start vLLM without this connector on this device, and report its driver and Triton version.",
            )


def _rows(spans: Spans, chosen: NDArray[np.bool_]) -> Spans:
    return Spans(
        spans.engine_address[chosen],
        spans.arena_address[chosen],
        spans.length_bytes[chosen],
        spans.stream_offset[chosen],
        spans.object_index[chosen],
    )


def _with_arena(spans: Spans, arena_address: NDArray[np.uint64]) -> Spans:
    return Spans(
        spans.engine_address, arena_address, spans.length_bytes, spans.stream_offset, spans.object_index
    )
