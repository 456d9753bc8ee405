"""The real data path with the Triton kernel in interpreter mode: real daemon, real clients, real shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels import triton_copy
from tests.integration.conftest import make_daemon
from tests.support import device_paths
from tests.support.daemon import DaemonProcess
from tests.support.engine import HYBRID

__all__ = ["make_daemon"]

_one_at_a_time = threading.Lock()


def interpreted(table: NDArray[np.int64], sums: NDArray[np.int64]) -> None:
    """The kernel. The interpreter patches the language while it runs, so threads take turns."""
    with _one_at_a_time:
        triton_copy.launch(torch.from_numpy(table), table.shape[1], torch.from_numpy(sums))


@pytest.mark.parametrize("pinned", [True, False], ids=["registered", "bounced"])
@pytest.mark.parametrize("shape", [HYBRID, device_paths.ODD], ids=["hybrid", "odd"])
def test_what_a_device_stores_a_cpu_loads_and_back(
    make_daemon: Callable[..., DaemonProcess], pinned: bool, shape: object
) -> None:
    device_paths.stores_and_loads(make_daemon(), interpreted, pinned=pinned, shape=shape)


def test_pieces_are_registered_while_copies_run(make_daemon: Callable[..., DaemonProcess]) -> None:
    device_paths.pieces_come_while_copies_run(make_daemon(), interpreted)


def test_a_generation_that_changes_during_the_kernel_fails_the_load(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    device_paths.a_generation_changed_under_the_copy_is_seen(make_daemon(), interpreted)


def test_bytes_that_changed_in_the_arena_fail_the_load(make_daemon: Callable[..., DaemonProcess]) -> None:
    device_paths.changed_bytes_are_seen(make_daemon(), interpreted)


def test_copies_wait_for_the_engines_computation(make_daemon: Callable[..., DaemonProcess]) -> None:
    device_paths.copies_wait_for_the_engine(make_daemon(), interpreted)
