"""A run of simulated engines: started, watched, ended, and told."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import PagewardenError
from appliance.served_models import Geometry, geometry_of
from connector.simulate.describe import EngineSettings
from connector.simulate.engine import SimulatedEngine
from connector.simulate.figures import Figures
from connector.simulate.workload import Arrival, Conversations, read_trace
from kernels import load_backend

PROGRESS_SECONDS = 1.0
WATCH_SECONDS = 0.1
JOIN_SECONDS = 30.0
LEAST_UNIT_TOKENS = 256

EXIT_CLEAN = 0
EXIT_UNUSABLE = 2
EXIT_WRONG_BYTES = 3
EXIT_STUCK = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, as said on the command line."""

    model: str
    tensor: int
    engines: int
    engine_id: str
    attention_backend: str
    trace: Path | None
    requests_per_second: float
    speed: float
    scale: int
    alignment_tokens: int
    cache_tokens: int
    concurrency: int
    abort_share: float
    seconds: float
    most_requests: int
    seed: int
    rank_processes: bool
    as_json: bool
    host: str
    port: int
    arena_dir: str | None


def run(plan: Plan) -> int:
    """Run to the end, or until SIGINT or SIGTERM; returns the exit status."""
    try:
        geometry = geometry_of(
            plan.model, plan.tensor, scale=plan.scale, alignment_tokens=plan.alignment_tokens
        )
        if plan.trace is not None and not plan.trace.is_file():
            raise ValueError(f"there is no trace file {plan.trace}")
    except (PagewardenError, ValueError) as error:
        _say(f"pagewarden: {error}")
        return EXIT_UNUSABLE
    load_backend()  # compiled before the first request, not in it
    stopping = threading.Event()
    with _quiet_clients(), _stopped_by_signals(stopping):
        return _run_engines(plan, geometry, stopping)


def _run_engines(plan: Plan, geometry: Geometry, stopping: threading.Event) -> int:
    engines = [
        SimulatedEngine(_settings(plan, geometry, n), _arrivals(plan, geometry, n), stopping)
        for n in range(plan.engines)
    ]
    _announce(plan, geometry, engines[0])
    for engine in engines:
        engine.start()
    _watch(plan, engines, stopping)
    stopping.set()
    ended = all(engine.join(JOIN_SECONDS) for engine in engines)
    return _tell(plan, engines, ended=ended)


@contextmanager
def _quiet_clients() -> Iterator[None]:
    """A refusal or a restart is news for the progress line, not for a log of every client of every rank."""
    logger = logging.getLogger("vllm.pagewarden")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _stopped_by_signals(stopping: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM end the run in order."""
    former = {
        number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _settings(plan: Plan, geometry: Geometry, number: int) -> EngineSettings:
    return EngineSettings(
        engine_id=plan.engine_id if plan.engines == 1 else f"{plan.engine_id}-{number}",
        geometry=geometry,
        host=plan.host,
        port=plan.port,
        attention_backend=plan.attention_backend or geometry.model.backend,
        cache_tokens=plan.cache_tokens,
        concurrency=plan.concurrency,
        abort_share=plan.abort_share,
        speed=plan.speed,
        seed=plan.seed + number,
        most_requests=plan.most_requests,
        rank_processes=plan.rank_processes,
        arena_dir=plan.arena_dir,
    )


def _arrivals(plan: Plan, geometry: Geometry, number: int) -> Iterator[Arrival]:
    if plan.trace is not None:
        return read_trace(plan.trace, engine=number, engines=plan.engines, most_tokens=plan.cache_tokens)
    unit = max(geometry.block_tokens, LEAST_UNIT_TOKENS)
    conversations = Conversations(unit, plan.cache_tokens, plan.requests_per_second)
    return conversations.arrivals(plan.seed + number)


def _announce(plan: Plan, geometry: Geometry, engine: SimulatedEngine) -> None:
    groups = ", ".join(
        f"{each.group.name} {len(each.layers)} layers x {each.run_bytes} B" for each in geometry.groups
    )
    _say(
        f"{plan.engines} x {geometry.model.title}, TP {geometry.tensor}, N = {geometry.block_tokens} tokens; "
        f"1/{geometry.scale} of its bytes: {groups}; {engine.settings.blocks} blocks a rank"
    )


def _watch(plan: Plan, engines: list[SimulatedEngine], stopping: threading.Event) -> None:
    """Show progress until the time is over, no request is left, or a byte was wrong."""
    began = told_at = time.monotonic()
    told: set[str] = set()
    standings: dict[str, str] = {}
    shown = sys.stderr.isatty()
    while any(engine.alive for engine in engines) and not stopping.wait(WATCH_SECONDS):
        now = time.monotonic()
        for engine in engines:
            if engine.alive and standings.get(engine.settings.engine_id) != engine.standing:
                standings[engine.settings.engine_id] = engine.standing
                _say(f"{engine.settings.engine_id}: {engine.standing}")
            for sentence in engine.figures.wrong:
                if sentence not in told:
                    told.add(sentence)
                    _say(f"wrong bytes: {engine.settings.engine_id}: {sentence}")
        if told or (plan.seconds and now - began >= plan.seconds):
            break
        if shown and now - told_at >= PROGRESS_SECONDS:
            told_at = now
            total = Figures.total(engine.figures for engine in engines)
            _say("\r\033[K" + total.line(now - began), end="")
    if shown:
        _say("")


def _tell(plan: Plan, engines: list[SimulatedEngine], *, ended: bool) -> int:
    total = Figures.total(engine.figures for engine in engines)
    if plan.as_json:
        summary = {
            **total.summary(),
            "engines": {
                engine.settings.engine_id: {"standing": engine.standing, **engine.figures.summary()}
                for engine in engines
            },
        }
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    else:
        sys.stdout.write(total.text() + "\n")
    sys.stdout.flush()
    if total.wrong_pages:
        for sentence in total.wrong:
            _say(f"wrong bytes: {sentence}")
        return EXIT_WRONG_BYTES
    if not ended:
        _say("An engine did not end: a load or a save was never reported.")
        return EXIT_STUCK
    return EXIT_CLEAN


def _say(text: str, end: str = "\n") -> None:
    sys.stderr.write(text + end)
    sys.stderr.flush()
