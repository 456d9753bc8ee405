"""Which copies serve an engine: chosen once, from where its cache lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from appliance.errors import UnsupportedGeometry
from connector.client.mapping import SegmentWatcher
from kernels import Backend, Direction, load_backend

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class Copies(SegmentWatcher, Protocol):
    """What moves pages, and what orders it behind the engine's computation."""

    @property
    def backend(self) -> Backend:
        """The copy itself."""

    def mark(self, direction: Direction) -> Callable[[], None] | None:
        """On the engine's thread: a wait, for a copy thread, for what the engine has begun to compute by now.

        None where the engine's calls return only when they have computed.
        """


class HostCopies:
    """Pages in host memory, computed by the calling thread: nothing to register and nothing to wait for."""

    @property
    def backend(self) -> Backend:
        """The CPU's backend."""
        return load_backend()

    def mark(self, direction: Direction) -> None:
        """Nothing runs behind the engine's back."""

    def mapped(self, segment: object) -> None:
        """A CPU reaches what is mapped."""

    def retired(self, segment: object) -> None:
        """See `mapped`."""

    def close(self) -> None:
        """See `mapped`."""


def copies_for(devices: Iterable[torch.device]) -> Copies:
    """Return the copies for an engine whose cache tensors lie on these devices.

    Raises:
        UnsupportedGeometry: for more than one device, one of another kind, or one whose kernels cannot be used here.
    """
    found = {str(device): device for device in devices}
    if len(found) != 1:
        raise UnsupportedGeometry(
            f"The cache of this worker lies on {len(found)} devices ({', '.join(sorted(found)) or 'none'}).",
            remedy="Start vLLM without this connector.",
        )
    [device] = found.values()
    if device.type == "cpu":
        return HostCopies()
    if device.type != "cuda":
        raise UnsupportedGeometry(
            f"The cache lies on '{device}', and pages are copied from CPU, CUDA and HIP memory only.",
            remedy="Start vLLM without this connector on this platform.",
        )
    return _device_copies(device)


def _device_copies(device: torch.device) -> Copies:
    try:
        from connector.client.device.engine import DeviceCopies
        from connector.client.device.torch_runtime import TorchRuntime
    except ImportError as error:
        raise UnsupportedGeometry(
            f"The cache lies on '{device}', and the copy kernel needs a package that is missing: {error}.",
            remedy="Install the Triton release that this torch was built with.",
        ) from error
    from connector.client.device.runtime import RegistrationFailed

    try:
        return DeviceCopies(TorchRuntime(device))
    except RegistrationFailed as error:
        raise UnsupportedGeometry(
            f"The driver of '{device}' cannot be used for copies: {error}.",
            remedy="Start vLLM without this connector on this device.",
        ) from error
