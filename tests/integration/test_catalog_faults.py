"""What the writer does when the file is locked, full, read-only, damaged, deleted or replaced."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.catalog.database import open_for_daemon
from appliance.catalog.health import CatalogState
from appliance.catalog.queries import CatalogReader
from appliance.catalog.recovery import load_control_state
from appliance.catalog.writer import CatalogWriter
from appliance.errors import CatalogUnavailable
from tests.unit.catalog.samples import (
    NAMESPACE,
    Acknowledgements,
    clear,
    count,
    eventually,
    lease_end,
    setting,
    stored_batch,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "catalog.db"


@pytest.fixture
def start(path):
    """Starts writers and stops them afterwards; waits until each has opened its file."""
    writers = []

    def make(on_durable=None, *, at=path, **options):
        options.setdefault("busy_timeout_seconds", 0.05)
        options.setdefault("control_deadline_seconds", 1.0)
        writer = CatalogWriter(at, on_durable=on_durable or Acknowledgements(), **options)
        writers.append(writer)
        writer.start()
        eventually(lambda: writer.health().state is CatalogState.OK, "the catalog opens")
        return writer

    yield make
    for writer in writers:
        writer.stop(5.0)


def _hold_lock(path, statement="BEGIN IMMEDIATE"):
    holder = sqlite3.connect(path, isolation_level=None, timeout=10)
    holder.execute(statement)
    return holder


LOCK_IN_ANOTHER_PROCESS = """
import sqlite3, sys
raw = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=10)
raw.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_locked_file_delays_history_and_loses_none(path, start):
    seen = Acknowledgements()
    writer = start(seen)
    with subprocess.Popen(
        [sys.executable, "-c", LOCK_IN_ANOTHER_PROCESS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"held\n"
        for number in range(3_000):
            assert writer.submit(lease_end(number))
        eventually(lambda: writer.health().state is not CatalogState.OK, "the lock shows in health")
        assert "lock" in writer.health().reason
        assert count(path, "lease_ends") == 0
        other.stdin.close()
        other.wait(30)
    eventually(lambda: writer.health().state is CatalogState.OK, "the writer recovers")
    assert writer.flush(30.0)
    health = writer.health()
    assert count(path, "lease_ends") == 3_000
    assert (health.dropped, health.rejected) == (0, 0)
    assert health.errors > 0
    writer.submit_control(1, clear(1))
    assert seen.wait_for(1) is None


def test_a_control_row_that_waits_too_long_for_a_lock_is_refused_and_never_written(path, start):
    seen = Acknowledgements()
    writer = start(seen)
    holder = _hold_lock(path)
    writer.submit_control(1, setting(60))
    refusal = seen.wait_for(1)
    assert isinstance(refusal, CatalogUnavailable)
    assert "lock" in str(refusal)
    eventually(lambda: writer.health().state is CatalogState.DOWN, "a lock that lasts is DOWN")
    with pytest.raises(CatalogUnavailable, match="lock"):
        writer.submit_control(2, setting(61))
    holder.close()
    eventually(lambda: writer.health().state is CatalogState.OK, "the writer recovers")
    writer.submit_control(3, setting(62))
    assert seen.wait_for(3) is None
    assert [row.after for row in CatalogReader(path).setting_changes()] == [62]
    assert seen.calls == 2


def test_a_control_row_that_meets_a_short_lock_is_written_after_it(path, start):
    seen = Acknowledgements()
    writer = start(seen, control_deadline_seconds=60.0)
    holder = _hold_lock(path)
    writer.submit_control(1, setting(60))
    eventually(lambda: writer.health().errors > 0, "a try has failed")
    assert writer.health().state is CatalogState.DEGRADED
    holder.close()
    assert seen.wait_for(1) is None


def test_a_stop_under_a_lock_ends_in_time_and_refuses_what_is_left(path, start):
    seen = Acknowledgements()
    writer = start(seen, control_deadline_seconds=60.0)
    holder = _hold_lock(path)
    writer.submit(lease_end(1))
    writer.submit_control(1, setting(60))
    assert not writer.stop(0.5)
    assert isinstance(seen.wait_for(1), CatalogUnavailable)
    assert writer.health().dropped == 1
    holder.close()


def test_a_deleted_file_is_made_again_with_what_was_acknowledged(path, start):
    seen = Acknowledgements()
    writer = start(seen)
    writer.submit(stored_batch(1, 2))
    writer.submit_control(1, setting(60, scope=NAMESPACE))
    writer.submit_control(2, clear(7))
    assert seen.wait_for(2) is None
    assert writer.flush(30.0)
    for name in ("catalog.db", "catalog.db-wal", "catalog.db-shm"):
        path.with_name(name).unlink(missing_ok=True)
    writer.submit_control(3, setting(90))
    assert seen.wait_for(3) is None
    assert writer.submit(lease_end(1))
    assert writer.flush(30.0)
    state = load_control_state(path)
    assert [(row.scope, row.value) for row in state.settings] == [("", 90), (NAMESPACE, 60)]
    assert state.highest_epoch == 7
    assert (count(path, "lease_ends"), count(path, "objects")) == (1, 0)
    health = writer.health()
    assert (health.state, health.recreated, health.objects_stale) == (CatalogState.OK, 1, True)


def test_a_deletion_is_noticed_without_anything_to_write(path, start):
    writer = start()
    path.unlink()
    eventually(lambda: writer.health().recreated == 1, "the file is watched")
    eventually(path.exists, "and made again")
    assert writer.health().state is CatalogState.OK


def test_a_deleted_directory_is_made_again(tmp_path, start):
    path = tmp_path / "below" / "catalog.db"
    writer = start(at=path)
    shutil.rmtree(path.parent)
    writer.submit(lease_end(1))
    eventually(lambda: writer.health().recreated == 1, "the file is watched")
    assert writer.flush(30.0)
    assert count(path, "lease_ends") == 1


def test_a_file_put_in_the_place_of_ours_is_used_and_not_damaged_by_our_log(path, tmp_path, start):
    backup = tmp_path / "backup.db"
    engine = open_for_daemon(backup)
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO settings VALUES ('extent_kib', '', '64', 1.0, 'admin')")
    engine.dispose()
    seen = Acknowledgements()
    writer = start(seen)
    writer.submit_control(1, setting(60))
    assert seen.wait_for(1) is None
    for number in range(2_000):
        writer.submit(lease_end(number))
    assert writer.flush(30.0)
    assert path.with_name("catalog.db-wal").stat().st_size > 0
    backup.replace(path)
    writer.submit_control(2, setting(90))
    assert seen.wait_for(2) is None
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    raw.close()
    assert count(path, "lease_ends") == 0
    values = {row.name: row.value for row in CatalogReader(path).settings()}
    assert values == {"extent_kib": 64, "read_ttl_seconds": 90}
    assert writer.health().state is CatalogState.OK


def test_a_file_that_is_no_catalog_in_our_place_is_left_alone(path, tmp_path, start):
    seen = Acknowledgements()
    writer = start(seen)
    stranger = tmp_path / "stranger"
    stranger.write_bytes(b"somebody else's bytes " * 500)
    stranger.replace(path)
    eventually(lambda: writer.health().state is CatalogState.DOWN, "a strange file shows in health")
    with pytest.raises(CatalogUnavailable, match="no SQLite database"):
        writer.submit_control(1, clear(1))
    assert writer.submit(lease_end(1)), "history waits"
    assert path.read_bytes() == b"somebody else's bytes " * 500
    path.unlink()
    eventually(lambda: writer.health().state is CatalogState.OK, "the writer recovers")
    assert writer.flush(30.0)
    assert count(path, "lease_ends") == 1


def _overwrite(path):
    """Garbage over the file and an empty log: what a broken disk or a stray program leaves."""
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))
    log = path.with_name(path.name + "-wal")
    if log.exists():
        with log.open("r+b") as file:
            file.write(os.urandom(log.stat().st_size))


