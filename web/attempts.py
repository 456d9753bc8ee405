"""How often a login may fail: per user and per address, within a window that slides."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from appliance.errors import TooManyAttempts

WINDOW_SECONDS = 300.0
FAILURES_PER_USER = 10
FAILURES_PER_ADDRESS = 30
MAX_KEYS = 10_000


class Attempts:
    """Failures of the last minutes. Bounded: the keys that failed longest ago are forgotten first. Used on one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()

    def check(self, user: str, address: str) -> None:
        """Refuse a try before any password is looked at.

        Raises:
            TooManyAttempts: with the seconds to wait in its details.
        """
        wait = max(
            self._wait(("user", user), FAILURES_PER_USER),
            self._wait(("address", address), FAILURES_PER_ADDRESS),
        )
        if wait > 0:
            raise TooManyAttempts(
                f"Too many logins failed; the next try is possible in {math.ceil(wait)} s.",
                remedy="Wait, or set another password with `pagewarden user password`.",
                retry_after_seconds=math.ceil(wait),
            )

    def failed(self, user: str, address: str) -> None:
        """Count a failure."""
        for key in (("user", user), ("address", address)):
            self._failures.setdefault(key, deque()).append(self._clock())
            self._failures.move_to_end(key)
        while len(self._failures) > MAX_KEYS:
            self._failures.popitem(last=False)

    def succeeded(self, user: str) -> None:
        """The user is who they say: their failures are forgotten, those of the address are not."""
        self._failures.pop(("user", user), None)

    def _wait(self, key: tuple[str, str], limit: int) -> float:
        """Seconds until fewer than ``limit`` failures lie in the window."""
        failures = self._failures.get(key)
        if failures is None:
            return 0.0
        now = self._clock()
        while failures and failures[0] <= now - WINDOW_SECONDS:
            failures.popleft()
        if not failures:
            del self._failures[key]
        return failures[-limit] + WINDOW_SECONDS - now if len(failures) >= limit else 0.0
