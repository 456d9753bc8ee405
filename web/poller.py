"""The one reader of the daemon's status: a background thread that keeps the last answer, its age and the last error.

Pages render what is kept and never wait for the daemon. While nobody looks, the thread polls less often.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from appliance.errors import PagewardenError
from appliance.protocol.client import RequestClient
from appliance.protocol.status import DaemonStatus
from web.totals import EngineTotals, NamespaceTotals

ACTIVE_SECONDS = 6.0
"""For how long after the last look the thread keeps its full rate: three refreshes of the page."""

IDLE_FACTOR = 5.0
"""How many times slower the thread polls while nobody looks."""

_log = structlog.stdlib.get_logger("web.poller")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of the daemon at one moment.

    ``status`` is its last readable answer, received ``age_seconds`` ago; both are ``None`` before the first.
    ``failing_seconds`` says for how long the daemon has not answered, ``None`` while it does or before the first try.
    ``error`` and ``error_code`` describe the last failure, also after it has passed.
    """

    status: DaemonStatus | None = None
    age_seconds: float | None = None
    failing_seconds: float | None = None
    error: str = ""
    error_code: str = ""
    polls: int = 0
    errors: int = 0
    totals: NamespaceTotals = field(default_factory=NamespaceTotals)

    @property
    def reachable(self) -> bool:
        """Whether the last try brought a status."""
        return self.status is not None and self.failing_seconds is None


@dataclass(slots=True)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class StatusPoller:
    """Owns one thread and, in it, one client. Thread-safe."""

    def __init__(
        self,
        endpoint: str,
        *,
        poll_seconds: float,
        timeout_seconds: float = 2.0,
        connect: Callable[[], RequestClient] | None = None,
    ) -> None:
        self._poll_seconds = poll_seconds
        self._connect = connect or (
            lambda: RequestClient(endpoint, client_name="pagewarden-web", timeout_seconds=timeout_seconds)
        )
        self._client: RequestClient | None = None
        self._lock = threading.Lock()
        self._kept = Snapshot()
        self._received_at: float | None = None
        self._failing_since: float | None = None
        self._asked_at = time.monotonic()
        self._waiters: list[_Waiter] = []
        self._engine_totals = EngineTotals()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-poller", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; waits for the try under way, at most its timeout."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout=5.0)

    def snapshot(self) -> Snapshot:
        """What is known now; never waits. Asking keeps the thread at its full rate."""
        now = time.monotonic()
        with self._lock:
            was_idle = now - self._asked_at > ACTIVE_SECONDS
            self._asked_at = now
            snapshot = replace(
                self._kept,
                age_seconds=None if self._received_at is None else now - self._received_at,
                failing_seconds=None if self._failing_since is None else now - self._failing_since,
            )
        if was_idle:
            self._wake.set()
        return snapshot

    async def recent(self, wait_seconds: float = 0.5) -> Snapshot:
        """What is known, after the try that is due where the answer kept is older than two poll intervals.

        Waits at most ``wait_seconds``, and not at all while the daemon is known not to answer.
        """
        snapshot = self.snapshot()
        first_try = snapshot.polls == 0
        stale = snapshot.reachable and (snapshot.age_seconds or 0.0) > 2 * self._poll_seconds
        if not (first_try or stale) or self._stopping.is_set():
            return snapshot
        return await self._next(wait_seconds)

    async def fresh(self, wait_seconds: float = 1.0) -> Snapshot:
        """What is known after one more look, bounded; at once while the daemon is known not to answer."""
        snapshot = self.snapshot()
        if snapshot.polls and not snapshot.reachable:
            return snapshot
        return await self._next(wait_seconds)

    async def after_change(self, wait_seconds: float = 1.0) -> Snapshot:
        """What is known after a look that began after this call, so that a change just made is in it; bounded."""
        await self._next(wait_seconds)  # this one may have been under way
        return await self._next(wait_seconds)

    async def _next(self, wait_seconds: float) -> Snapshot:
        if self._stopping.is_set():
            return self.snapshot()
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop, loop.create_future())
        with self._lock:
            self._waiters.append(waiter)
        self._wake.set()
        try:
            await asyncio.wait_for(waiter.future, wait_seconds)
        except TimeoutError:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self.snapshot()

    def _run(self) -> None:
        while not self._stopping.is_set():
            started = time.monotonic()
            self._wake.clear()
            self._poll()
            self._release_waiters()
            self._pause(started)
        self._drop_client()

    def _poll(self) -> None:
        try:
            if self._client is None:
                self._client = self._connect()
            status = self._client.call("status", {}, DaemonStatus)
            totals = self._engine_totals.update(status)
        except PagewardenError as error:
            self._failed(str(error), error.code)
        except Exception as error:  # noqa: BLE001 - the thread must outlive whatever a reply does to it
            self._drop_client()
            self._failed(f"The status could not be read ({type(error).__name__}: {error}).", "internal")
        else:
            self._succeeded(status, totals)

    def _succeeded(self, status: DaemonStatus, totals: NamespaceTotals) -> None:
        with self._lock:
            recovered = self._failing_since is not None
            self._failing_since = None
            self._received_at = time.monotonic()
            self._kept = replace(self._kept, status=status, totals=totals, polls=self._kept.polls + 1)
        if recovered:
            _log.info("the daemon answers again", boot=status.boot)

    def _failed(self, sentence: str, code: str) -> None:
        with self._lock:
            first = self._failing_since is None
            if first:
                self._failing_since = self._received_at if self._received_at is not None else time.monotonic()
            self._kept = replace(
                self._kept,
                error=sentence,
                error_code=code,
                polls=self._kept.polls + 1,
                errors=self._kept.errors + 1,
            )
        if first:
            _log.warning("the daemon does not answer", code=code, reason=sentence)

    def _release_waiters(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            try:
                waiter.loop.call_soon_threadsafe(_finish, waiter.future)
            except RuntimeError:
                continue  # that request's loop is closed: nobody waits any more

    def _pause(self, started: float) -> None:
        while not self._stopping.is_set():
            with self._lock:
                idle = time.monotonic() - self._asked_at > ACTIVE_SECONDS
                wanted = bool(self._waiters)
            interval = self._poll_seconds * (IDLE_FACTOR if idle else 1.0)
            left = started + interval - time.monotonic()
            if left <= 0 or wanted:
                return
            self._wake.wait(left)
            self._wake.clear()

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
