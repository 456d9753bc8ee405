"""The writer thread on a real file: batches, acknowledgements, overload, readers, stopping."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from appliance.catalog.events import EngineEnded, HistoryEvent, ObjectsStored
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
    engine,
    eventually,
    fingerprint,
    lease_end,
    removed_batch,
    restart,
    setting,
    stored,
    stored_batch,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "catalog.db"


@pytest.fixture
def start(path):
    """Starts writers on ``path`` and stops them afterwards."""
    writers = []

    def make(on_durable=None, **options):
        writer = CatalogWriter(path, on_durable=on_durable or Acknowledgements(), **options)
        writers.append(writer)
        writer.start()
        return writer

    yield make
    for writer in writers:
        writer.stop(10.0)


def test_everything_submitted_can_be_read(path, start):
    writer = start()
    for event in (
        restart(),
        engine(),
        fingerprint(),
        stored_batch(1, 2, 3),
        removed_batch(1),
        lease_end(1),
        EngineEnded("engine-1", "s1", "bye", 900.0),
    ):
        assert writer.submit(event)
    assert writer.flush(30.0)
    reader = CatalogReader(path)
    assert [row.boot_id for row in reader.restarts()] == ["boot-1"]
    assert [(row.engine_id, row.state, row.end_cause) for row in reader.engines()] == [
        ("engine-1", "ended", "bye")
    ]
    assert [row.namespace for row in reader.fingerprints()] == [NAMESPACE]
    assert {row.chunk_index for row in reader.objects(NAMESPACE)} == {2, 3}
    assert len(reader.evictions()) == len(reader.lease_ends()) == 1
    health = writer.health()
    assert (health.state, health.reason, health.queued, health.errors) == (CatalogState.OK, "", 0, 0)
    assert health.written == 9
    assert health.last_commit_age_seconds >= 0


def test_history_is_written_without_being_asked_for(path, start):
    writer = start()
    writer.submit(lease_end(1))
    eventually(lambda: path.exists() and writer.health().written == 1, "the batch is written after its time")
    assert count(path, "lease_ends") == 1


def test_many_events_share_few_transactions(path, start):
    writer = start()
    assert writer.flush(30.0)
    commits = []
    original = writer._note_commit
    writer._note_commit = lambda: (commits.append(1), original())[1]
    for number in range(20_000):
        assert writer.submit(lease_end(number))
    assert writer.flush(60.0)
    assert count(path, "lease_ends") == 20_000
    assert len(commits) <= 200, "20,000 events were not batched"


def test_a_control_row_is_acknowledged_only_once_another_connection_can_read_it(path, start):
    seen = Acknowledgements(inspect=lambda token: CatalogReader(path).setting_changes()[0].after)
    writer = start(seen)
    for token in range(20):
        writer.submit_control(token, setting(token, at=float(token)))
        assert seen.wait_for(token) is None
        assert seen.seen[token] == token
    assert seen.calls == 20
    assert writer.health().control_waiting == 0


def test_control_rows_that_wait_together_are_committed_together_in_order(path, start):
    gate = threading.Event()
    seen = Acknowledgements(inspect=lambda token: gate.wait(30.0))
    writer = start(seen)
    writer.submit_control(0, setting(0, at=0.0))
    for token in range(1, 101):
        writer.submit_control(token, setting(token, at=float(token)))
    gate.set()
    for token in range(101):
        assert seen.wait_for(token) is None
    [value] = CatalogReader(path).settings()
    assert value.value == 100
    assert [row.after for row in CatalogReader(path).setting_changes(limit=200)] == list(range(100, -1, -1))
    assert list(seen.outcomes) == list(range(101))


def test_a_control_row_does_not_wait_for_history(path, start):
    gate = threading.Event()
    seen = Acknowledgements(inspect=lambda token: count(path, "lease_ends") if token else gate.wait(30.0))
    writer = start(seen)
    writer.submit_control(0, clear(1))
    for number in range(50_000):
        writer.submit(lease_end(number))
    writer.submit_control(1, clear(2))
    gate.set()
    assert seen.wait_for(1) is None
    assert seen.seen[1] < 10_000, "the clear was acknowledged only after much of the history before it"
    assert writer.flush(60.0)
    assert count(path, "lease_ends") == 50_000


def test_a_setting_that_cannot_be_written_is_refused_alone(path, start):
    seen = Acknowledgements()
    gate = threading.Event()
    seen._inspect = lambda token: gate.wait(30.0)
    writer = start(seen)
    writer.submit_control(0, setting(0, at=0.0))
    writer.submit_control(1, setting({1, 2}, at=1.0))  # a set has no JSON form
    writer.submit_control(2, setting(float("nan"), at=2.0))
    writer.submit_control(3, setting(3, at=3.0))
    gate.set()
    assert seen.wait_for(0) is seen.wait_for(3) is None
    for token in (1, 2):
        assert isinstance(seen.wait_for(token), CatalogUnavailable)
    assert [row.after for row in CatalogReader(path).setting_changes()] == [3, 0]
    assert writer.health().rejected == 2
    assert writer.health().state is CatalogState.OK


def test_an_event_that_cannot_be_written_is_left_out_and_the_rest_is_kept(path, start):
    writer = start()
    broken = stored(2)._replace(chunk_key=b"short")
    for event in (
        lease_end(1),
        stored_batch(1),
        ObjectsStored((broken,)),
        ObjectsStored((stored(3)._replace(bytes=1 << 70),)),
        fingerprint(scales={1, 2}),
        HistoryEvent(),
        lease_end(2),
    ):
        assert writer.submit(event)
    assert writer.flush(30.0)
    assert (count(path, "lease_ends"), count(path, "objects"), count(path, "fingerprints")) == (2, 1, 0)
    health = writer.health()
    assert (health.rejected, health.state) == (4, CatalogState.OK)


def test_the_thread_outlives_an_error_in_its_own_code(path, start, monkeypatch):
    writer = start()
    assert writer.flush(30.0)

    def write_history(events):
        monkeypatch.undo()
        raise RuntimeError("a mistake in the code")

    monkeypatch.setattr(writer._store, "write_history", write_history)
    writer.submit(lease_end(1))
    eventually(lambda: writer.health().rejected == 1, "the batch is given up and counted")
    writer.submit(lease_end(2))
    assert writer.flush(30.0)
    assert [row.lease_id for row in CatalogReader(path).lease_ends()] == ["lease-2"]
    assert (writer.health().state, writer.health().errors) == (CatalogState.OK, 1)


def test_overload_drops_are_counted_and_shown_and_end(path, start):
    writer = start(history_capacity=1_000)
    accepted = 0
    while writer.health().dropped < 500:
        accepted += writer.submit(lease_end(accepted))
    health = writer.health()
    assert health.dropped >= 500
    assert writer.flush(30.0)
    writer.submit(lease_end(0))
    assert writer.flush(30.0)
    assert count(path, "lease_ends") == accepted + 1, (
        "what was accepted is written, what was dropped is counted"
    )
    assert writer.health().state is CatalogState.OK


def test_dropped_objects_are_told_so_that_the_projection_can_be_renewed(start):
    writer = start(history_capacity=4)
    assert not writer.submit(stored_batch(*range(5)))
    health = writer.health()
    assert health.objects_stale
    assert health.dropped == 5


def test_history_on_disk_is_bounded(path, start):
    writer = start(history_rows_kept=500)
    for number in range(5_000):
        assert writer.submit(lease_end(number))
        if number % 500 == 0:
            assert writer.flush(30.0)
    assert writer.flush(30.0)
    eventually(lambda: count(path, "lease_ends") < 2_500, "old rows are pruned")
    newest = CatalogReader(path).lease_ends(limit=1)[0]
    assert newest.lease_id == "lease-4999"


def test_a_reader_never_meets_a_lock_while_ten_thousand_rows_are_written(path, start):
    seen = Acknowledgements()
    writer = start(seen)
    assert writer.flush(30.0)
    eventually(lambda: writer.health().state is CatalogState.OK, "the file is open")
    finished = threading.Event()
    failures: list[Exception] = []
    reads = [0, 0]

    def read(who):
        reader = CatalogReader(path)
        while not finished.is_set() or not reads[who]:
            try:
                assert len(reader.lease_ends(limit=1_000)) <= 1_000
                reader.totals()
                reads[who] += 1
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=read, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    for number in range(10_000):
        assert writer.submit(lease_end(number) if number % 2 else stored_batch(number))
        if number % 500 == 0:
            writer.submit_control(number, setting(number, at=float(number)))
            assert seen.wait_for(number) is None
    assert writer.flush(60.0)
    finished.set()
    for thread in threads:
        thread.join(60.0)
    assert failures == []
    assert min(reads) > 0
    assert (count(path, "lease_ends"), count(path, "objects")) == (5_000, 5_000)
    assert writer.health().errors == 0


def test_stopping_writes_what_waits(path):
    seen = Acknowledgements()
    writer = CatalogWriter(path, on_durable=seen)
    writer.start()
    for number in range(5_000):
        writer.submit(lease_end(number))
    writer.submit_control(1, clear(1))
    assert writer.stop(30.0)
    assert seen.outcomes == {1: None}
    assert count(path, "lease_ends") == 5_000
    assert not writer.submit(lease_end(1))
    with pytest.raises(CatalogUnavailable):
        writer.submit_control(2, clear(2))
    assert writer.health().state is CatalogState.DOWN


def test_a_writer_that_never_started_takes_history_and_refuses_control(path):
    seen = Acknowledgements()
    writer = CatalogWriter(path, on_durable=seen)
    assert writer.submit(lease_end(1))
    with pytest.raises(CatalogUnavailable, match="not opened"):
        writer.submit_control(1, clear(1))
    assert not writer.stop(1.0), "something was left behind"
    assert not path.exists()


def test_an_acknowledgement_that_raises_harms_nobody_else(path, start):
    seen = Acknowledgements()

    def on_durable(token, error):
        if token == 1:
            raise RuntimeError("the requester is gone")
        seen(token, error)

    writer = start(on_durable)
    writer.submit_control(1, clear(1))
    writer.submit_control(2, clear(2))
    assert seen.wait_for(2) is None
    assert len(CatalogReader(path).clears()) == 2
    assert writer.health().errors == 1


ACKNOWLEDGE_AND_DIE = """
import os, pathlib, signal, sys
from appliance.catalog.events import ClearRecorded, SettingChanged
from appliance.catalog.writer import CatalogWriter

