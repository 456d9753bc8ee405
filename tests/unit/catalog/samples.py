"""Events, rows and waiting helpers that the catalog's tests share."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.catalog.events import (
    ClearRecorded,
    EngineSeen,
    FingerprintSeen,
    GroupShape,
    LeaseEnded,
    ObjectsRemoved,
    ObjectsStored,
    RemovedObject,
    RestartRecorded,
    SettingChanged,
    StoredObject,
)
from appliance.errors import PagewardenError

NAMESPACE = "0123456789abcdef0123456789abcdef"
OTHER_NAMESPACE = "fedcba9876543210fedcba9876543210"


def chunk_key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def engine(
    engine_id: str = "engine-1", *, session_id: str = "s1", at: float = 100.0, **changes: Any
) -> EngineSeen:
    values: dict[str, Any] = {
        "engine_id": engine_id,
        "session_id": session_id,
        "model": "tiny/hybrid",
        "namespace": NAMESPACE,
        "host": "gpu-1",
        "pid": 4711,
        "engine_version": "0.32.0",
        "ranks": 2,
        "chunk_tokens": 768,
        "block_tokens": 768,
        "first_seen_unix": at,
        "last_seen_unix": at,
    }
    return EngineSeen(**{**values, **changes})


def record(**cache: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "model": {"name": "tiny/hybrid", "dtype": "bfloat16"},
        "cache": {"dtype": "auto", "state_dtype": "float32", **cache},
        "groups": [{"kind": "attention", "page_bytes": 4096}, {"kind": "recurrent", "page_bytes": 8192}],
    }


def fingerprint(namespace: str = NAMESPACE, *, at: float = 100.0, **cache: Any) -> FingerprintSeen:
    groups = (
        GroupShape("attention", "attention", shards=2, replicas=1, window_chunks=0, object_bytes=4096),
        GroupShape("state", "recurrent", shards=1, replicas=2, window_chunks=1, object_bytes=8192),
    )
    return FingerprintSeen(namespace, "tiny/hybrid", record(**cache), groups, at)


def stored(number: int, *, namespace: str = NAMESPACE, group_index: int = 0, shard: int = 0) -> StoredObject:
    return StoredObject(
        namespace=namespace,
        chunk_key=chunk_key(number),
        group_index=group_index,
        shard=shard,
        bytes=4096,
        checksum=2**64 - 1 - number,
        chunk_index=number,
        salt_digest="",
        stored_unix=200.0,
        last_used_unix=200.0,
    )


def stored_batch(*numbers: int, **where: Any) -> ObjectsStored:
    return ObjectsStored(tuple(stored(number, **where) for number in numbers))


def removed_batch(*numbers: int, cause: str = "evicted", group_index: int = 0) -> ObjectsRemoved:
    return ObjectsRemoved(
        tuple(
            RemovedObject(NAMESPACE, chunk_key(number), group_index, 8192, cause, 30.0, 3.0, 230.0)
            for number in numbers
        )
    )


def lease_end(number: int, *, cause: str = "released", namespace: str = NAMESPACE) -> LeaseEnded:
    return LeaseEnded(
        lease_id=f"lease-{number}",
        engine_id=f"engine-{number % 2}",
        session_id="s1",
        namespace=namespace,
        request_id=f"request-{number}",
        cause=cause,
        chunks=3,
        bytes=3 * 4096,
        age_seconds=1.5,
        renewals=2,
        ended_unix=300.0 + number,
    )


def setting(
    value: Any, *, name: str = "read_ttl_seconds", scope: str = "", at: float = 400.0
) -> SettingChanged:
    return SettingChanged(name, scope, value, at, "admin")


def clear(epoch: int, *, namespace: str = "") -> ClearRecorded:
    return ClearRecorded(
        epoch,
        "namespace" if namespace else "all",
        namespace,
        "admin",
        500.0 + epoch,
        removed_objects=7,
        removed_bytes=9,
    )


def restart(boot_id: str = "boot-1", *, at: float = 50.0) -> RestartRecorded:
    return RestartRecorded(
        boot_id, at, "warm", "every gate passed", {"lock": "held", "magic": "ok"}, clean_stop=True
    )


class Acknowledgements:
    """Collects what ``on_durable`` says; ``inspect`` runs in the writer thread at that moment."""

    def __init__(self, inspect: Callable[[int], Any] | None = None) -> None:
        self.outcomes: dict[int, PagewardenError | None] = {}
        self.seen: dict[int, Any] = {}
        self.calls = 0
        self._inspect = inspect
        self._changed = threading.Condition()

    def __call__(self, token: int, error: PagewardenError | None) -> None:
        seen = None if self._inspect is None else self._inspect(token)
        with self._changed:
            self.calls += 1
            self.outcomes[token] = error
            self.seen[token] = seen
            self._changed.notify_all()

    def wait_for(self, token: int, timeout_seconds: float = 30.0) -> PagewardenError | None:
        with self._changed:
            assert self._changed.wait_for(lambda: token in self.outcomes, timeout_seconds), (
                f"no answer for {token}"
            )
            return self.outcomes[token]


def eventually(condition: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.01)


def count(path: Path, table: str) -> int:
    """Rows of a table through a connection of its own."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
    try:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    finally:
        connection.close()
