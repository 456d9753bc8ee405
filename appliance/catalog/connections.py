"""SQLAlchemy engines for the catalog: the one that writes and the ones that only read.

Never open the catalog file with anything but SQLite in a process that has it open: closing any other descriptor of
the file drops SQLite's POSIX locks. Only ``stat`` is safe.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sqlalchemy import create_engine, event
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine

WAL_LIMIT_BYTES = 64 << 20
"""The write-ahead log is cut back to this size after a checkpoint."""


def driver_connection(connection: Connection) -> sqlite3.Connection:
    """The ``sqlite3`` connection below a SQLAlchemy one; reaching for it begins no transaction."""
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection), "another driver's pragmas would be accepted in silence"
    return raw


def writing_engine(path: Path, *, busy_timeout_seconds: float) -> Engine:
    """An engine whose connections write ``path``: WAL, explicit ``BEGIN IMMEDIATE``, each connection its own file.

    ``synchronous`` is NORMAL: a commit survives the process, not a power cut, unless the transaction is begun through
    :func:`write_transaction` with ``durable=True``.
    """

    def connect() -> sqlite3.Connection:
        raw = sqlite3.connect(
            path, timeout=busy_timeout_seconds, isolation_level=None, check_same_thread=False
        )
        try:
            raw.execute("PRAGMA journal_mode = WAL").fetchall()
            raw.execute("PRAGMA synchronous = NORMAL")
            raw.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}").fetchall()
        except BaseException:
            raw.close()
            raise
        return raw

    return _engine(connect, begin="BEGIN IMMEDIATE")


def reading_engine(path: Path, *, busy_timeout_seconds: float) -> Engine:
    """An engine whose connections can only read ``path`` and never create it."""
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            uri, uri=True, timeout=busy_timeout_seconds, isolation_level=None, check_same_thread=False
        )

    return _engine(connect, begin="BEGIN")


def _engine(connect: Any, *, begin: str) -> Engine:
    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


@contextmanager
def write_transaction(connection: Connection, *, durable: bool) -> Iterator[None]:
    """One transaction, rolled back if the block raises.

    ``durable`` makes the commit wait for the disk (``synchronous = FULL``), which also makes every earlier commit in
    the log durable.
    """
    raw = driver_connection(connection)
    raw.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    with connection.begin():
        yield
