"""Waiting for what another thread or process does."""

import time
from typing import Any


def eventually(condition: Any, what: str, seconds: float = 20.0) -> Any:
    """Wait until `condition()` is true and return its value; generous, since the machine is shared."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"never happened: {what}")
