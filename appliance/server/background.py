"""Threads around the loop: each survives its own exceptions, counts them, and shows when it last went round."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from appliance.protocol.status import LoopStatus

_log = structlog.get_logger(__name__)


class Mailbox:
    """Work for the loop thread, posted from any thread; ``fileno`` becomes readable when there is some."""

    def __init__(self) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def post(self, work: Callable[[], None]) -> None:
        """Have the loop run ``work`` in its next turn."""
        self._posted.append(work)
        os.eventfd_write(self._event, 1)

    def take(self) -> list[Callable[[], None]]:
        """What was posted since the last call."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        taken = []
        while self._posted:
            taken.append(self._posted.popleft())
        return taken

    def fileno(self) -> int:
        """For a poller."""
        return self._event

    def close(self) -> None:
        """Nothing may be posted any more."""
        os.close(self._event)


class Pulse:
    """The heartbeat and error count of one loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors = 0
        self.last_error = ""
        self._beat_at = time.monotonic()

    def beat(self) -> None:
        """The loop went round."""
        self._beat_at = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the loop last went round."""
        return time.monotonic() - self._beat_at

    def failed(self, error: BaseException) -> None:
        """One turn failed and the loop goes on."""
        self.errors += 1
        self.last_error = f"{type(error).__name__}: {error}"
        _log.error(
            "a background loop failed and goes on", loop=self.name, error=self.last_error, exc_info=error
        )

    def status(self) -> LoopStatus:
        """For the status document."""
        return LoopStatus(
            name=self.name, idle_seconds=self.idle_seconds, errors=self.errors, last_error=self.last_error
        )


class Ticker(Protocol):
    """One turn of a background loop."""

    def __call__(self) -> float:
        """Do one turn; returns the seconds until the next."""


class BackgroundLoop:
    """Calls ``tick`` again and again on a thread of its own until it is stopped."""

    def __init__(self, name: str, tick: Ticker) -> None:
        self.pulse = Pulse(name)
        self._tick = tick
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Have the next turn at once."""
        self._wake.set()

    def stop(self, timeout_seconds: float) -> None:
        """Ask the loop to end and wait for it, bounded."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._stopping:
            self.pulse.beat()
            try:
                pause = self._tick()
            except Exception as error:  # noqa: BLE001  # the loop goes on
                self.pulse.failed(error)
                pause = 1.0
            self._wake.wait(pause)
            self._wake.clear()
