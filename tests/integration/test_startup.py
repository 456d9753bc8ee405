"""Starts that cannot work: a non-zero exit, the remedy, and nothing damaged."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance import errors
from appliance.protocol.messages import SetTtlResult
from tests.support.daemon import DaemonProcess
from tests.support.waiting import eventually

GIB = 1 << 30


def fails(daemon: DaemonProcess, expected: type[errors.StartupError], *says: str) -> str:
    """Start it, expect its end, and return what it said."""
    daemon.start(ready=False)
    assert daemon.process is not None
    status = daemon.process.wait(30)
    told = daemon.log.read_text()
    assert status == expected.exit_status, told
    assert expected.code in told
    for words in says:
        assert words in told
    return told


def test_a_port_in_use_ends_the_start_before_the_arena_is_touched(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon(start=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", daemon.port))
        taken.listen()
        fails(daemon, errors.PortInUse, f"127.0.0.1:{daemon.port}", "--port")
    assert list(daemon.arena_dir.iterdir()) == []
    daemon.start()


def test_a_dashboard_port_in_use_is_named(make_daemon: Callable[..., DaemonProcess]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        daemon = make_daemon(start=False, no_web=False, http_port=port)
        fails(daemon, errors.PortInUse, str(port), "--http-port")


def test_an_l1_larger_than_its_mount_is_refused(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(start=False, l1_size_gb=100_000, extent_kib=4096)
    fails(daemon, errors.ArenaTooSmall, "GiB free", "--l1-size-gb")
    assert list(daemon.arena_dir.glob("segment-*")) == []


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB."""
    place = tmp_path / "mount"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a tmpfs needs root with mount rights")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_mount_that_is_too_small_is_refused_and_one_that_fits_is_used(
    make_daemon: Callable[..., DaemonProcess], small_mount: Path
) -> None:
    daemon = make_daemon(start=False, arena_dir=small_mount / "arena", l1_size_gb=0.0625)
    fails(daemon, errors.ArenaTooSmall, str(small_mount))
    assert not list(small_mount.rglob("segment-*"))
    daemon.settings["l1_size_gb"] = 0.04
    daemon.start()
    assert daemon.status().l1.populated_bytes == daemon.status().l1.capacity_bytes
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"this is no database, and long enough to be looked at as one\n" * 100, "catalog"), (None, "catalog")],
)
def test_a_catalog_that_is_none_is_refused_and_left_as_it_is(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path, content: bytes | None, says: str
) -> None:
    place = tmp_path / "other.db"
    if content is None:
        place.mkdir()
    else:
        place.write_bytes(content)
    daemon = make_daemon(start=False, catalog=place)
    fails(daemon, errors.CatalogUnreadable, says)
    assert list(daemon.arena_dir.glob("segment-*")) == []
    if content is not None:
        assert place.read_bytes() == content


def test_a_second_daemon_cannot_take_the_arena(make_daemon: Callable[..., DaemonProcess]) -> None:
    first = make_daemon()
    second = make_daemon(start=False, arena_dir=first.arena_dir)
    fails(second, errors.ArenaInUse, str(first.arena_dir), "--arena-dir")
    assert first.status().ready


def test_an_address_that_others_can_reach_needs_a_word(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(start=False, host="0.0.0.0")
    fails(daemon, errors.InsecureBind, "0.0.0.0", "--insecure")
    daemon.settings["insecure"] = True
    daemon.start()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("extent_kib", 6),
        ("eviction_policy", "FIFO"),
        ("l1_init_size_gb", 5),
        ("l1_size_gb", 0.00001),
        ("port", 70000),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_its_value(
    make_daemon: Callable[..., DaemonProcess], setting: str, value: float | str
) -> None:
    daemon = make_daemon(start=False, **{setting: value})
    told = fails(daemon, errors.InvalidSettings)
    assert str(value) in told
    assert list(daemon.arena_dir.glob("segment-*")) == []


def test_population_is_shown_and_only_the_initial_part_is_waited_for(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon(l1_size_gb=1.0, l1_init_size_gb=0.25, extent_kib=64)
    l1 = daemon.status().l1
    assert l1.capacity_bytes == GIB
    assert GIB // 4 <= l1.populated_bytes < GIB
    assert daemon.log.read_text().count("populating L1") >= 2


def test_an_orderly_stop_sets_the_clean_flag_and_a_kill_does_not(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    import numpy as np

    from appliance.protocol.arena_layout import HEADER, HEADER_BYTES

    def clean(daemon: DaemonProcess) -> int:
        [path] = daemon.arena_dir.glob("segment-*.arena")
        with path.open("rb") as file:
            return int(np.frombuffer(file.read(HEADER_BYTES), dtype=HEADER)[0]["clean"])

    daemon = make_daemon()
    assert clean(daemon) == 0
    assert daemon.stop() == 0
    assert clean(daemon) == 1
    daemon.start()
    assert clean(daemon) == 0
    daemon.kill()
    assert clean(daemon) == 0


def test_settings_changed_at_run_time_hold_after_a_crash(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    with daemon.client(10.0) as client:
        args = {"name": "read_lease_ttl_seconds", "value_seconds": 77.0, "requested_by": "tests"}
        changed = client.call("set_ttl", args, SetTtlResult)
    assert (changed.before_seconds, changed.after_seconds) == (300.0, 77.0)
    daemon.kill()
    daemon.start()
    assert daemon.status().settings["l1_read_ttl_seconds"] == 77.0


def test_a_durable_change_is_refused_while_the_catalog_is_down(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    import sqlite3

    daemon = make_daemon()
    locked = sqlite3.connect(daemon.directory / "catalog.db", isolation_level=None)
    locked.execute("BEGIN EXCLUSIVE")
    args = {"name": "read_lease_ttl_seconds", "value_seconds": 55.0, "requested_by": "tests"}
    with daemon.client(15.0) as client, pytest.raises(errors.CatalogUnavailable):
        client.call("set_ttl", args, SetTtlResult)
    assert daemon.status().settings["l1_read_ttl_seconds"] == 300.0, "a refused change must not hold"
    assert daemon.status().catalog.state != "ok"
    locked.execute("ROLLBACK")
    locked.close()
    with daemon.client(15.0) as client:
        assert client.call("set_ttl", args, SetTtlResult).after_seconds == 55.0
    eventually(lambda: daemon.status().catalog.state == "ok", "the catalog recovers")


def test_the_daemon_runs_where_torch_is_not_installed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numba'] = None; sys.modules['vllm'] = None;"
        "import appliance.cli, appliance.server.daemon, web.app; print('fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_sigterm_during_population_ends_in_order(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(start=False, l1_size_gb=4.0, extent_kib=256)
    daemon.start(ready=False)
    eventually(lambda: "daemon started" in daemon.log.read_text(), "it started")
    time.sleep(0.2)
    daemon.signal(signal.SIGTERM)
    assert daemon.process is not None
    assert daemon.process.wait(20) == 0
