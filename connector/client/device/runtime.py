"""What the copy engine needs of a GPU's runtime, as a small interface: everything above it runs without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels import Direction


class RegistrationFailed(Exception):
    """The driver did not pin a range of host memory; copies of it go through the bounce buffer."""


class Mark(Protocol):
    """A point on the engine's compute stream; made on the engine's thread, waited for by a lane."""


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """Host memory that the device can access, under both its addresses. Lives as long as its lane."""

    host_address: int
    device_address: int
    length_bytes: int


class Lane(Protocol):
    """One side stream with a bounce buffer and sums, for one copy thread at a time.

    A batch is `begin`, any number of `launch`, `finish`. Nothing but `synchronize` and `finish` waits, and only what
    they have waited for may be relied on: bytes that arrived, sums, a bounce buffer that can be used again.
    """

    @property
    def bounce(self) -> PinnedMemory:
        """Pinned memory of this lane's own, its length a multiple of 256."""

    def wait_for(self, mark: Mark) -> None:
        """Have everything launched from now on begin only when `mark` was reached. Returns at once."""

    def begin(self, object_count: int) -> None:
        """Begin a batch: so many sums, all zero. The lane is idle."""

    def launch(self, table: NDArray[np.int64]) -> None:
        """Enqueue the copy of a pointer table whose addresses are the device's; the array may be reused at once."""

    def synchronize(self) -> None:
        """Wait until everything launched has reached memory: record an event, then wait for it."""

    def finish(self) -> NDArray[np.uint64]:
        """End the batch: wait as `synchronize` does, and return the raw sums."""


class DeviceRuntime(Protocol):
    """One device."""

    name: str
    """As the log shows it."""

    def register(self, address: int, length_bytes: int) -> int:
        """Pin a range of host memory and return the address at which the device sees it. May take long.

        Raises:
            RegistrationFailed: nothing is pinned.
        """

    def unregister(self, address: int) -> None:
        """Undo `register` of the range that begins here.

        Raises:
            RegistrationFailed: the range is still pinned, so it must stay mapped.
        """

    def make_lane(self, direction: Direction) -> Lane:
        """Return a lane with a stream of its own."""

    def mark(self) -> Mark:
        """Record an event on the stream that the calling thread computes on. Never waits."""

    def scratch(self, length_bytes: int) -> int:
        """Return the address of device memory that lives as long as this runtime."""
