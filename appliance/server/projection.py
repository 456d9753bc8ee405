"""The catalog's object rows after a restart: projected again from what was taken back, in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.catalog.events import ObjectsStored, StoredObject
from appliance.l1.space import ExtentState
from appliance.l1.taking import Taken
from appliance.server.background import Mailbox
from appliance.server.core import Core

OBJECTS_A_STEP = 500
MOST_QUEUED_ROWS = 20_000
BUSY_SECONDS = 0.2
IDLE_SECONDS = 5.0


class Projection:
    """Hands the catalog one row an object, a few at a time and only as fast as it writes.

    An object that was removed meanwhile is left out: the step runs on the loop thread, so none can be removed between the
    look at it and the row.
    """

    def __init__(
        self, core: Core, taken: Sequence[Taken], mailbox: Mailbox, queued: Callable[[], int]
    ) -> None:
        self._core = core
        self._mailbox = mailbox
        self._queued = queued
        self._waiting = [each for each in reversed(taken) if len(each.heads)]
        self._next = 0
        self._stepped = threading.Event()
        self._stepped.set()

    @property
    def done(self) -> bool:
        """Whether every object has had its turn."""
        return not self._waiting

    def tick(self) -> float:
        """One turn; see :class:`BackgroundLoop`."""
        if not self._stepped.wait(BUSY_SECONDS):
            return 0.0
        if self.done:
            return IDLE_SECONDS
        if self._queued() > MOST_QUEUED_ROWS:
            return BUSY_SECONDS
        self._stepped.clear()
        self._mailbox.post(self._step)
        return 0.0

    def _step(self) -> None:
        try:
            taken = self._waiting[-1]
            some = slice(self._next, self._next + OBJECTS_A_STEP)
            self._submit(taken.segment, taken.heads[some], taken.records[some])
            self._next += OBJECTS_A_STEP
            if self._next >= len(taken.heads):
                self._waiting.pop()
                self._next = 0
        finally:
            self._stepped.set()

    def _submit(self, segment: int, heads: NDArray[np.int64], records: NDArray[np.void]) -> None:
        space = self._core.arena.spaces[segment]
        now_unix, now = time.time(), self._core.clock()
        rows = []
        for head, record in zip(heads.tolist(), records, strict=True):
            same = space.generations[head] == int(record["commit_word"]) >> 1
            if not same or space.states[head] != ExtentState.OCCUPIED:
                continue
            namespace, key = record["namespace"].tobytes().hex(), record["key"].tobytes()
            index = self._core.store.namespaces[namespace]
            used_at = index.used_at.view[index.entry(index.find(key), int(record["group"]))]
            rows.append(
                StoredObject(
                    namespace=namespace,
                    chunk_key=key,
                    group_index=int(record["group"]),
                    shard=int(record["shard"]),
                    bytes=int(record["length"]),
                    checksum=int(record["checksum"]),
                    chunk_index=int(record["chunk_index"]),
                    salt_digest=record["salt"].tobytes().hex() if any(record["salt"].tobytes()) else "",
                    stored_unix=int(record["stored_unix_ms"]) / 1000.0,
                    last_used_unix=now_unix - max(0.0, now - used_at),
                )
            )
        if rows:
            self._core.history.submit(ObjectsStored(tuple(rows)))
