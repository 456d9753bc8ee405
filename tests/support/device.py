"""A device for tests, in this process: the real data path, with everything as late and as strict as a GPU may be.

Kernels run only when somebody waits for them, on copies of their tables made at launch. Host memory has another address
on the device, and only what is registered at that moment can be reached. The engine's computation is a queue that moves
only when a lane waits for a mark in it. So a missing wait, a table reused too early, a range unpinned too soon or a
generation read before the event gives wrong bytes or an error instead of a lucky result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from connector.client.device.pinning import PinnedArena
from connector.client.device.runtime import Mark, PinnedMemory, RegistrationFailed
from kernels import Direction, Spans
from kernels.pointer_table import Column, run_table
from tests.support.waiting import eventually

DEVICE_OFFSET = 1 << 46
"""Where the device sees pinned host memory: no address of this process, so that mixing them up cannot work."""

RunTable = Callable[[NDArray[np.int64], NDArray[np.int64]], None]
"""(table with this process's addresses, sums): the copy itself."""


@dataclass(eq=False)
class HostMark:
    """A point in the engine's computation."""

    runtime: HostRuntime
    position: int

    def reach(self) -> None:
        """Compute everything before it."""
        self.runtime.compute_until(self.position)


@dataclass
class HostRuntime:
    """See the module. `log` has one line for each thing that happened, in order, over all threads."""

    run_table: RunTable = run_table
    bounce_bytes: int = 128 << 10
    name: str = "tests:0"
    refuse_registration: str = ""
    refuse_unregistration: str = ""
    on_run: Callable[[Direction], None] | None = None
    on_register: Callable[[], None] | None = None
    log: list[tuple[object, ...]] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)
    device_memory: dict[int, int] = field(default_factory=dict)
    lanes: dict[Direction, HostLane] = field(default_factory=dict)
    _kept: list[NDArray[np.uint8]] = field(default_factory=list)
    _computation: list[Callable[[], None]] = field(default_factory=list)
    _computed: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # --- the runtime's contract --------------------------------------------------------------------------------------

    def register(self, address: int, length_bytes: int) -> int:
        """Pin a range."""
        if self.on_register is not None:
            self.on_register()
        with self._lock:
            self.log.append(("register", address, length_bytes, bool(self.refuse_registration)))
            if self.refuse_registration:
                raise RegistrationFailed(self.refuse_registration)
            assert address not in self.registered, "registered twice"
            self.registered[address] = length_bytes
            return address + DEVICE_OFFSET

    def unregister(self, address: int) -> None:
        """Unpin a range."""
        with self._lock:
            self.log.append(("unregister", address))
            if self.refuse_unregistration:
                raise RegistrationFailed(self.refuse_unregistration)
            del self.registered[address]

    def make_lane(self, direction: Direction) -> HostLane:
        """A lane."""
        self.lanes[direction] = HostLane(self, direction)
        return self.lanes[direction]

    def mark(self) -> Mark:
        """Where the computation is now."""
        self.log.append(("mark", len(self._computation)))
        return HostMark(self, len(self._computation))

    def scratch(self, length_bytes: int) -> int:
        """Device memory."""
        return self.own(np.zeros(length_bytes, dtype=np.uint8))

    # --- for tests ---------------------------------------------------------------------------------------------------

    def own(self, memory: NDArray[np.uint8]) -> int:
        """Make a buffer of this process device memory."""
        self._kept.append(memory)
        self.device_memory[int(memory.ctypes.data)] = memory.nbytes
        return int(memory.ctypes.data)

    def compute(self, work: Callable[[], None]) -> None:
        """Queue work of the engine; it runs when a lane waits for a later mark."""
        self._computation.append(work)

    def compute_all(self) -> None:
        """Run all of the engine's work."""
        self.compute_until(len(self._computation))

    def compute_until(self, position: int) -> None:
        """Run the engine's work up to here."""
        with self._lock:
            while self._computed < position:
                self._computation[self._computed]()
                self._computed += 1

    def host_address(self, address: int, length_bytes: int) -> int:
        """This process's address of what the device may access. Raises AssertionError where it may not."""
        with self._lock:
            if _holds(self.device_memory, address, length_bytes):
                return address
            host = address - DEVICE_OFFSET
            pinned = dict(self.registered)
            pinned.update({lane.memory: lane.bounce.length_bytes for lane in self.lanes.values()})
            assert _holds(pinned, host, length_bytes), f"the device would fault at {address:#x}"
            return host


