"""What is checked: a real device, or, for a dry run, this process with Triton's interpreter in its place."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from connector.client.device.runtime import DeviceRuntime
from kernels import Direction, triton_copy
from tests.support.device import HostRuntime

DELAY_CYCLES = 400_000_000
"""A few tenths of a second of a GPU's clock: long compared with any copy of the checks."""


class Pages(Protocol):
    """Memory of the device."""

    address: int

    def write(self, content: NDArray[np.uint8]) -> None:
        """Set all bytes, and wait."""

    def read(self) -> NDArray[np.uint8]:
        """Get all bytes."""


class Subject(Protocol):
    """A device as the checks use it."""

    name: str
    real: bool

    def make_runtime(self, programs: int | None = None, bounce_bytes: int | None = None) -> DeviceRuntime:
        """A runtime of its own; several may exist."""

    def pages(self, runtime: DeviceRuntime, size: int) -> Pages:
        """Device memory."""

    def later(self, runtime: DeviceRuntime, pages: Pages, content: NDArray[np.uint8]) -> Callable[[], bool]:
        """On the compute stream, after a delay, set all bytes. Returns at once; the result says whether it is still to
        come."""

    def capturing(self) -> AbstractContextManager[None]:
        """Capture a graph on the calling thread meanwhile; raises if the capture was spoiled."""


class OwnSegment:
    """Shared memory of this process in the place of a segment of the arena; `usable` bytes of it may be registered."""

    def __init__(self, size: int, usable: int | None = None) -> None:
        self._memory = mmap.mmap(-1, size)
        self.data = np.frombuffer(self._memory, dtype=np.uint8)
        self.data[:] = 0
        self.data_address = int(self.data.ctypes.data)
        self.data_bytes = size
        self.usable = size if usable is None else usable

    def populated_bytes(self) -> int:
        """What may be registered."""
        return self.usable


# --- the real one -----------------------------------------------------------------------------------------------------


class TorchPages:
    """A tensor."""

    def __init__(self, size: int, device: Any) -> None:
        import torch

        self.tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        self.address = int(self.tensor.data_ptr())

    def write(self, content: NDArray[np.uint8]) -> None:
        import torch

        self.tensor.copy_(torch.from_numpy(content))
        torch.cuda.synchronize(self.tensor.device)

    def read(self) -> NDArray[np.uint8]:
        content: NDArray[np.uint8] = self.tensor.cpu().numpy()
        return content


class TorchSubject:
    """A CUDA or HIP device."""

    real = True

    def __init__(self, device: str) -> None:
        import torch

        self.device = torch.device(device)
        kind = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        self.name = f"{torch.cuda.get_device_name(self.device)}, {kind}, torch {torch.__version__}"

    def make_runtime(self, programs: int | None = None, bounce_bytes: int | None = None) -> DeviceRuntime:
        from connector.client.device.torch_runtime import BOUNCE_BYTES, TorchRuntime

        return TorchRuntime(
            self.device,
            programs=programs or triton_copy.PROGRAMS,
            bounce_bytes=bounce_bytes or BOUNCE_BYTES,
        )

    def pages(self, runtime: DeviceRuntime, size: int) -> TorchPages:  # noqa: ARG002  # memory is the device's
        return TorchPages(size, self.device)

    def later(
        self,
        runtime: DeviceRuntime,  # noqa: ARG002  # the stream is the calling thread's
        pages: Pages,
        content: NDArray[np.uint8],
    ) -> Callable[[], bool]:
        import torch

        assert isinstance(pages, TorchPages)
        fresh = torch.from_numpy(content).to(self.device)
        torch.cuda.synchronize(self.device)
        done = torch.cuda.Event()
        with torch.cuda.device(self.device):
            torch.cuda._sleep(DELAY_CYCLES)  # noqa: SLF001  # the only delay that torch has
            pages.tensor.copy_(fresh)
            done.record()
        return lambda: not done.query()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        import torch

        with torch.cuda.device(self.device):
            graph, start = torch.cuda.CUDAGraph(), torch.ones(1024, device=self.device)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                result = start + 1
                yield
                result = result + 1
            graph.replay()
            torch.cuda.synchronize()
            assert bool((result == 3).all()), "the captured graph computes something else"


# --- the dry run ------------------------------------------------------------------------------------------------------


class HostPages:
    """A buffer of this process."""

    def __init__(self, size: int, runtime: HostRuntime) -> None:
        self._memory = np.zeros(size, dtype=np.uint8)
        self.address = runtime.own(self._memory)

    def write(self, content: NDArray[np.uint8]) -> None:
        self._memory[:] = content

    def read(self) -> NDArray[np.uint8]:
        return self._memory.copy()


class InterpretedSubject:
    """No device: `tests.support.device` with the kernel in Triton's interpreter."""

    real = False

    def __init__(self) -> None:
        import triton

        self.name = f"dry run: Triton {triton.__version__} interpreting on the CPU"
        self._one_at_a_time = threading.Lock()

    def _run(self, table: NDArray[np.int64], sums: NDArray[np.int64]) -> None:
        import torch

        with self._one_at_a_time:  # the interpreter patches the language while it runs
            triton_copy.launch(torch.from_numpy(table), table.shape[1], torch.from_numpy(sums))

    def make_runtime(self, programs: int | None = None, bounce_bytes: int | None = None) -> DeviceRuntime:  # noqa: ARG002
        return HostRuntime(run_table=self._run, bounce_bytes=bounce_bytes or 256 << 10)

    def pages(self, runtime: DeviceRuntime, size: int) -> HostPages:
        assert isinstance(runtime, HostRuntime)
        return HostPages(size, runtime)

    def later(self, runtime: DeviceRuntime, pages: Pages, content: NDArray[np.uint8]) -> Callable[[], bool]:
        assert isinstance(runtime, HostRuntime)
        done = threading.Event()

        def work() -> None:
            time.sleep(0.05)
            pages.write(content)
            done.set()

        runtime.compute(work)
        return lambda: not done.is_set()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield


BOTH = (Direction.STORE, Direction.LOAD)
