"""The catalog file as the writer thread holds it: opened, watched for being moved, written in transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from appliance.catalog.apply import apply_control, apply_history, prune_history
from appliance.catalog.connections import reading_engine, write_transaction
from appliance.catalog.database import file_mark, open_for_daemon, probe_write
from appliance.catalog.failures import FailureKind, diagnose
from appliance.catalog.recovery import ControlMemory, read_control_state
from appliance.errors import CatalogUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sqlalchemy import Connection

    from appliance.catalog.events import ControlRow, HistoryEvent

Identity = tuple[int, int]


def identity_of(path: Path) -> Identity | None:
    """Device and inode of the file at ``path``, ``None`` where there is none. Only ``stat``: see ``connections``."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


class CatalogStore:
    """One open catalog. Every method may raise what SQLite or the file system raises; none is thread-safe."""

    def __init__(self, path: Path, *, busy_timeout_seconds: float) -> None:
        self._path = path
        self._log_path = path.with_name(path.name + "-wal")
        self._busy_timeout_seconds = busy_timeout_seconds
        self._connection: Connection | None = None
        self._identity: Identity | None = None
        self._log_identity: Identity | None = None
        self._mark = 0
        self._memory: ControlMemory | None = None

    def ensure_open(self) -> bool:
        """Open the file if it is not open or no longer the one at its path; ``True`` if it lost what was in it.

        A file made or put in place while running gets back the control rows that were acknowledged.
        """
        if self._connection is not None:
            if identity_of(self._path) == self._identity:
                return False
            self.close()
        before = None if self._identity is None else (self._identity, self._mark)
        self._discard_orphaned_log()
        engine = open_for_daemon(self._path, busy_timeout_seconds=self._busy_timeout_seconds)
        self._connection = engine.connect()
        self._restore_control()
        self._identity = identity_of(self._path)
        self._log_identity = identity_of(self._log_path)
        self._mark = file_mark(self._connection)
        return before is not None and before != (self._identity, self._mark)

    def _discard_orphaned_log(self) -> None:
        """Remove the log of a file that was replaced: SQLite would apply it to the new file and damage that."""
        if self._log_identity is None or identity_of(self._path) == self._identity:
            return
        if identity_of(self._log_path) == self._log_identity:
            self._log_path.unlink()
            self._path.with_name(self._path.name + "-shm").unlink(missing_ok=True)

    def _restore_control(self) -> None:
        connection = self._open()
        with connection.begin():
            found = read_control_state(connection)
        if self._memory is None:
            self._memory = ControlMemory(found)
            return
        missing = self._memory.missing_from(found)
        if missing:
            with write_transaction(connection, durable=True):
                for row in missing:
                    apply_control(connection, row)

    def _open(self) -> Connection:
        assert self._connection is not None, "a write before ensure_open would be lost without an error"
        return self._connection

    def write_control(self, rows: Sequence[ControlRow]) -> list[CatalogUnavailable | None]:
        """Write rows in one durable transaction and see them through another connection.

        Returns for each row ``None``, or why this row alone can never be written.
        """
        try:
            proofs = self._commit_control(rows)
        except Exception as error:
            if diagnose(error).kind is not FailureKind.DATA:
                raise
            return [self._write_control_alone(row) for row in rows]
        self._confirm(proofs)
        self._remember(rows)
        return [None] * len(rows)

    def _write_control_alone(self, row: ControlRow) -> CatalogUnavailable | None:
        try:
            proofs = self._commit_control([row])
        except Exception as error:
            failure = diagnose(error)
            if failure.kind is not FailureKind.DATA:
                raise
            return CatalogUnavailable(failure.sentence, remedy=failure.remedy)
        self._confirm(proofs)
        self._remember([row])
        return None

    def _commit_control(self, rows: Sequence[ControlRow]) -> list[tuple[str, int]]:
        connection = self._open()
        with write_transaction(connection, durable=True):
            return [apply_control(connection, row) for row in rows]

    def _remember(self, rows: Sequence[ControlRow]) -> None:
        assert self._memory is not None, "a file that vanishes could not get its control rows back"
        for row in rows:
            self._memory.remember(row)

    def _confirm(self, proofs: Sequence[tuple[str, int]]) -> None:
        """Raise unless another connection, opened by path, sees the rows.

        A commit into a file that was deleted, replaced or overwritten succeeds without an error.
        """
        engine = reading_engine(self._path, busy_timeout_seconds=self._busy_timeout_seconds)
        try:
            with engine.connect() as other:
                seen = [self._exists(other, table, rowid) for table, rowid in proofs]
        except DBAPIError as error:
            if diagnose(error).kind is FailureKind.TRANSIENT and identity_of(self._path) == self._identity:
                return  # somebody locked the file after the commit; it is the right file and the rows are in it
            raise
        if not all(seen):
            raise CatalogUnavailable("The catalog file does not hold what was committed to it.")

    def _exists(self, connection: Connection, table: str, rowid: int) -> bool:
        query = text(f"SELECT count(*) FROM {table} WHERE rowid = :rowid")  # noqa: S608
        return connection.execute(query, {"rowid": rowid}).scalar() == 1

    def write_history(self, events: Sequence[HistoryEvent]) -> int:
        """Write events in one transaction; returns the rows of those that can never be written and were left out."""
        connection = self._open()
        try:
            with write_transaction(connection, durable=False):
                apply_history(connection, events)
            return 0
        except Exception as error:
            if diagnose(error).kind is not FailureKind.DATA:
                raise
        return self._write_one_by_one(events)

    def _write_one_by_one(self, events: Sequence[HistoryEvent]) -> int:
        connection = self._open()
        rejected = 0
        for event in events:
            try:
                with write_transaction(connection, durable=False):
                    apply_history(connection, [event])
            except Exception as error:
                if diagnose(error).kind is not FailureKind.DATA:
                    raise
                rejected += event.rows
        return rejected

    def prune(self, keep_rows: int) -> None:
        """Delete the oldest lease ends and evictions beyond ``keep_rows`` each."""
        connection = self._open()
        with write_transaction(connection, durable=False):
            prune_history(connection, keep_rows)

    def probe(self) -> None:
        """Write something harmless, to see whether writing works again."""
        probe_write(self._open())

    def close(self) -> None:
        """Close the file; the identity stays known, so that the next open notices another file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            connection.engine.dispose()