def _holds(ranges: dict[int, int], address: int, length_bytes: int) -> bool:
    return any(start <= address and address + length_bytes <= start + size for start, size in ranges.items())


class HostLane:
    """A lane whose queue moves only in `synchronize` and `finish`."""

    def __init__(self, runtime: HostRuntime, direction: Direction) -> None:
        self._runtime = runtime
        self._direction = direction
        self._memory = np.zeros(runtime.bounce_bytes, dtype=np.uint8)
        self._sums: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._queue: list[NDArray[np.int64] | HostMark] = []

    @property
    def memory(self) -> int:
        """Address of the bounce buffer in this process."""
        return int(self._memory.ctypes.data)

    @property
    def queued(self) -> int:
        """Launches that have not run."""
        return sum(not isinstance(each, HostMark) for each in self._queue)

    @property
    def bounce(self) -> PinnedMemory:
        """The bounce buffer."""
        return PinnedMemory(self.memory, self.memory + DEVICE_OFFSET, self._memory.nbytes)

    def wait_for(self, mark: Mark) -> None:
        """Queue a wait."""
        assert isinstance(mark, HostMark), "a mark of another runtime"
        self._runtime.log.append(("wait_for", self._direction))
        self._queue.append(mark)

    def begin(self, object_count: int) -> None:
        """Zero sums."""
        assert not self.queued, "a batch would begin while another one runs"
        self._sums = np.zeros(max(1, object_count), dtype=np.int64)
        self._count = object_count

    def launch(self, table: NDArray[np.int64]) -> None:
        """Queue a copy."""
        self._runtime.log.append(("launch", self._direction, table.shape[1]))
        self._queue.append(table.copy())

    def synchronize(self) -> None:
        """Run the queue."""
        queue, self._queue = self._queue, []
        for each in queue:
            if isinstance(each, HostMark):
                each.reach()
                continue
            if self._runtime.on_run is not None:
                self._runtime.on_run(self._direction)
            for column in (Column.SOURCE, Column.DESTINATION):
                each[column] = [
                    self._runtime.host_address(address, length)
                    for address, length in zip(
                        each[column].tolist(), each[Column.LENGTH].tolist(), strict=True
                    )
                ]
            self._runtime.run_table(each, self._sums)
        self._runtime.log.append(("synchronized", self._direction))

    def finish(self) -> NDArray[np.uint64]:
        """Run the queue and give the sums."""
        self.synchronize()
        return self._sums.view(np.uint64)[: self._count].copy()


PIECE = 4096


class MemorySegment:
    """Memory of this process as a segment of `pieces` pieces; `populated` bytes of it have memory, as a daemon says."""

    def __init__(self, pieces: int, populated: int | None = None) -> None:
        self._memory = np.zeros((pieces + 1) * PIECE, dtype=np.uint8)
        self.data_address = -(-int(self._memory.ctypes.data) // PIECE) * PIECE
        self.data_bytes = pieces * PIECE
        self.populated = self.data_bytes if populated is None else populated

    def populated_bytes(self) -> int:
        """What the test says."""
        return self.populated

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes."""
        start = self.data_address - int(self._memory.ctypes.data)
        return self._memory[start : start + self.data_bytes]

    def span(self, start: int, length: int) -> Spans:
        """One span of it."""
        return Spans([1 << 40], [self.data_address + start], [length], [0], [0])  # type: ignore[arg-type]


def registered(arena: PinnedArena, pieces: int) -> None:
    """Wait until so many pieces are registered."""
    eventually(lambda: arena.registered_bytes == pieces * PIECE, f"{pieces} pieces are registered")


def bytes_of(spans: Spans) -> list[tuple[int, int, int, int, int]]:
    """Every word of the spans: where it comes from, where it goes, its length, its place in the stream, its object."""
    columns = (spans.engine_address, spans.arena_address, spans.length_bytes)
    more = (spans.stream_offset, spans.object_index)
    words = []
    for engine, place, length, offset, owner in zip(
        *(column.tolist() for column in (*columns, *more)), strict=True
    ):
        for done in range(0, length, 8):
            words.append((engine + done, place + done, min(8, length - done), offset + done, owner))
    return words
