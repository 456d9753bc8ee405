"""Real daemons killed by SIGKILL at each step that matters, under a real engine; and what the next boot makes of it.

After each: every object served is byte for byte what was stored, acknowledged clears hold, what was acknowledged is there,
bytes add up, and `pagewarden check` is clean.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from appliance.errors import PagewardenError
from appliance.protocol.messages import ClearResult
from tests.integration.test_data_path import accounted
from tests.integration.test_warm_restart import back_with, check, hits, prompt
from tests.support.daemon import DaemonProcess
from tests.support.dying import POINTS
from tests.support.engine import Engine
from tests.support.waiting import eventually

OBJECTS = 5
SAVES = 5
TABLE = [
    ("describe namespace", 1, "before"),
    ("reserve", 1, "before"),
    ("reserve", 7, "after"),
    ("commit", 3, "before"),
    ("commit", 8, "after"),
    ("remove under a lease", 2, "after"),
    ("clear in the arena", 1, "before"),
    ("clear in the arena", 1, "after"),
    ("clear in the catalog", 1, "before"),
    ("clear in the catalog", 1, "after"),
    ("free", 2, "before"),
    ("free", 3, "after"),
    ("history in the catalog", 2, "before"),
    ("history in the catalog", 2, "after"),
    ("recency at a stop", 1, "after"),
    ("clean flag at a stop", 1, "before"),
    ("files closed at a stop", 1, "after"),
    ("first write of a start", 1, "before"),
    ("first write of a start", 1, "after"),
    ("objects entered at a start", 1, "after"),
]
AT_A_START = ("first write of a start", "objects entered at a start")


def test_every_point_is_in_the_table() -> None:
    assert {point for point, _, _ in TABLE} == set(POINTS)


@dataclass
class Told:
    """What the daemon acknowledged: prompts stored in full, and prompts cleared (``unsure`` where it died meanwhile)."""

    stored: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)


def work(daemon: DaemonProcess, engine: Engine, told: Told) -> None:
    """Stores, a clear while one prompt is held, more stores, until they are done or the daemon is dead."""
    store(daemon, engine, told, range(SAVES))
    if dead(daemon):
        return
    engine.lookup("held", prompt(1))
    before, told.stored = told.stored, set()
    told.unsure = set(before)
    with suppress(PagewardenError), daemon.client(5.0) as client:
        client.call("clear", {"requested_by": "tests"}, ClearResult)
        told.cleared, told.unsure = before, set()
    store(daemon, engine, told, range(SAVES, 2 * SAVES))


def store(daemon: DaemonProcess, engine: Engine, told: Told, numbers: range) -> None:
    for number in numbers:
        if not dead(daemon) and engine.save(prompt(number), seed=number)[0].stored == OBJECTS:
            told.stored.add(number)


def dead(daemon: DaemonProcess) -> bool:
    return daemon.process is None or daemon.process.poll() is not None


def run_until_it_dies(daemon: DaemonProcess, point: str, call: int, when: str) -> tuple[Engine, Told]:
    """Start it armed, work, stop it; it must have been killed by its own hand."""
    told = Told()
    engine = Engine(daemon.port, rank_options={"save_timeout_seconds": 1.0, "load_timeout_seconds": 1.0})
    if point in AT_A_START:
        daemon.start()
        engine.start()
        work(daemon, engine, told)
        daemon.kill()
    daemon.program = ["-m", "tests.support.dying", point, str(call), when]
    daemon.start(ready=False)
    assert daemon.process is not None
    if point not in AT_A_START:
        engine.start(settled=False)
        eventually(lambda: engine.scheduler.chunk_tokens or dead(daemon), "settled, or dead")
        work(daemon, engine, told)
        daemon.process.send_signal(signal.SIGTERM)
    try:
        assert daemon.process.wait(30) == -signal.SIGKILL, daemon.log.read_text()[-2000:]
    except subprocess.TimeoutExpired:
        pytest.fail(f"'{point}' was never reached:\n{daemon.log.read_text()[-2000:]}")
    daemon.program = ["-m", "appliance.cli"]
    return engine, told


@pytest.mark.parametrize(("point", "call", "when"), TABLE, ids=lambda value: str(value).replace(" ", "_"))
def test_killed_there(make_daemon: Callable[..., DaemonProcess], point: str, call: int, when: str) -> None:
    daemon = make_daemon(start=False, drain_seconds=1.0)
    engine, told = run_until_it_dies(daemon, point, call, when)
    daemon.start()
    restart = daemon.status().restart
    assert restart is not None
    if point != "describe namespace":
        assert restart.mode == "warm", restart.reason
    back_with(engine, daemon)
    for number in range(2 * SAVES):
        request = f"check-{number}"
        found = engine.lookup(request, prompt(number))
        if number in told.cleared:
            assert found.hit_chunks == 0, f"a clear was undone for prompt {number}"
        if number in told.stored:
            assert found.hit_chunks == 4, f"prompt {number} was acknowledged and is gone: {found}"
        if found.hit_chunks:
            loaded = engine.load(request, prompt(number), found)
            assert all(each.ok for each in loaded), loaded
            engine.check_loaded(found.hit_chunks, number)
            engine.scheduler.release(found.lease)
    engine.save(prompt(99), seed=99)
    hits(engine, "new", prompt(99), seed=99)
    accounted(daemon)
    check(daemon)
    engine.stop()
