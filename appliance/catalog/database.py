"""Opening the catalog for writing: directory, identity, integrity, schema.

The daemon calls :func:`open_for_daemon` before it touches the arena, so that a catalog that cannot be used ends the
start before anything is changed. The writer calls it again whenever the file was deleted, replaced or damaged.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from importlib import resources
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

import migrations
from appliance.catalog.connections import driver_connection, reading_engine, write_transaction, writing_engine
from appliance.catalog.failures import FailureKind, diagnose, waits_for_space_or_lock
from appliance.errors import CatalogUnreadable

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection, Engine

APPLICATION_ID = 0x50475744
"""``PGWD`` in the file's header: tells a Pagewarden catalog from any other SQLite file."""

BUSY_TIMEOUT_SECONDS = 1.0
QUICK_CHECK_SECONDS = 1.0
CONTROL_TABLES = ("settings", "settings_history", "clears")
_MOVE_AWAY = "Move the file and its -wal and -shm companions away; a new one is made. This costs history, not the cache."
_migration_lock = threading.Lock()


def open_for_daemon(path: Path, *, busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS) -> Engine:
    """An engine that writes the catalog at ``path``, created and migrated as needed.

    The check of the file is whole for control rows and bounded in time (``QUICK_CHECK_SECONDS``) for the rest, which
    can be rebuilt or lost.

    Raises:
        CatalogUnreadable: with the remedy, if the directory cannot be made, the file is no database, damaged, locked,
            not writable, not a Pagewarden catalog, or newer than this version.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CatalogUnreadable(
            f"The catalog's directory {path.parent} cannot be made: {error.strerror}.",
            remedy="Name another file with --catalog or make the directory writable.",
            path=str(path),
        ) from error
    engine = writing_engine(path, busy_timeout_seconds=busy_timeout_seconds)
    try:
        revision = _recognise(path, busy_timeout_seconds)
        with engine.connect() as connection:
            if revision is not None:
                _check_integrity(path, connection)
            if revision != migrations.HEAD:
                _migrate(connection)
            else:
                _check_writable(connection)
    except CatalogUnreadable:
        engine.dispose()
        raise
    except Exception as error:
        engine.dispose()
        failure = diagnose(error)
        sentence = failure.sentence
        if failure.kind is FailureKind.DATA:
            sentence = f"The catalog's tables could not be brought up to date: {error}."
        raise CatalogUnreadable(
            f"{sentence} File: {path}.", remedy=failure.remedy or _MOVE_AWAY, path=str(path)
        ) from error
    return engine


def _recognise(path: Path, busy_timeout_seconds: float) -> str | None:
    """The revision of the file's schema, ``None`` for a file that is missing or empty.

    Looks through a read-only connection: opening for writing would turn a stranger's database to WAL.

    Raises:
        CatalogUnreadable: if the file is somebody else's or from a newer version.
    """
    if not path.exists():
        return None
    if not path.is_file():
        raise CatalogUnreadable(f"{path} is no file.", remedy="Name a file with --catalog.", path=str(path))
    if path.stat().st_size == 0:
        return None
    with reading_engine(path, busy_timeout_seconds=busy_timeout_seconds).connect() as connection:
        return _revision(path, driver_connection(connection))


def _revision(path: Path, raw: sqlite3.Connection) -> str | None:
    tables = {name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    (application_id,) = raw.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID or "alembic_version" not in tables:
        raise CatalogUnreadable(
            f"{path} is a SQLite database, but no Pagewarden catalog.",
            remedy="Name another file with --catalog.",
            path=str(path),
        )
    row = raw.execute("SELECT version_num FROM alembic_version").fetchone()
    revision = None if row is None else str(row[0])
    if revision is not None and revision != migrations.HEAD and revision not in _known_revisions():
        raise CatalogUnreadable(
            f"The catalog {path} has schema {revision}, which is newer than this version ({migrations.HEAD}).",
            remedy="Run the newer version again, or move the file away, which costs history, not the cache.",
            path=str(path),
            revision=revision,
        )
    return revision


def _known_revisions() -> frozenset[str]:
    from alembic.script import ScriptDirectory

    return frozenset(script.revision for script in ScriptDirectory(_script_location()).walk_revisions())


def _script_location() -> str:
    return str(resources.files(migrations))


def _check_integrity(path: Path, connection: Connection) -> None:
    raw = driver_connection(connection)
    present = {name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    findings = [
        text
        for table in CONTROL_TABLES
        if table in present
        for (text,) in raw.execute(f"PRAGMA quick_check({table})").fetchmany(1)
    ]
    findings += _bounded_quick_check(raw)
    damage = [text for text in findings if text != "ok"]
    if damage:
        raise CatalogUnreadable(
            f"The catalog {path} is damaged: {damage[0].splitlines()[0]}.", remedy=_MOVE_AWAY, path=str(path)
        )


def _bounded_quick_check(raw: sqlite3.Connection) -> list[str]:
    """What ``quick_check`` finds within ``QUICK_CHECK_SECONDS``; a large history is checked in part."""
    until = time.monotonic() + QUICK_CHECK_SECONDS
    raw.set_progress_handler(lambda: time.monotonic() > until, 100_000)
    try:
        return [text for (text,) in raw.execute("PRAGMA quick_check(1)").fetchall()]
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return []
    finally:
        raw.set_progress_handler(None, 0)


def _migrate(connection: Connection) -> None:
    """Bring the schema to this version in one transaction: a migration that fails leaves the file as it was."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", _script_location().replace("%", "%%"))
    config.attributes["connection"] = connection
    # Alembic's context is a module-wide proxy: two upgrades at once in one process would mix their connections.
    with _migration_lock, write_transaction(connection, durable=True):
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        if file_mark(connection) == 0:
            connection.exec_driver_sql(f"PRAGMA user_version = {1 + secrets.randbelow(2**31 - 1)}")
        command.upgrade(config, "head")


def _check_writable(connection: Connection) -> None:
    """Write the header for real: an empty transaction succeeds on a read-only file system.

    A file that is locked or full at this moment can be read and will be written later, so it passes.
    """
    try:
        probe_write(connection)
    except DBAPIError as error:
        if not waits_for_space_or_lock(error):
            raise


def probe_write(connection: Connection) -> None:
    """Write one page in a transaction of its own, changing nothing; raises what SQLite raises."""
    with write_transaction(connection, durable=False):
        connection.exec_driver_sql(f"PRAGMA user_version = {file_mark(connection)}")


def file_mark(connection: Connection) -> int:
    """The random number that a catalog is given when it is made: inode numbers are used again, these are not."""
    (mark,) = driver_connection(connection).execute("PRAGMA user_version").fetchone()
    return int(mark)
