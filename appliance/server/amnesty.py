"""After a warm restart nothing is evicted until the processes that had the arena mapped are back, or dead, or 30 s are over.

Their leases are gone, but what they had located they still read: evicted now, it would be a load that fails and is computed
again. Meanwhile a reservation that finds no free memory is answered *warming*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import structlog

from appliance.l1.store import Store
from appliance.protocol.liveness import former_attachments

_log = structlog.get_logger(__name__)

AMNESTY_SECONDS = 30.0


@dataclass(slots=True)
class Amnesty:
    """``waiting`` are the attach ids of those who are neither back nor dead; ``deadline`` is on the lease clock."""

    store: Store
    waiting: set[int] = field(default_factory=set)
    deadline: float = 0.0

    def begin(self, directory: Path, now_seconds: float) -> None:
        """Whoever holds an attach lock now had the arena of the boot before."""
        self.waiting = former_attachments(directory)
        self.deadline = now_seconds + AMNESTY_SECONDS
        self.store.amnesty = bool(self.waiting)
        if self.waiting:
            _log.info("nothing is evicted until earlier engines are back", processes=len(self.waiting))

    def advance(self, attached: set[int], dead: set[int], now_seconds: float) -> None:
        """Let time pass: ``attached`` are the attach ids of live sessions, ``dead`` those that are proven so."""
        if not self.store.amnesty:
            return
        self.waiting -= attached | dead
        if not self.waiting or now_seconds >= self.deadline:
            _log.info("eviction may go on", processes_missing=len(self.waiting))
            self.waiting = set()
            self.store.amnesty = False
