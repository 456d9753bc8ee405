"""The driver calls that torch has no binding for, through the library that torch has loaded."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

from connector.client.device.runtime import RegistrationFailed

CAPTURE_MODE_THREAD_LOCAL = 1


def _loaded_library(name: str) -> str:
    """Return the path of a library of this process: a second copy of it would know nothing of our registrations."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return "/" + path
    raise RegistrationFailed(f"{name} is not loaded in this process")


class Driver:
    """Addresses of pinned memory on the device, and threads that may work while another one captures a graph."""

    def __init__(self, *, hip: bool) -> None:
        """Find the functions. Raises RegistrationFailed where there are none."""
        library, pointer, capture = (
            ("libamdhip64.so", "hipHostGetDevicePointer", "hipThreadExchangeStreamCaptureMode")
            if hip
            else ("libcuda.so", "cuMemHostGetDevicePointer_v2", "cuThreadExchangeStreamCaptureMode")
        )
        path = _loaded_library(library)
        try:
            loaded = ctypes.CDLL(path)
            self._pointer = self._function(
                loaded, pointer, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint
            )
            self._capture = self._function(loaded, capture, ctypes.POINTER(ctypes.c_int))
        except (OSError, AttributeError) as error:
            raise RegistrationFailed(f"{path} cannot be used: {error}") from error
        self._thread = threading.local()

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
        function = getattr(library, name)
        function.argtypes = list(arguments)
        function.restype = ctypes.c_int
        return function

    def device_address(self, host_address: int) -> int:
        """Return the device's address of pinned memory that begins at `host_address`; on most machines it is the same.

        The calling thread's current device is the one asked about. Raises RegistrationFailed.
        """
        found = ctypes.c_uint64()
        code = self._pointer(ctypes.byref(found), ctypes.c_void_p(host_address), 0)
        if code:
            raise RegistrationFailed(
                f"the driver answered {code} when asked for the address of {host_address:#x}"
            )
        return found.value

    def ignore_captures(self) -> None:
        """Let the calling thread, from now on, make any call while another thread captures a graph.

        By default such a call fails and spoils the capture, and engines capture after they have given us their cache.
        Raises RegistrationFailed.
        """
        if getattr(self._thread, "ignores", False):
            return
        code = self._capture(ctypes.byref(ctypes.c_int(CAPTURE_MODE_THREAD_LOCAL)))
        if code:
            raise RegistrationFailed(f"the driver answered {code} when told to ignore graph captures")
        self._thread.ignores = True
