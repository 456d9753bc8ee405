"""The migrations give exactly the tables that the models describe."""

from __future__ import annotations

import sqlite3

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

import migrations
from appliance.catalog import database
from appliance.catalog.database import open_for_daemon
from appliance.catalog.models import Base


def _schema(connection):
    rows = connection.exec_driver_sql(
        "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'alembic_version'"
    )
    # One line is one column or constraint; Alembic sorts the constraints differently.
    return {name: sorted(line.strip().rstrip(",") for line in text.splitlines()) for name, text in rows}


def test_migrating_an_empty_file_gives_the_models(tmp_path):
    engine = open_for_daemon(tmp_path / "catalog.db")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
        migrated = _schema(connection)
    memory = create_engine("sqlite://")
    with memory.connect() as connection:
        Base.metadata.create_all(connection)
        created = _schema(connection)
    memory.dispose()
    assert migrated == created


def test_the_head_named_in_the_package_is_the_newest_script():
    assert ScriptDirectory(database._script_location()).get_heads() == [migrations.HEAD]


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "catalog.db"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA application_id = {database.APPLICATION_ID}")
    connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    connection.execute(
        "CREATE TABLE restarts (in_the_way INTEGER) STRICT"
    )  # the last table of the first migration
    connection.commit()
    before = connection.execute("SELECT name FROM sqlite_master ORDER BY name").fetchall()
    connection.close()
    with pytest.raises(database.CatalogUnreadable):
        open_for_daemon(path)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master ORDER BY name").fetchall() == before
    connection.close()
