"""A daemon that kills itself at a point that a test chose: ``python -m tests.support.dying POINT CALL WHEN server ...``.

It is the real daemon but for the one function that POINT names: SIGKILL comes before or after its CALL-th call.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from appliance.catalog.store import CatalogStore
from appliance.l1.arena import Arena
from appliance.l1.namespaces import NamespaceFiles
from appliance.l1.segment import Segment
from appliance.server import restart

POINTS: dict[str, tuple[Any, str]] = {
    "describe namespace": (NamespaceFiles, "describe"),
    "reserve": (Segment, "write_writing"),
    "commit": (Segment, "write_committed"),
    "free": (Segment, "write_freed"),
    "remove under a lease": (Segment, "write_doomed"),
    "clear in the arena": (Segment, "write_epochs"),
    "clear in the catalog": (CatalogStore, "write_control"),
    "history in the catalog": (CatalogStore, "write_history"),
    "recency at a stop": (restart, "save_recency"),
    "clean flag at a stop": (Segment, "mark_clean"),
    "files closed at a stop": (Arena, "close"),
    "first write of a start": (Segment, "begin_boot"),
    "objects entered at a start": (restart, "rebuild"),
}


def arm(point: str, call: int, when: str) -> None:
    """Replace the function of a point by one that dies."""
    owner, name = POINTS[point]
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls == call and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


if __name__ == "__main__":
    point, call, when, *sys.argv[1:] = sys.argv[1:]
    arm(point, int(call), when)
    from appliance.cli import main

    main()
