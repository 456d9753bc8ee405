"""How often a login may fail within a window that slides.

The narrowest bound is on one user from one address, so that a stranger cannot lock an admin out from elsewhere.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from appliance.errors import TooManyAttempts

WINDOW_SECONDS = 300.0
FAILURES_PER_USER_AND_ADDRESS = 10
FAILURES_PER_ADDRESS = 30
FAILURES_PER_USER = 100
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
        wait = max(self._wait(key, limit) for key, limit in _bounds(user, address))
        if wait > 0:
            raise TooManyAttempts(
                f"Too many logins failed; the next try is possible in {math.ceil(wait)} s.",
                remedy="Wait; API tokens and the command line are not affected.",
                retry_after_seconds=math.ceil(wait),
            )

    def failed(self, user: str, address: str) -> None:
        """Count a failure."""
        for key, _ in _bounds(user, address):
            self._failures.setdefault(key, deque()).append(self._clock())
            self._failures.move_to_end(key)
        while len(self._failures) > MAX_KEYS:
            self._failures.popitem(last=False)

    def succeeded(self, user: str, address: str) -> None:
        """The user is who they say: their failures from here are forgotten, those of the address are not."""
        self._failures.pop((user, address), None)

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


def _bounds(user: str, address: str) -> tuple[tuple[tuple[str, str], int], ...]:
    """What is counted, and how often it may fail."""
    return (
        ((user, address), FAILURES_PER_USER_AND_ADDRESS),
        (("", address), FAILURES_PER_ADDRESS),
        ((user, ""), FAILURES_PER_USER),
    )
