"""One request on its way: made by any thread, completed by the IO thread, exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from appliance.errors import DaemonUnreachable, PagewardenError


class Call:
    """A request and, later, its reply.

    ``deadline`` is on ``time.monotonic``. A request is sent again, under the same id, every ``retry_seconds`` until it
    is answered: the daemon answers a repeated one from memory. ``on_unwanted`` gets a reply that came after the caller
    gave up, to undo what it granted.
    """

    __slots__ = (
        "_done",
        "_lock",
        "_unwanted",
        "args",
        "deadline",
        "error",
        "on_unwanted",
        "op",
        "request_id",
        "result",
        "retry_seconds",
        "send_again_at",
    )

    def __init__(
        self,
        op: str,
        args: dict[str, Any],
        timeout_seconds: float,
        *,
        retry_seconds: float = 2.0,
        on_unwanted: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.op = op
        self.args = args
        self.deadline = time.monotonic() + timeout_seconds
        self.retry_seconds = retry_seconds
        self.send_again_at = 0.0
        self.request_id = 0
        self.result: dict[str, Any] | None = None
        self.error: PagewardenError | None = None
        self.on_unwanted = on_unwanted
        self._unwanted = False
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether there is a reply or an error."""
        return self._done.is_set()

    def complete(self, result: dict[str, Any] | None, error: PagewardenError | None = None) -> None:
        """The reply is here, or there will be none. A second completion is ignored."""
        with self._lock:
            if self._done.is_set():
                return
            self.result, self.error = result, error
            unwanted = self._unwanted
            self._done.set()
        if unwanted and result is not None and self.on_unwanted is not None:
            self.on_unwanted(result)

    def give_up(self) -> None:
        """The caller does not want the reply any more; what a late one grants is undone."""
        with self._lock:
            already = self._done.is_set()
            self._unwanted = True
        if already and self.result is not None and self.on_unwanted is not None:
            self.on_unwanted(self.result)

    def wait(self) -> dict[str, Any]:
        """Wait for the reply, at most until the deadline. For threads of the client only, never the engine's.

        Raises:
            PagewardenError: what the daemon answered, or DaemonUnreachable at the deadline.
        """
        self._done.wait(max(0.0, self.deadline - time.monotonic()) + 0.05)
        if not self._done.is_set():
            self.give_up()
            raise DaemonUnreachable(f"The daemon did not answer '{self.op}' in time.")
        if self.error is not None:
            raise self.error
        assert self.result is not None, "a call would be done with neither result nor error"
        return self.result