DAMAGED = """
import json, pathlib, structlog, sys
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
from appliance.catalog.writer import CatalogWriter
from tests.unit.catalog.samples import Acknowledgements, eventually, lease_end, setting
from appliance.errors import CatalogUnavailable
path = pathlib.Path(sys.argv[1])
seen = Acknowledgements()
writer = CatalogWriter(path, on_durable=seen, busy_timeout_seconds=0.05, control_deadline_seconds=1.0)
writer.start()
writer.submit_control(1, setting(60))
assert seen.wait_for(1) is None
for number in range(3_000):
    writer.submit(lease_end(number))
assert writer.flush(30.0)
print("ready", flush=True)
sys.stdin.readline()
token = 2
refused = None
while refused is None and token < 100:
    try:
        writer.submit_control(token, setting(token, at=float(token)))
        refused = seen.wait_for(token)
        token += 1
    except CatalogUnavailable as error:
        refused = error
eventually(lambda: writer.health().state == "down", "the damage shows", 10.0)
assert writer.submit(lease_end(9)), "history waits"
print(json.dumps([type(refused).__name__, writer.health().reason, len(seen.outcomes)]), flush=True)
sys.stdin.readline()
eventually(lambda: writer.health().state == "ok", "a new file is made")
assert writer.flush(30.0)
writer.submit_control(99, setting(99, name="after"))
assert seen.wait_for(99) is None
assert writer.stop(10.0)
print("recovered", flush=True)
"""


