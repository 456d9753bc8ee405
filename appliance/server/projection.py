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
from appliance.server.core import Core, Phase

OBJECTS_A_STEP = 250
MOST_QUEUED_ROWS = 20_000
BUSY_SECONDS = 0.2
IDLE_SECONDS = 5.0


class Projection:
    """Hands the catalog one row an object, once the daemon is ready, a few at a time and only as fast as it writes.

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
        if self._core.phase is Phase.POPULATING or self._queued() > MOST_QUEUED_ROWS:
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
        space, now_unix, now = self._core.arena.spaces[segment], time.time(), self._core.clock()
        namespaces, keys = records["namespace"].tobytes(), records["key"].tobytes()
        salts = records["salt"].tobytes()
        names = ("commit_word", "group", "shard", "length", "checksum", "chunk_index", "stored_unix_ms")
        columns = zip(heads.tolist(), *(records[name].tolist() for name in names), strict=True)
        rows = []
        for at, (head, word, group, shard, length, checksum, chunk_index, stored_ms) in enumerate(columns):
            if space.generations[head] != word >> 1 or space.states[head] != ExtentState.OCCUPIED:
                continue
            namespace = namespaces[at * 16 : at * 16 + 16].hex()
            key, salt = keys[at * 32 : at * 32 + 32], salts[at * 16 : at * 16 + 16]
            index = self._core.store.namespaces[namespace]
            used_at = index.used_at.view[index.entry(index.find(key), group)]
            rows.append(
                StoredObject(
                    namespace=namespace,
                    chunk_key=key,
                    group_index=group,
                    shard=shard,
                    bytes=length,
                    checksum=checksum,
                    chunk_index=chunk_index,
                    salt_digest=salt.hex() if any(salt) else "",
                    stored_unix=stored_ms / 1000.0,
                    last_used_unix=now_unix - max(0.0, now - used_at),
                )
            )
        if rows:
            self._core.history.submit(ObjectsStored(tuple(rows)))
