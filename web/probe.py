"""The health check of the daemon's loop: one ping with a bounded wait, shared by everybody who asks at once.

It has its own client and thread, so that a status request that hangs does not delay it, and a flood of health checks
costs the daemon one ping at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from appliance.errors import PagewardenError
from appliance.protocol.client import RequestClient
from appliance.protocol.messages import Ping

PING_TIMEOUT_SECONDS = 0.7
"""Short enough for the one-second default of a Kubernetes probe."""


@dataclass(frozen=True, slots=True)
class PingResult:
    """The outcome of one ping: ``ping`` where the loop answered, else ``code`` and ``reason``."""

    ping: Ping | None
    seconds: float
    code: str = ""
    reason: str = ""


class LoopProbe:
    """Pings the daemon's loop. Thread-safe."""

    def __init__(self, endpoint: str, *, timeout_seconds: float = PING_TIMEOUT_SECONDS) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loop-probe")
        self._lock = threading.Lock()
        self._in_flight: Future[PingResult] | None = None
        self._client: RequestClient | None = None

    async def ping(self) -> PingResult:
        """The loop's answer, or why there is none, within the timeout."""
        with self._lock:
            if self._in_flight is None or self._in_flight.done():
                self._in_flight = self._executor.submit(self._ping)
            in_flight = self._in_flight
        return await asyncio.shield(asyncio.wrap_future(in_flight))

    def close(self) -> None:
        """Let go of the thread and the socket; waits for the ping under way, at most its timeout."""
        self._executor.submit(self._drop_client)
        self._executor.shutdown(wait=True)

    def _ping(self) -> PingResult:
        started = time.monotonic()
        try:
            if self._client is None:
                self._client = RequestClient(
                    self._endpoint, client_name="pagewarden-health", timeout_seconds=self._timeout_seconds
                )
            ping = self._client.call("ping", {}, Ping)
        except PagewardenError as error:
            return PingResult(None, time.monotonic() - started, error.code, str(error))
        except Exception as error:  # noqa: BLE001 - a health check answers, whatever happened
            self._drop_client()
            sentence = f"The ping failed ({type(error).__name__}: {error})."
            return PingResult(None, time.monotonic() - started, "internal", sentence)
        return PingResult(ping, time.monotonic() - started)

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
