"""The clock that TTLs run on: it never runs while the daemon does not."""

from __future__ import annotations

MAX_STEP_SECONDS = 1.0


class LeaseClock:
    """Seconds of service. ``advance`` moves it by what passed since the last call, but never by more than one step.

    A daemon that was stopped (SIGSTOP, a frozen cgroup, a suspended machine) wakes up with all holds intact: peers could
    not have renewed them meanwhile.
    """

    __slots__ = ("_last_monotonic", "_now")

    def __init__(self, monotonic_seconds: float, now_seconds: float = 0.0) -> None:
        self._last_monotonic = monotonic_seconds
        self._now = now_seconds

    def advance(self, monotonic_seconds: float) -> float:
        """The clock after this iteration of the loop."""
        passed = monotonic_seconds - self._last_monotonic
        self._last_monotonic = monotonic_seconds
        self._now += min(max(0.0, passed), MAX_STEP_SECONDS)
        return self._now

    def __call__(self) -> float:
        """Seconds since the daemon began (or since what it took back was stored), not counting stops."""
        return self._now
