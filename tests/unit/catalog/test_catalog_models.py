"""The tables as SQLite enforces them."""

from __future__ import annotations

import sqlite3

import pytest

from appliance.catalog.database import open_for_daemon
from appliance.catalog.models import TABLES, Base


@pytest.fixture
def raw(tmp_path):
    open_for_daemon(tmp_path / "catalog.db").dispose()
    connection = sqlite3.connect(tmp_path / "catalog.db", isolation_level=None)
    yield connection
    connection.close()


def test_every_table_is_strict(raw):
    strict = dict(raw.execute("SELECT name, strict FROM pragma_table_list WHERE type = 'table'"))
    assert {name: strict[name] for name in TABLES} == dict.fromkeys(TABLES, 1)


def _good_value(column):
    kind = str(column.type)
    if column.name == "chunk_key":
        return bytes(32)
    if column.name == "checksum":
        return bytes(8)
    words = {
        "state": "committed",
        "kind": "attention",
        "scope": "namespace",
        "mode": "cold",
        "role": "viewer",
    }
    return words.get(column.name, {"TEXT": "x", "INTEGER": 1, "REAL": 1.5, "BLOB": b"x"}[kind])


def _insert(raw, table, values):
    names = ", ".join(f'"{name}"' for name in values)
    marks = ", ".join("?" for _ in values)
    raw.execute(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", list(values.values()))


@pytest.mark.parametrize("name", TABLES)
def test_a_value_of_the_wrong_type_is_refused(raw, name):
    table = Base.metadata.tables[name]
    values = {column.name: _good_value(column) for column in table.columns}
    if name == "engines":
        values["state"] = "live"
    _insert(raw, table, values)
    assert raw.execute(f"SELECT count(*) FROM {name}").fetchone() == (1,)
    for column in table.columns:
        wrong = 1 if str(column.type) == "BLOB" else b"\x00"
        with pytest.raises(sqlite3.IntegrityError):
            _insert(raw, table, {**values, column.name: wrong})


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("engines", "state", "sleeping"),
        ("object_groups", "kind", "round"),
        ("object_groups", "shards", 0),
        ("objects", "chunk_key", b"short"),
        ("objects", "checksum", b"short"),
        ("objects", "state", "lost"),
        ("evictions", "chunk_key", b"short"),
        ("restarts", "mode", "tepid"),
        ("restarts", "clean_stop", 2),
        ("clears", "scope", "all"),  # with a namespace
    ],
)
def test_a_value_outside_its_range_is_refused(raw, table, column, value):
    columns = Base.metadata.tables[table].columns
    values = {each.name: _good_value(each) for each in columns}
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        _insert(raw, Base.metadata.tables[table], {**values, column: value})


def test_the_history_of_settings_can_only_grow(raw):
    raw.execute(
        "INSERT INTO settings_history (name, scope, before, after, changed_unix, changed_by)"
        " VALUES ('read_ttl_seconds', '', NULL, '60', 1.0, 'admin')"
    )
    for statement in ("UPDATE settings_history SET after = '61'", "DELETE FROM settings_history"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            raw.execute(statement)
    assert raw.execute("SELECT after FROM settings_history").fetchall() == [("60",)]
