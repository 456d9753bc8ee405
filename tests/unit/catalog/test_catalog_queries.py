"""The read-only view, over a real file."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import replace

import pytest

from appliance.catalog.apply import apply_control, apply_history
from appliance.catalog.connections import write_transaction
from appliance.catalog.database import open_for_daemon
from appliance.catalog.queries import CatalogReader, FieldDifference, GroupTotal
from appliance.catalog.records import ObjectKey
from appliance.errors import CatalogUnavailable
from appliance.fingerprint import differences, flatten
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
def path(tmp_path):
    return tmp_path / "catalog.db"


@pytest.fixture
def put(path):
    """Writes history events and control rows into the catalog."""
    engine_ = open_for_daemon(path)
    with engine_.connect() as connection:

        def write(*events, control=()):
            with write_transaction(connection, durable=False):
                apply_history(connection, events)
                for row in control:
                    apply_control(connection, row)

        yield write


@pytest.fixture
def reader(path, put):
    return CatalogReader(path)


def test_an_empty_catalog_has_empty_answers(reader):
    answers = [
        reader.engines(),
        reader.fingerprints(),
        reader.groups(NAMESPACE),
        reader.lease_ends(),
        reader.evictions(),
        reader.restarts(),
        reader.settings(),
        reader.setting_changes(),
        reader.clears(),
        reader.objects(NAMESPACE),
        reader.totals(),
        reader.differing_fields(NAMESPACE, OTHER_NAMESPACE),
    ]
    assert answers == [[]] * 12
    assert reader.fingerprint_fields(NAMESPACE) == {}


def test_engines_come_last_seen_first(reader, put):
    put(engine("a", at=1.0), engine("b", at=3.0), engine("c", at=2.0, namespace=OTHER_NAMESPACE))
    assert [row.engine_id for row in reader.engines()] == ["b", "c", "a"]
    assert [row.engine_id for row in reader.engines(namespace=NAMESPACE)] == ["b", "a"]
    first = reader.engines(limit=1)[0]
    assert (first.ranks, first.chunk_tokens, first.state, first.ended_unix) == (2, 768, "live", None)


def test_a_fingerprint_comes_back_as_it_was(reader, put):
    put(fingerprint())
    [found] = reader.fingerprints(model="tiny/hybrid")
    assert found.record == record()
    assert reader.fingerprints(model="another") == []
    assert reader.fingerprint_fields(NAMESPACE) == dict(flatten(record()))
    assert [(group.name, group.kind, group.object_bytes) for group in reader.groups(NAMESPACE)] == [
        ("attention", "attention", 4096),
        ("state", "recurrent", 8192),
    ]


def test_differing_fields_are_those_of_the_fingerprints_themselves(reader, put):
    put(fingerprint(), fingerprint(OTHER_NAMESPACE, state_dtype="bfloat16", scales=[1, 2]))
    found = reader.differing_fields(NAMESPACE, OTHER_NAMESPACE)
    assert found == [
        FieldDifference("cache.scales", None, [1, 2]),
        FieldDifference("cache.state_dtype", "float32", "bfloat16"),
    ]
    assert found == differences(record(), record(state_dtype="bfloat16", scales=[1, 2]))
    assert [entry.ours for entry in reader.differing_fields(OTHER_NAMESPACE, NAMESPACE)] == [
        [1, 2],
        "bfloat16",
    ]
    assert reader.differing_fields(NAMESPACE, NAMESPACE) == []


def test_lease_ends_are_paged_newest_first(reader, put):
    put(*[lease_end(number) for number in range(7)], lease_end(7, namespace=OTHER_NAMESPACE))
    first = reader.lease_ends(limit=3)
    assert [row.lease_id for row in first] == ["lease-7", "lease-6", "lease-5"]
    second = reader.lease_ends(limit=3, before_id=first[-1].end_id)
    assert [row.lease_id for row in second] == ["lease-4", "lease-3", "lease-2"]
    ours = reader.lease_ends(namespace=NAMESPACE, engine_id="engine-1")
    assert [row.lease_id for row in ours] == ["lease-5", "lease-3", "lease-1"]
    assert (ours[0].chunks, ours[0].bytes, ours[0].renewals, ours[0].cause) == (3, 12288, 2, "released")


def test_evictions_are_paged_newest_first(reader, put):
    put(removed_batch(1, 2, 3), removed_batch(4, cause="cleared"))
    newest, *_ = reader.evictions(limit=2)
    assert (newest.chunk_key, newest.cause) == (chunk_key(4), "cleared")
    rest = reader.evictions(namespace=NAMESPACE, before_id=newest.eviction_id)
    assert [row.chunk_key for row in rest] == [chunk_key(3), chunk_key(2), chunk_key(1)]
    assert reader.evictions(namespace=OTHER_NAMESPACE) == []


def test_settings_and_their_history(reader, put):
    put(control=[setting(60, at=1.0), setting({"a": [1, None]}, name="odd", at=2.0), setting(None, at=3.0)])
    assert [(row.name, row.value) for row in reader.settings()] == [("odd", {"a": [1, None]})]
    changes = reader.setting_changes(name="read_ttl_seconds")
    assert [(row.before, row.after) for row in changes] == [(60, None), (None, 60)]
    assert [row.after for row in reader.setting_changes(before_id=changes[0].change_id)] == [
        {"a": [1, None]},
        60,
    ]


def test_clears_and_restarts(reader, put):
    put(
        restart(at=1.0),
        replace(restart("boot-2", at=2.0), mode="cold", clean_stop=False),
        control=[clear(1), clear(2)],
    )
    assert [(row.boot_id, row.mode, row.clean_stop) for row in reader.restarts()] == [
        ("boot-2", "cold", False),
        ("boot-1", "warm", True),
    ]
    assert reader.restarts()[0].gates == {"lock": "held", "magic": "ok"}
    newest, oldest = reader.clears()
    assert (newest.epoch, oldest.epoch) == (2, 1)
    assert reader.clears(before_id=newest.clear_id) == [oldest]


def test_pages_of_objects_cover_every_object_once(reader, put):
    numbers = range(60)
    put(stored_batch(*numbers), stored_batch(*numbers, shard=1), stored_batch(*numbers, group_index=1))
    put(stored_batch(99, namespace=OTHER_NAMESPACE))
    for limit in (1, 7, 1000):
        seen, after = [], None
        while page := reader.objects(NAMESPACE, after=after, limit=limit):
            seen += page
            after = page[-1].key
        keys = [row.key for row in seen]
        assert keys == sorted(keys)
        assert set(keys) == {
            ObjectKey(chunk_key(n), g, s) for n in numbers for g, s in ((0, 0), (0, 1), (1, 0))
        }
        assert len(keys) == 180
    states = reader.objects(NAMESPACE, group_index=1)
    assert {row.group_index for row in states} == {1}
    assert len(states) == 60
    assert {row.checksum for row in states} == {2**64 - 1 - number for number in numbers}


def test_objects_are_found_by_the_beginning_of_their_key(reader, put):
    put(stored_batch(*range(300)))
    prefix = chunk_key(17)[:1]
    expected = sorted(chunk_key(number) for number in range(300) if chunk_key(number)[:1] == prefix)
    assert [row.chunk_key for row in reader.objects(NAMESPACE, chunk_key_prefix=prefix)] == expected
    assert [row.chunk_key for row in reader.objects(NAMESPACE, chunk_key_prefix=chunk_key(17))] == [
        chunk_key(17)
    ]


def test_totals_by_namespace_and_group(reader, put):
    put(stored_batch(1, 2, 3), stored_batch(1, group_index=1), stored_batch(5, namespace=OTHER_NAMESPACE))
    assert reader.totals() == [
        GroupTotal(NAMESPACE, 0, 3, 12288),
        GroupTotal(NAMESPACE, 1, 1, 4096),
        GroupTotal(OTHER_NAMESPACE, 0, 1, 4096),
    ]


def test_totals_and_pages_are_answered_from_an_index(path, put):
    raw = sqlite3.connect(path)
    plans = {
        "SELECT namespace, group_index, count(*), sum(bytes) FROM objects GROUP BY namespace, group_index": "COVERING",
        "SELECT * FROM objects WHERE namespace = 'n' AND (chunk_key, group_index, shard) > (x'00', 0, 0)"
        " ORDER BY chunk_key, group_index, shard LIMIT 10": "PRIMARY KEY",
        "SELECT * FROM lease_ends WHERE namespace = 'n' ORDER BY end_id DESC LIMIT 10": "ix_lease_ends_namespace",
        "SELECT * FROM evictions WHERE namespace = 'n' ORDER BY eviction_id DESC LIMIT 10": "ix_evictions_namespace",
        "SELECT * FROM engines ORDER BY last_seen_unix DESC LIMIT 10": "ix_engines_last_seen_unix",
    }
    for query, word in plans.items():
        plan = " / ".join(row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {query}"))
        assert word in plan, plan
        assert "TEMP B-TREE" not in plan, plan
    raw.close()


def test_a_missing_file_is_unavailable_and_is_not_made(tmp_path):
    path = tmp_path / "nothing.db"
    with pytest.raises(CatalogUnavailable, match="cannot be opened"):
        CatalogReader(path).settings()
    assert list(tmp_path.iterdir()) == []


def test_a_file_kept_by_another_process_is_unavailable(path, tmp_path):
    open_for_daemon(path).dispose()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN IMMEDIATE")
    holder.execute("PRAGMA user_version = 7")
    reader = CatalogReader(path, busy_timeout_seconds=0.05)
    with pytest.raises(CatalogUnavailable, match="lock"):
        reader.totals()
    holder.close()
    assert reader.totals() == []


def test_a_damaged_or_strange_file_is_unavailable(tmp_path):
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(os.urandom(8192))
    with pytest.raises(CatalogUnavailable, match="no SQLite database"):
        CatalogReader(garbage).engines()
    other = tmp_path / "other.db"
    raw = sqlite3.connect(other)
    raw.execute("CREATE TABLE engines (theirs)")
    raw.commit()
    raw.close()
    with pytest.raises(CatalogUnavailable, match="not the ones"):
        CatalogReader(other).engines()


def test_a_value_that_is_no_json_is_unavailable(path, put, reader):
    raw = sqlite3.connect(path)
    raw.execute("INSERT INTO settings VALUES ('a', '', '{broken', 1.0, 'x')")
    raw.commit()
    raw.close()
    with pytest.raises(CatalogUnavailable):
        reader.settings()


def test_the_reader_cannot_write(reader):
    with pytest.raises(CatalogUnavailable, match="cannot be written"), reader.reading() as connection:
        connection.exec_driver_sql("DELETE FROM settings")
