"""An engine with pages in device memory against a real daemon; the kernel's work is done by its numpy description."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.pointer_table import run_table
from tests.support import device_paths
from tests.support.daemon import DaemonProcess
from tests.support.engine import HYBRID
from tests.support.waiting import eventually


@pytest.mark.parametrize("pinned", [True, False], ids=["registered", "bounced"])
@pytest.mark.parametrize("shape", [HYBRID, device_paths.ODD], ids=["hybrid", "odd"])
def test_what_a_device_stores_a_cpu_loads_and_back(
    make_daemon: Callable[..., DaemonProcess], pinned: bool, shape: object
) -> None:
    device_paths.stores_and_loads(make_daemon(), run_table, pinned=pinned, shape=shape)


def test_pieces_are_registered_while_copies_run(make_daemon: Callable[..., DaemonProcess]) -> None:
    device_paths.pieces_come_while_copies_run(make_daemon(), run_table)


def test_a_generation_that_changes_during_the_kernel_fails_the_load(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    device_paths.a_generation_changed_under_the_copy_is_seen(make_daemon(), run_table)


def test_bytes_that_changed_in_the_arena_fail_the_load(make_daemon: Callable[..., DaemonProcess]) -> None:
    device_paths.changed_bytes_are_seen(make_daemon(), run_table)


def test_copies_wait_for_the_engines_computation(make_daemon: Callable[..., DaemonProcess]) -> None:
    device_paths.copies_wait_for_the_engine(make_daemon(), run_table)


def test_only_memory_that_the_daemon_has_populated_is_pinned(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon(l1_size_gb=256 / 1024, l1_init_size_gb=64 / 1024)
    assert daemon.status().l1.populated_bytes == 64 << 20
    device = device_paths.start(daemon, "device", run_table, pinned=False)
    segment = device.engine.ranks[0].client._mapping.segment(0)
    assert segment.data_bytes == 256 << 20
    assert segment.populated_bytes() == daemon.status().l1.populated_bytes
    device.runtime.refuse_registration = ""
    eventually(lambda: device.pinned.registered_bytes == 64 << 20, "all that has memory", 40.0)
    assert device.pinned.waiting_bytes == 192 << 20
    device.engine.stop()
    assert segment.populated_bytes() == 64 << 20, "registering gave the arena memory"


def test_an_arena_that_was_replaced_is_unregistered(make_daemon: Callable[..., DaemonProcess]) -> None:
    device_paths.a_new_arena_retires_the_old_one(make_daemon, run_table)
