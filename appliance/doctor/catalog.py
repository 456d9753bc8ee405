"""The catalog's file: can it be read and written, is it whole, and does its disk suit it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from appliance.catalog.connections import driver_connection, reading_engine
from appliance.catalog.failures import diagnose
from appliance.catalog.queries import CatalogReader
from appliance.doctor.findings import Code, Finding, Severity
from appliance.doctor.subject import Subject
from appliance.errors import CatalogUnavailable
from appliance.host import existing_parent, free_bytes, mount_of

LEAST_FREE_BYTES = 256 << 20
CHECK_SECONDS = 5.0

_MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
_NETWORK_KINDS = ("nfs", "cifs", "smb", "9p", "fuse.", "ceph", "lustre", "glusterfs", "afs")


def catalog(subject: Subject) -> Iterator[Finding]:
    """Everything about the file; a catalog that is not there yet is as good as one that is."""
    path = subject.catalog
    if not os.access(existing_parent(path.parent), os.R_OK | os.W_OK | os.X_OK, effective_ids=True) or (
        path.exists() and not os.access(path, os.R_OK | os.W_OK, effective_ids=True)
    ):
        yield _finding(
            Code.CATALOG_UNWRITABLE,
            Severity.PROBLEM,
            "This user may not write the catalog or its directory.",
            f"{path}: user {os.geteuid()}",
            "Run as its owner, or choose another place with --catalog.",
        )
        return
    if path.exists():
        yield from _contents(path)
    yield from _disk(path)
    status = subject.running.catalog if subject.running is not None else None
    if status is not None and status.state != "ok":
        yield _finding(
            Code.CATALOG_STATE,
            Severity.PROBLEM if status.state == "down" else Severity.WARNING,
            f"The daemon's catalog is {status.state}: the cache is served, history waits or is lost.",
            f"{status.reason} {status.queued:,} rows wait, {status.dropped:,} were dropped.",
            "docs/catalog.md has each state and what to do.",
        )


def _contents(path: Path) -> Iterator[Finding]:
    try:
        CatalogReader(path).restarts(limit=1)
        broken = _quick_check(path)
    except CatalogUnavailable as error:
        yield _finding(
            Code.CATALOG_UNREADABLE, Severity.PROBLEM, error.message, str(path), error.remedy or _AWAY
        )
        return
    if broken:
        yield _finding(
            Code.CATALOG_UNREADABLE,
            Severity.PROBLEM,
            "The catalog's file is damaged.",
            f"{path}: {broken}",
            _AWAY,
        )


_AWAY = "Move the file and its -wal and -shm companions away; a new one is made. This costs history, not the cache."


def _quick_check(path: Path) -> str:
    """What SQLite finds wrong within a few seconds; a large history is checked in part."""
    engine = reading_engine(path, busy_timeout_seconds=1.0)
    deadline = time.monotonic() + CHECK_SECONDS
    try:
        with engine.connect() as connection:
            raw = driver_connection(connection)
            raw.set_progress_handler(lambda: int(time.monotonic() > deadline), 10_000)
            found = str(raw.execute("PRAGMA quick_check(1)").fetchone()[0])
            return "" if found == "ok" else found
    except Exception as error:  # noqa: BLE001 - SQLite's errors come in several classes; the words are the same
        if "interrupted" in str(error):
            return ""
        return diagnose(error).sentence
    finally:
        engine.dispose()


def _disk(path: Path) -> Iterator[Finding]:
    mount = mount_of(path.parent)
    if mount.kind in _MEMORY_KINDS:
        yield _finding(
            Code.CATALOG_IN_MEMORY,
            Severity.WARNING,
            "The catalog is in memory: settings, clears and history do not outlive a reboot.",
            f"{path} is on {mount.point}, {mount.kind}",
            "Put it on a disk with --catalog.",
        )
    if mount.kind.startswith(_NETWORK_KINDS):
        yield _finding(
            Code.CATALOG_ON_NETWORK,
            Severity.PROBLEM,
            "The catalog is on a network filesystem: SQLite's write-ahead log needs shared memory and locks that such "
            "a filesystem does not keep.",
            f"{path} is on {mount.point}, {mount.kind}",
            "Put it on a local disk with --catalog.",
        )
    free = free_bytes(path.parent)
    if free < LEAST_FREE_BYTES:
        yield _finding(
            Code.CATALOG_DISK_FULL,
            Severity.WARNING,
            "The catalog's disk is nearly full.",
            f"{mount.point} has {free >> 20} MiB free",
            "Free space, or move the catalog with --catalog.",
        )


def _finding(code: Code, severity: Severity, message: str, evidence: str, remedy: str) -> Finding:
    return Finding(
        area="catalog", code=code, severity=severity, message=message, evidence=evidence, remedy=remedy
    )