def on_durable(token, error):
    assert error is None, error
    if token == 2:
        os.kill(os.getpid(), signal.SIGKILL)

writer = CatalogWriter(pathlib.Path(sys.argv[1]), on_durable=on_durable)
writer.start()
writer.submit_control(1, SettingChanged("read_ttl_seconds", "", 60, 1.0, "admin"))
writer.submit_control(2, ClearRecorded(8, "all", "", "admin", 2.0, 3, 4))
writer.flush(60.0)
"""


def test_what_was_acknowledged_survives_a_kill_at_that_moment(path):
    done = subprocess.run(
        [sys.executable, "-c", ACKNOWLEDGE_AND_DIE, str(path)], cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    state = load_control_state(path)
    assert [(row.name, row.value) for row in state.settings] == [("read_ttl_seconds", 60)]
    assert state.highest_epoch == 8


def test_submitting_never_waits_for_the_disk(path, start):
    writer = start(busy_timeout_seconds=30.0)
    assert writer.flush(30.0)
    eventually(lambda: writer.health().state is CatalogState.OK, "the file is open")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    answered = threading.Event()

    def submit():
        for number in range(5_000):
            writer.submit(lease_end(number))
        writer.submit_control(1, clear(1))
        writer.health()
        writer.refuse_overdue()
        answered.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert answered.wait(20.0), "a call waited while the writer was stuck for its 30 s"
    assert count(path, "lease_ends") == 0, "the lock was not in the way: this shows nothing"
    holder.close()
    thread.join()
    assert writer.flush(60.0)
    assert count(path, "lease_ends") == 5_000