def test_a_file_damaged_while_running_is_told_and_its_successor_gets_the_settings(path):
    # In a process of its own: opening a SQLite file in the process that writes it drops that process's locks.
    with subprocess.Popen(
        [sys.executable, "-c", DAMAGED, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as writer:
        assert writer.stdout.readline() == "ready\n"
        _overwrite(path)
        writer.stdin.write("\n")
        writer.stdin.flush()
        kind, reason, answered = json.loads(writer.stdout.readline())
        assert kind == "CatalogUnavailable"
        assert "damaged" in reason or "no SQLite database" in reason
        assert answered <= 2, "a change was acknowledged into a damaged file"
        for name in ("catalog.db", "catalog.db-wal", "catalog.db-shm"):
            path.with_name(name).unlink(missing_ok=True)
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "recovered\n"
    values = {row.name: row.value for row in CatalogReader(path).settings()}
    assert values == {"after": 99, "read_ttl_seconds": 60}
    assert CatalogReader(path).lease_ends()[-1].lease_id == "lease-9"


FULL = """
import json, pathlib, resource, structlog, sys, time
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
from appliance.catalog.events import LeaseEnded, SettingChanged
from appliance.catalog.writer import CatalogWriter
from appliance.errors import CatalogUnavailable
from tests.unit.catalog.samples import Acknowledgements, count, eventually, lease_end, setting

path = pathlib.Path(sys.argv[1])
seen = Acknowledgements()
writer = CatalogWriter(path, on_durable=seen, control_deadline_seconds=1.0)
writer.start()
writer.submit_control(1, setting(1, at=1.0))
assert seen.wait_for(1) is None
assert writer.flush(30.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))  # no file grows beyond this
accepted = 0
while writer.health().state == "ok":
    accepted += writer.submit(lease_end(accepted))
    time.sleep(0.0001)
eventually(lambda: writer.health().state == "down", "the full disk shows")
reason = writer.health().reason
try:
    writer.submit_control(2, setting(2, at=2.0))
    refused = False
except CatalogUnavailable:
    refused = True
for _ in range(1_000):
    accepted += writer.submit(lease_end(accepted))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
eventually(lambda: writer.health().state == "ok", "the writer recovers")
assert writer.flush(60.0)
writer.submit_control(3, setting(3, at=3.0))
assert seen.wait_for(3) is None
print(json.dumps([reason, refused, accepted, count(path, "lease_ends"), writer.health().dropped]))
assert writer.stop(10.0)
"""


def test_a_file_that_cannot_grow_is_told_and_written_once_it_can(path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)],
        capture_output=True,
        check=False,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    reason, refused, accepted, written, dropped = json.loads(done.stdout)
    assert "disk" in reason
    assert refused
    assert written == accepted, "history within the capacity was lost"
    assert dropped == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, mounted for the test."""
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)],
        capture_output=True,
        check=False,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["mount", "-o", "remount,rw,size=1m", str(directory)], capture_output=True, check=False)
    subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_full_disk_is_told_and_written_once_there_is_space(small_disk, start):
    seen = Acknowledgements()
    path = small_disk / "catalog.db"
    writer = start(seen, at=path)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for block in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(block))
            except OSError:
                continue
    accepted = 0
    while writer.health().state is CatalogState.OK:
        accepted += writer.submit(lease_end(accepted))
        time.sleep(0.0001)
    eventually(lambda: writer.health().state is CatalogState.DOWN, "the full disk shows")
    assert "full" in writer.health().reason
    with pytest.raises(CatalogUnavailable, match="full"):
        writer.submit_control(1, clear(1))
    ballast.unlink()
    eventually(lambda: writer.health().state is CatalogState.OK, "the writer recovers")
    assert writer.flush(30.0)
    assert count(path, "lease_ends") == accepted
    writer.submit_control(2, clear(2))
    assert seen.wait_for(2) is None


def test_a_full_disk_refuses_a_control_row_through_its_acknowledgement(small_disk, start):
    seen = Acknowledgements()
    path = small_disk / "catalog.db"
    writer = start(seen, at=path)
    (small_disk / "ballast").write_bytes(
        bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize)
    )
    writer.submit_control(1, setting("x" * 600_000))
    assert isinstance(seen.wait_for(1), CatalogUnavailable)
    (small_disk / "ballast").unlink()
    eventually(lambda: writer.health().state is CatalogState.OK, "the writer recovers")
    assert CatalogReader(path).settings() == [], "what was refused is not there"


def test_a_file_system_that_turns_read_only_is_told_and_recovers(small_disk, start):
    path = small_disk / "catalog.db"
    writer = start(at=path)
    assert writer.submit(lease_end(0))
    assert writer.flush(30.0)
    assert writer.stop(10.0)
    remounted = subprocess.run(
        ["mount", "-o", "remount,ro", str(small_disk)], capture_output=True, check=False, text=True
    )
    if remounted.returncode != 0:
        pytest.skip(f"the file system cannot be remounted here: {remounted.stderr.strip()}")
    again = CatalogWriter(path, on_durable=Acknowledgements())
    again.start()
    try:
        eventually(lambda: again.health().state is CatalogState.DOWN, "a read-only file system shows")
        assert "cannot be" in again.health().reason
        assert again.submit(lease_end(1))
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        eventually(lambda: again.health().state is CatalogState.OK, "the writer recovers")
        assert again.flush(30.0)
        assert count(path, "lease_ends") == 2
    finally:
        again.stop(5.0)
