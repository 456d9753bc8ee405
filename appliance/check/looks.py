"""Short looks at the core from another thread: each sees one moment between two messages, and copies what it needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from appliance.errors import CheckFailed

_T = TypeVar("_T")
ANSWER_SECONDS = 10.0
SHARE = 0.5
"""Of the loop's time that looks may take; it has at least as much for everybody else."""


class Looks:
    """Has the loop thread run a look; then leaves it alone for as long as that took."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self.count = 0
        self.longest_seconds = 0.0

    def take(self, look: Callable[[], _T]) -> _T:
        """What ``look`` gives, run on the loop thread.

        Raises:
            CheckFailed: if the loop does not come round, or the look itself failed.
        """
        done = threading.Event()
        answers: list[_T] = []
        errors: list[Exception] = []
        took: list[float] = []

        def run() -> None:
            began = time.perf_counter()
            try:
                answers.append(look())
            except Exception as error:  # noqa: BLE001  # told to the check, which must not harm the loop
                errors.append(error)
            took.append(time.perf_counter() - began)
            done.set()

        self._post(run)
        if not done.wait(ANSWER_SECONDS):
            raise CheckFailed("The daemon's loop did not come round; it may be stopping.")
        if errors:
            raise CheckFailed(f"A look failed: {type(errors[0]).__name__}: {errors[0]}.") from errors[0]
        self.count += 1
        self.longest_seconds = max(self.longest_seconds, took[0])
        time.sleep(took[0] * (1 - SHARE) / SHARE)
        return answers[0]
