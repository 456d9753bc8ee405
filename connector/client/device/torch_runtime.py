"""CUDA and HIP through torch: streams, events, pinned memory, and the Triton kernel. The only module that needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from connector.client.device.driver import Driver
from connector.client.device.runtime import Mark, PinnedMemory, RegistrationFailed
from kernels import Direction, triton_copy
from kernels.pointer_table import Column

BOUNCE_BYTES = 32 << 20
FIRST_TABLE_ROWS = 4096
FIRST_SUMS = 256
REGISTER_PORTABLE, REGISTER_MAPPED = 1, 2


class TorchRuntime:
    """One CUDA or HIP device. See :class:`connector.client.device.runtime.DeviceRuntime` for the contract.

    `programs` bounds the share of the device that one copy takes; see `kernels.triton_copy`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        bounce_bytes: int = BOUNCE_BYTES,
        programs: int = triton_copy.PROGRAMS,
    ) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.name = f"{'hip' if torch.version.hip else 'cuda'}:{index}"
        self._bounce_bytes = bounce_bytes
        self._programs = programs
        self._scratch: list[torch.Tensor] = []
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()
            self._runtime = torch.cuda.cudart()
            self.driver = Driver(hip=bool(torch.version.hip))

    def register(self, address: int, length_bytes: int) -> int:
        """Pin a range and return the device's address of it. Raises RegistrationFailed."""
        self.driver.ignore_captures()
        with torch.cuda.device(self.device):
            answer = self._runtime.cudaHostRegister(
                address, length_bytes, REGISTER_PORTABLE | REGISTER_MAPPED
            )
            self._check(answer, f"{length_bytes} bytes cannot be pinned")
            try:
                return self.driver.device_address(address)
            except RegistrationFailed:
                self.unregister(address)
                raise

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises RegistrationFailed."""
        self.driver.ignore_captures()
        with torch.cuda.device(self.device):
            self._check(self._runtime.cudaHostUnregister(address), "a range cannot be unpinned")

    def _check(self, answer: Any, what: str) -> None:
        if int(answer):
            raise RegistrationFailed(f"{what}: {self._runtime.cudaGetErrorString(answer)} ({int(answer)})")

    def make_lane(self, direction: Direction) -> TorchLane:  # noqa: ARG002  # both directions are alike here
        """Return a lane with a stream of its own."""
        return TorchLane(self, self._bounce_bytes, self._programs)

    def mark(self) -> Mark:
        """Record an event on the calling thread's current stream of this device."""
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        mark: Mark = event
        return mark

    def scratch(self, length_bytes: int) -> int:
        """Return the address of device memory that lives as long as this runtime."""
        self._scratch.append(torch.empty(length_bytes, dtype=torch.uint8, device=self.device))
        return int(self._scratch[-1].data_ptr())


@dataclass(eq=False)
class _Slot:
    """A table on its way: its pinned copy must not change before the transfer has ended."""

    host: torch.Tensor
    device: torch.Tensor


class TorchLane:
    """A stream, a bounce buffer, tables and sums. All memory is allocated on the lane's stream and used there only."""

    def __init__(self, runtime: TorchRuntime, bounce_bytes: int, programs: int) -> None:
        self._device = runtime.device
        self._driver = runtime.driver
        self._programs = programs
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)
            # Blocking: the copy thread sleeps until then instead of taking a core from the engine.
            self._event = torch.cuda.Event(blocking=True)
            self._bounce = torch.empty(bounce_bytes, dtype=torch.uint8, pin_memory=True)
            self._bounce_at = runtime.driver.device_address(self._bounce.data_ptr())
        self._slots: list[_Slot] = []
        self._next_slot = 0
        self._object_count = 0
        self._sums = self._on_device(FIRST_SUMS)
        self._sums_host = torch.empty(FIRST_SUMS, dtype=torch.int64, pin_memory=True)

    @property
    def bounce(self) -> PinnedMemory:
        """The bounce buffer."""
        return PinnedMemory(self._bounce.data_ptr(), self._bounce_at, self._bounce.numel())

    def wait_for(self, mark: Mark) -> None:
        """Have the stream wait for an event of `TorchRuntime.mark`."""
        assert isinstance(mark, torch.cuda.Event), "the mark of another runtime orders nothing here"
        self._stream.wait_event(mark)

    def begin(self, object_count: int) -> None:
        """Zero the sums; the lane is idle."""
        self._driver.ignore_captures()  # a copy thread captures nothing itself
        self._object_count = object_count
        if object_count > self._sums.numel():
            size = 2 * object_count
            self._sums = self._on_device(size)
            self._sums_host = torch.empty(size, dtype=torch.int64, pin_memory=True)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._sums[: max(1, object_count)].zero_()

    def launch(self, table: NDArray[np.int64]) -> None:
        """Enqueue the transfer of a table and the kernel that works through it."""
        rows = table.shape[1]
        slot = self._take_slot(table.size)
        slot.host[: table.size].numpy()[:] = table.ravel()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            on_device = slot.device[: table.size]
            on_device.copy_(slot.host[: table.size], non_blocking=True)
            triton_copy.launch(on_device.view(len(Column), rows), rows, self._sums, programs=self._programs)

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        self._event.record(self._stream)
        self._event.synchronize()
        self._next_slot = 0

    def finish(self) -> NDArray[np.uint64]:
        """Fetch the sums behind everything launched, and wait for them."""
        count = self._object_count
        if count:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._sums_host[:count].copy_(self._sums[:count], non_blocking=True)
        self.synchronize()
        sums: NDArray[np.uint64] = self._sums_host[:count].numpy().view(np.uint64).copy()
        return sums

    def _on_device(self, count: int) -> torch.Tensor:
        # On the lane's stream: memory that another stream gave back may still be in use there.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return torch.empty(count, dtype=torch.int64, device=self._device)

    def _take_slot(self, count: int) -> _Slot:
        number = self._next_slot
        self._next_slot += 1
        if number < len(self._slots) and self._slots[number].host.numel() >= count:
            return self._slots[number]
        size = max(len(Column) * FIRST_TABLE_ROWS, 1 << (count - 1).bit_length())
        slot = _Slot(torch.empty(size, dtype=torch.int64, pin_memory=True), self._on_device(size))
        self._slots[number : number + 1] = [slot]
        return slot
