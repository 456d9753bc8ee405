"""The state of the catalog as the daemon shows it, and the transitions between the states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class CatalogState(StrEnum):
    """How well the catalog works; the cache is served in every state."""

    OK = "ok"
    DEGRADED = "degraded"  # being retried: history waits, control rows wait up to their deadline
    DOWN = "down"  # control rows are refused at once, history waits or is dropped


class Signal(StrEnum):
    """What moves the catalog from one state to another."""

    STARTED = "started"  # the writer was started and opens the file
    COMMITTED = "committed"  # a transaction was written, and the queue has room
    BEHIND = "behind"  # a transaction was written, and the queue is more than half full
    SHED = "shed"  # history was dropped because the queue is full
    FAILED = "failed"  # a try failed that will likely succeed soon
    OUTLASTED = "outlasted"  # such failures have gone on for too long
    BROKEN = "broken"  # a try failed in a way that somebody must mend
    STOPPED = "stopped"  # the writer was stopped


_OK, _DEGRADED, _DOWN = CatalogState.OK, CatalogState.DEGRADED, CatalogState.DOWN

TRANSITIONS: Mapping[tuple[CatalogState, Signal], CatalogState] = {
    (_OK, Signal.STARTED): _OK,
    (_OK, Signal.COMMITTED): _OK,
    (_OK, Signal.BEHIND): _OK,
    (_OK, Signal.SHED): _DEGRADED,
    (_OK, Signal.FAILED): _DEGRADED,
    (_OK, Signal.OUTLASTED): _DOWN,
    (_OK, Signal.BROKEN): _DOWN,
    (_OK, Signal.STOPPED): _DOWN,
    (_DEGRADED, Signal.STARTED): _DEGRADED,
    (_DEGRADED, Signal.COMMITTED): _OK,
    (_DEGRADED, Signal.BEHIND): _DEGRADED,
    (_DEGRADED, Signal.SHED): _DEGRADED,
    (_DEGRADED, Signal.FAILED): _DEGRADED,
    (_DEGRADED, Signal.OUTLASTED): _DOWN,
    (_DEGRADED, Signal.BROKEN): _DOWN,
    (_DEGRADED, Signal.STOPPED): _DOWN,
    (_DOWN, Signal.STARTED): _DEGRADED,
    (_DOWN, Signal.COMMITTED): _OK,
    (_DOWN, Signal.BEHIND): _DEGRADED,
    (_DOWN, Signal.SHED): _DOWN,
    (_DOWN, Signal.FAILED): _DOWN,
    (_DOWN, Signal.OUTLASTED): _DOWN,
    (_DOWN, Signal.BROKEN): _DOWN,
    (_DOWN, Signal.STOPPED): _DOWN,
}
"""The state after a signal. Only a commit leads back to OK."""


@dataclass(frozen=True, slots=True)
class CatalogHealth:
    """A snapshot of the writer. Counters are table rows since start, if not said otherwise.

    ``reason`` is empty in state OK. ``queued`` rows wait or are being written; ``dropped`` found the queue full;
    ``rejected`` could never be written; ``coalesced`` counts events that a newer one replaced. ``control_waiting``
    control rows are not yet acknowledged. ``last_commit_age_seconds`` is ``None`` before the first commit.
    ``errors`` counts exceptions, ``recreated`` how often the file had to be made anew. ``objects_stale`` says that the
    objects table no longer mirrors the arena and that projecting it again (``ObjectsForgotten``, then
    ``ObjectsStored``) would mend it.
    """

    state: CatalogState
    reason: str
    queued: int
    written: int
    dropped: int
    rejected: int
    coalesced: int
    control_waiting: int
    last_commit_age_seconds: float | None
    errors: int
    recreated: int
    objects_stale: bool


class HealthMonitor:
    """The state machine with its reason, and the counters that only the writer thread changes.

    The caller serialises :meth:`signal`; counters are plain integers that any thread may read.
    """

    def __init__(self) -> None:
        self.state = CatalogState.DOWN
        self.reason = "The catalog's writer has not opened the file yet."
        self.failing_since: float | None = None
        self.last_commit: float | None = None
        self.written = 0
        self.rejected = 0
        self.errors = 0
        self.recreated = 0

    def signal(self, signal: Signal, reason: str = "") -> None:
        """Move to the state that ``signal`` leads to; a reason stays until the state is OK again.

        That history is dropped is the reason only where nothing worse is known: a fault explains the drops too.
        """
        before, self.state = self.state, TRANSITIONS[self.state, signal]
        if self.state is CatalogState.OK:
            self.reason = ""
        elif reason and (signal is not Signal.SHED or before is CatalogState.OK):
            self.reason = reason

    def committed(self, now: float, *, behind: bool) -> None:
        """A transaction was written at ``now`` (monotonic seconds); ``behind`` if much still waits."""
        self.last_commit = now
        self.failing_since = None
        if behind:
            self.signal(Signal.BEHIND, "The catalog is catching up with the history that waits.")
        else:
            self.signal(Signal.COMMITTED)

    def failed(self, now: float, reason: str, *, lasting: bool, patience_seconds: float) -> None:
        """A try failed at ``now`` (monotonic seconds); ``patience_seconds`` turns a passing failure into DOWN."""
        self.errors += 1
        if self.failing_since is None:
            self.failing_since = now
        if lasting:
            self.signal(Signal.BROKEN, reason)
        elif now - self.failing_since >= patience_seconds:
            self.signal(Signal.OUTLASTED, reason)
        else:
            self.signal(Signal.FAILED, reason)
