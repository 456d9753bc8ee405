"""Events and control rows as they arrive in the tables."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import select

from appliance.catalog.apply import apply_control, apply_history, prune_history
from appliance.catalog.connections import driver_connection, write_transaction
from appliance.catalog.database import open_for_daemon
from appliance.catalog.events import EngineEnded, ObjectsForgotten, ObjectsUsed, UsedObject
from appliance.catalog.models import (
    ClearRow,
    EngineRow,
    EvictionRow,
    FingerprintFieldRow,
    FingerprintRow,
    LeaseEndRow,
    ObjectGroupRow,
    ObjectRow,
    RestartRow,
    SettingHistoryRow,
    SettingRow,
)
from appliance.fingerprint import flatten
from tests.unit.catalog.samples import (
    NAMESPACE,
    OTHER_NAMESPACE,
    chunk_key,
    clear,
    engine,
    fingerprint,
    lease_end,
    record,
    removed_batch,
    restart,
    setting,
    stored_batch,
)


@pytest.fixture
def connection(tmp_path):
    engine_ = open_for_daemon(tmp_path / "catalog.db")
    with engine_.connect() as connection:
        yield connection


def _apply(connection, *events):
    with write_transaction(connection, durable=False):
        apply_history(connection, events)


def _control(connection, row):
    with write_transaction(connection, durable=True):
        return apply_control(connection, row)


def _rows(connection, table, *columns):
    with connection.begin():
        chosen = [getattr(table, column) for column in columns] or [table.__table__]
        return [tuple(row) for row in connection.execute(select(*chosen))]


def test_an_engine_keeps_its_first_sighting_and_ends_with_its_cause(connection):
    _apply(connection, engine(at=1.0), engine(at=5.0, state="suspect"), engine("engine-2", at=6.0))
    columns = ("engine_id", "state", "first_seen_unix", "last_seen_unix", "ended_unix", "end_cause")
    assert _rows(connection, EngineRow, *columns) == [
        ("engine-1", "suspect", 1.0, 5.0, None, None),
        ("engine-2", "live", 6.0, 6.0, None, None),
    ]
    _apply(connection, EngineEnded("engine-1", "s1", "bye", 7.0), EngineEnded("nobody", "s1", "bye", 7.0))
    assert _rows(connection, EngineRow, *columns)[0] == ("engine-1", "ended", 1.0, 5.0, 7.0, "bye")
    assert len(_rows(connection, EngineRow)) == 2


def test_a_fingerprint_brings_its_fields_and_groups(connection):
    _apply(connection, fingerprint(at=1.0), fingerprint(at=9.0))
    [(namespace, model, text, first, last)] = _rows(connection, FingerprintRow)
    assert (namespace, model, json.loads(text), first, last) == (NAMESPACE, "tiny/hybrid", record(), 1.0, 9.0)
    fields = {field: json.loads(value) for _, field, value in _rows(connection, FingerprintFieldRow)}
    assert fields == dict(flatten(record()))
    assert _rows(
        connection, ObjectGroupRow, "group_index", "kind", "shards", "replicas", "window_chunks"
    ) == [
        (0, "attention", 2, 1, 0),
        (1, "recurrent", 1, 2, 1),
    ]


def test_objects_come_change_and_go(connection):
    _apply(connection, stored_batch(1, 2), stored_batch(1, shard=1), stored_batch(1, group_index=1))
    assert len(_rows(connection, ObjectRow)) == 4
    _apply(connection, stored_batch(1, 2))
    assert len(_rows(connection, ObjectRow)) == 4, "storing twice is one object"
    checksums = {int.from_bytes(row[0], "big") for row in _rows(connection, ObjectRow, "checksum")}
    assert checksums == {2**64 - 2, 2**64 - 3}
    _apply(connection, ObjectsUsed((UsedObject(NAMESPACE, chunk_key(1), 0, 260.0),)))
    used = [
        row
        for row in _rows(connection, ObjectRow, "group_index", "shard", "last_used_unix")
        if row[2] == 260.0
    ]
    assert sorted(used) == [(0, 0, 260.0), (0, 1, 260.0)]
    _apply(connection, removed_batch(1))
    left = sorted(_rows(connection, ObjectRow, "chunk_key", "group_index"))
    assert left == sorted([(chunk_key(2), 0), (chunk_key(1), 1)]), (
        "all shards of the chunk's group go, no other group"
    )
    assert _rows(connection, EvictionRow, "chunk_key", "bytes", "cause", "idle_seconds", "evicted_unix") == [
        (chunk_key(1), 8192, "evicted", 3.0, 230.0)
    ]


def test_order_decides_within_a_batch(connection):
    _apply(connection, stored_batch(1), removed_batch(1), stored_batch(1))
    assert len(_rows(connection, ObjectRow)) == 1
    _apply(connection, stored_batch(2), removed_batch(2))
    assert len(_rows(connection, ObjectRow)) == 1


def test_objects_of_one_namespace_or_of_all_are_forgotten(connection):
    _apply(connection, stored_batch(1, 2), stored_batch(1, namespace=OTHER_NAMESPACE))
    _apply(connection, ObjectsForgotten(NAMESPACE))
    assert _rows(connection, ObjectRow, "namespace") == [(OTHER_NAMESPACE,)]
    _apply(connection, ObjectsForgotten())
    assert _rows(connection, ObjectRow) == []
    assert _rows(connection, EvictionRow) == []


def test_a_start_is_recorded_and_ends_the_sessions_of_the_boot_before(connection):
    _apply(connection, engine(at=10.0), engine("engine-2", at=60.0), restart(at=50.0), restart(at=50.0))
    assert _rows(connection, RestartRow) == [
        ("boot-1", 50.0, "warm", "every gate passed", '{"lock":"held","magic":"ok"}', 1)
    ]
    assert _rows(connection, EngineRow, "engine_id", "state", "end_cause") == [
        ("engine-1", "ended", "daemon restarted"),
        ("engine-2", "live", None),
    ]


def test_the_history_of_a_setting_tells_before_and_after(connection):
    _control(connection, setting(60, at=1.0))
    _control(connection, setting(90, at=2.0))
    _control(connection, setting(5, scope=NAMESPACE, at=3.0))
    _control(connection, setting(None, at=4.0))
    assert _rows(connection, SettingRow, "name", "scope", "value") == [("read_ttl_seconds", NAMESPACE, "5")]
    assert _rows(connection, SettingHistoryRow, "scope", "before", "after", "changed_unix") == [
        ("", None, "60", 1.0),
        ("", "60", "90", 2.0),
        (NAMESPACE, None, "5", 3.0),
        ("", "90", None, 4.0),
    ]


def test_repeating_a_control_row_records_it_once(connection):
    assert _control(connection, setting(60)) == _control(connection, setting(60))
    assert _control(connection, clear(3)) == _control(connection, clear(3))
    assert len(_rows(connection, SettingHistoryRow)) == 1
    assert _rows(connection, ClearRow, "epoch", "scope", "namespace", "removed_objects", "removed_bytes") == [
        (3, "all", "", 7, 9)
    ]


def test_a_change_back_to_an_older_value_is_a_change(connection):
    for at, value in enumerate([60, 90, 60]):
        _control(connection, setting(value, at=float(at)))
    assert [row[0] for row in _rows(connection, SettingHistoryRow, "after")] == ["60", "90", "60"]
    assert _rows(connection, SettingRow, "value") == [("60",)]


def test_old_history_is_pruned_from_its_oldest_end(connection):
    _apply(connection, *[lease_end(number) for number in range(10)], removed_batch(*range(7)))
    with write_transaction(connection, durable=False):
        assert prune_history(connection, keep_rows=4) == 6 + 3
    assert [row[0] for row in _rows(connection, LeaseEndRow, "lease_id")] == [
        f"lease-{n}" for n in range(6, 10)
    ]
    assert [row[0] for row in _rows(connection, EvictionRow, "chunk_key")] == [
        chunk_key(n) for n in range(3, 7)
    ]


def test_a_durable_transaction_waits_for_the_disk_and_an_ordinary_one_does_not(connection):
    modes = []
    for durable in (False, True, False):
        with write_transaction(connection, durable=durable):
            modes.append(driver_connection(connection).execute("PRAGMA synchronous").fetchone()[0])
    assert modes == [1, 2, 1], "1 is NORMAL, 2 is FULL"


def test_a_transaction_that_fails_leaves_nothing(connection):
    with pytest.raises(ValueError, match="not JSON"):
        _apply(connection, lease_end(1), fingerprint(scales=float("nan")))
    assert _rows(connection, LeaseEndRow) == []
