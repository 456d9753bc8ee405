"""The two driver calls that torch has no binding for, through the library that torch has loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

from connector.client.device.runtime import RegistrationFailed


def _loaded_library(name: str) -> str:
    """Return the path of a library of this process: a second copy of it would know nothing of our registrations."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return "/" + path
    raise RegistrationFailed(f"{name} is not loaded in this process")


class HostPointers:
    """Under which address a device sees registered host memory. On most machines it is the host's own."""

    def __init__(self, *, hip: bool) -> None:
        """Find the function. Raises RegistrationFailed where there is none."""
        library, function = (
            ("libamdhip64.so", "hipHostGetDevicePointer")
            if hip
            else ("libcuda.so", "cuMemHostGetDevicePointer_v2")
        )
        try:
            self._get = getattr(ctypes.CDLL(_loaded_library(library)), function)
        except (OSError, AttributeError) as error:
            raise RegistrationFailed(f"{library} has no {function}: {error}") from error
        self._get.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint]
        self._get.restype = ctypes.c_int
        self._function = function

    def device_address(self, host_address: int) -> int:
        """Return the device's address of pinned memory that begins at `host_address`.

        The calling thread's current device is the one asked about. Raises RegistrationFailed.
        """
        found = ctypes.c_uint64()
        code = self._get(ctypes.byref(found), ctypes.c_void_p(host_address), 0)
        if code:
            raise RegistrationFailed(f"{self._function} answered {code} for {host_address:#x}")
        return found.value
