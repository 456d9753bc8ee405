"""What a failed catalog operation means: whether to wait, to give up for now, or to blame the row."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from appliance.errors import PagewardenError


class FailureKind(StrEnum):
    """How the writer answers a failure."""

    TRANSIENT = "transient"  # will likely pass by itself
    LASTING = "lasting"  # somebody must do something
    DATA = "data"  # this row can never be written


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure in words: a sentence and what to do about it.

    ``reopen`` says that the next try must open the file afresh.
    """

    kind: FailureKind
    sentence: str
    remedy: str = ""
    reopen: bool = True


_LOCKED = Failure(
    FailureKind.TRANSIENT,
    "Another process holds the catalog's write lock.",
    "End the program that keeps the file locked.",
    reopen=False,
)
_FULL = Failure(FailureKind.LASTING, "The catalog's disk is full.", "Free space on it.", reopen=False)
_READ_ONLY = Failure(
    FailureKind.LASTING,
    "The catalog file or its directory cannot be written.",
    "Check its owner, its mode and whether its file system is mounted read-only.",
)
_CANNOT_OPEN = Failure(
    FailureKind.LASTING,
    "The catalog file cannot be opened.",
    "Check that the path is right and that this user may read and write it and its directory.",
)
_NO_DATABASE = Failure(
    FailureKind.LASTING,
    "The catalog file is no SQLite database or its header is damaged.",
    "Move the file and its -wal and -shm companions away; a new one is made. This costs history, not the cache.",
)
_DAMAGED = Failure(
    FailureKind.LASTING,
    "The catalog file is damaged.",
    "Move the file and its -wal and -shm companions away; a new one is made. This costs history, not the cache.",
)
_SCHEMA = Failure(
    FailureKind.LASTING,
    "The catalog's tables are not the ones this version writes.",
    "Move the file away or use the version that made it.",
)
_DISK = Failure(
    FailureKind.LASTING, "The catalog's disk reported an error.", "Check the disk and its free space."
)

_BY_CODE: dict[int, Failure] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_PROTOCOL: _LOCKED,
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_AUTH: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: _CANNOT_OPEN,
    sqlite3.SQLITE_NOTADB: _NO_DATABASE,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_ERROR: _SCHEMA,
    sqlite3.SQLITE_SCHEMA: _SCHEMA,
    sqlite3.SQLITE_IOERR: _DISK,
}

_DATA_CODES = frozenset(
    {
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_RANGE,
        sqlite3.SQLITE_MISUSE,
    }
)


def diagnose(error: BaseException) -> Failure:
    """What ``error``, raised by an operation on the catalog, means."""
    if isinstance(error, PagewardenError):
        cause = error.__cause__
        kind = diagnose(cause).kind if cause is not None else FailureKind.LASTING
        return Failure(FailureKind.LASTING if kind is FailureKind.DATA else kind, error.message, error.remedy)
    if isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(error, sqlite3.Error) and isinstance(code, int):
        primary = code & 0xFF
        if primary in _DATA_CODES:
            return Failure(FailureKind.DATA, f"The catalog refused a row: {error}.")
        return _BY_CODE.get(primary, Failure(FailureKind.TRANSIENT, f"SQLite reported: {error}."))
    if isinstance(error, OSError):
        return Failure(
            FailureKind.LASTING,
            f"The catalog's path cannot be used: {error.strerror or error}.",
            _CANNOT_OPEN.remedy,
        )
    if isinstance(error, (sqlite3.Error, SQLAlchemyError)):
        return Failure(FailureKind.DATA, f"The catalog cannot hold a row: {error}.")
    return Failure(FailureKind.DATA, f"A row could not be prepared: {type(error).__name__}: {error}.")


def waits_for_space_or_lock(error: BaseException) -> bool:
    """Whether the file is fine and only locked by somebody or on a full disk."""
    return diagnose(error) in (_LOCKED, _FULL)
