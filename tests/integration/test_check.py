"""`pagewarden check` against a daemon that serves: over the wire, on the command line, and beside the catalog."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.check.asking import check_text, run_check
from appliance.errors import NotFound, WrongRole
from appliance.protocol import arena_layout as layout
from appliance.protocol.base import Role
from appliance.protocol.client import RequestClient, endpoint_of
from appliance.protocol.messages import CheckResult
from tests.support.daemon import DaemonProcess
from tests.support.engine import Engine
from tests.support.waiting import eventually

TOKENS = list(range(160))


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A daemon with little memory."""
    return make_daemon()


@pytest.fixture
def stored(daemon: DaemonProcess):
    """An engine that has stored ten chunks and holds a lease on them."""
    engine = Engine(daemon.port).start()
    engine.save(TOKENS, 1)
    assert engine.lookup("request", [*TOKENS, 1]).lease
    yield engine
    engine.stop()


def checked(daemon: DaemonProcess) -> CheckResult:
    with daemon.client() as client:
        return run_check(client)


def command(daemon: DaemonProcess, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "appliance.cli", "check", *daemon.reach(), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def settled_catalog(daemon: DaemonProcess) -> None:
    eventually(lambda: daemon.status().catalog.queued == 0, "the catalog's queue is empty")


def test_a_healthy_daemon_is_clean(daemon: DaemonProcess, stored: Engine):
    settled_catalog(daemon)
    result = checked(daemon)
    assert result.clean
    assert result.findings == []
    objects = daemon.status().l1.objects
    assert objects
    assert result.checked["objects"] == objects
    assert result.checked["catalog_rows"] == objects
    assert "All adds up" in check_text(result)


def test_the_command_exits_0_when_clean_and_1_with_findings(daemon: DaemonProcess, stored: Engine):
    clean = command(daemon, "--json")
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert json.loads(clean.stdout)["clean"] is True
    [segment] = daemon.arena_dir.glob("segment-*.arena")
    extents = daemon.status().l1.capacity_bytes // daemon.status().l1.extent_bytes
    shape = layout.SegmentLayout(extents, daemon.status().l1.extent_bytes)
    descriptor = os.open(segment, os.O_RDWR)
    try:
        word = int.from_bytes(os.pread(descriptor, 8, shape.record_offset(0)), "little")
        assert word & 1, "extent 0 should hold an object"
        os.pwrite(descriptor, (word + 2).to_bytes(8, "little"), shape.record_offset(0))
    finally:
        os.close(descriptor)
    wrong = command(daemon)
    assert wrong.returncode == 1
    assert "record: Extent 0 of segment 0 is OCCUPIED in memory but its commit word" in wrong.stdout
    assert "object: Chunk " in wrong.stdout


def test_the_command_exits_1_without_a_daemon(daemon: DaemonProcess):
    daemon.kill()
    told = command(daemon)
    assert told.returncode == 1
    assert "daemon_unreachable" in told.stderr


def test_a_projection_that_is_behind_is_a_note(daemon: DaemonProcess, stored: Engine):
    settled_catalog(daemon)
    path = Path(daemon.settings["catalog"])
    with sqlite3.connect(path, timeout=10) as catalog:
        catalog.execute("DELETE FROM objects WHERE chunk_key = (SELECT min(chunk_key) FROM objects)")
        catalog.execute(
            "UPDATE objects SET bytes = bytes + 1 WHERE chunk_key = (SELECT max(chunk_key) FROM objects)"
        )
    catalog.close()
    result = checked(daemon)
    assert result.clean
    stale, missing = result.notes
    assert "in the catalog name what is not cached" in stale
    assert "have no row in the catalog" in missing


def test_it_is_an_admins_operation_and_only_the_last_one_is_kept(daemon: DaemonProcess):
    with daemon.client() as admin:
        first = run_check(admin)
        assert admin.call("check", {"run": first.run}, CheckResult).run == first.run
        second = run_check(admin)
        assert second.run == first.run + 1
        with pytest.raises(NotFound):
            admin.call("check", {"run": first.run}, CheckResult)
    endpoint = endpoint_of("127.0.0.1", daemon.port)

    class Worker(RequestClient):
        """Says hello as a worker."""

        def _hello(self) -> None:
            self._session = b"w" * 16
            hello = {"role": "worker", "protocol": 1, "client": "tests", "engine_id": "e"}
            self._exchange("hello", hello)

    with Worker(endpoint, client_name="tests", role=Role.WORKER) as worker, pytest.raises(WrongRole):
        worker.call("check", {}, CheckResult)


def test_it_finds_nothing_while_an_engine_works_and_memory_is_short(daemon: DaemonProcess):
    arguments = ("--model=llama-8b", "--scale=64", "--speed=100", "--cache-tokens=8192", "--seconds=6")
    engine = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "connector.simulate",
            f"--port={daemon.port}",
            "--abort-share=0.3",
            *arguments,
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: daemon.status().counters.get("objects_stored", 0) > 50, "objects are stored")
        checks = 0
        while engine.poll() is None:
            result = checked(daemon)
            assert result.findings == [], check_text(result)
            checks += 1
        out, err = engine.communicate(timeout=20)
    finally:
        engine.kill()
        engine.communicate()
    assert engine.returncode == 0, out + err
    assert checks > 0
