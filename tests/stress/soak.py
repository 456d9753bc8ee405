"""Simulated engines under random kills, stops, aborts and evictions: no wrong byte, no hold left, nothing out of place.

    python -m tests.stress.soak --seconds 600

Every engine is a process. While they work they are stopped and killed at random, the daemon is stopped now and then,
and the daemon is checked all the time. At the end two engines are killed in the middle of their work; after the TTLs
no hold may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.check.asking import run_check
from appliance.errors import DaemonUnreachable
from appliance.protocol.client import RequestClient
from appliance.protocol.status import DaemonStatus
from tests.support.daemon import DaemonProcess
from tests.support.waiting import eventually

TTL_SECONDS = 6.0
CHECK_EVERY_SECONDS = 5.0
END_SECONDS = 90.0
STANDSTILL_SECONDS = 60.0
"""Engines that are not served would make a soak that finds nothing."""

EXIT_KILLED = -signal.SIGKILL
ENGINE = (
    "--model=kimi-linear-48b",
    "--tp=2",
    "--scale=256",
    "--rate=1.5",
    "--speed=4",
    "--abort-share=0.25",
    "--cache-tokens=16384",
    "--concurrency=3",
    "--json",
)


@dataclass
class Soak:
    """What is run. ``L1`` is far smaller than what the engines store."""

    directory: Path
    seconds: float = 60.0
    engines: int = 8
    seed: int = 0
    l1_mib: int = 12


@dataclass
class Outcome:
    """What happened, and what must not have: ``faults`` are sentences."""

    figures: dict[str, Any] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class EngineProcess:
    """One engine; its output goes to a file of its own, so that a full pipe never stops it."""

    def __init__(self, soak: Soak, port: int, number: int, life: int) -> None:
        self.number = number
        self.resume_at: float | None = None
        stem = soak.directory / f"engine-{number}-{life}"
        self.out, self.err = stem.with_suffix(".out"), stem.with_suffix(".err")
        flags = [
            f"--port={port}",
            f"--engine-id=soak-{number}",
            f"--seed={soak.seed * 100 + number + 17 * life}",
        ]
        if number % 4 == 3:
            flags.append("--processes")
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "connector.simulate", *ENGINE, *flags], stdout=out, stderr=err
            )

    def faults(self, *, killed: bool) -> list[str]:
        """What it said or did that it must not."""
        status = self.process.poll()
        found = [line for line in self.err.read_text().splitlines() if "wrong bytes" in line]
        if status not in ((EXIT_KILLED,) if killed else (0,)):
            found.append(f"{self.out.stem} ended with status {status}: {self.err.read_text()[-500:]}")
        return found

    def summary(self) -> dict[str, Any]:
        """What it counted, if it came to say so."""
        try:
            told: dict[str, Any] = json.loads(self.out.read_text())
            return told
        except ValueError:
            return {}

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP until then."""
        self.process.send_signal(signal.SIGSTOP)
        self.resume_at = time.monotonic() + seconds

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)
        self.resume_at = None

    def kill(self) -> None:
        """SIGKILL, stopped or not."""
        self.process.kill()
        self.process.wait(20)


class Chaos:
    """Does something to somebody, again and again."""

    def __init__(self, soak: Soak, daemon: DaemonProcess, outcome: Outcome) -> None:
        self._soak = soak
        self._daemon = daemon
        self._outcome = outcome
        self._random = random.Random(soak.seed)
        self._lives = Counter[int]()
        self.engines = [self._born(number) for number in range(soak.engines)]
        self.ended: list[EngineProcess] = []

    def _born(self, number: int) -> EngineProcess:
        self._lives[number] += 1
        self._outcome.events["engines started"] += 1
        return EngineProcess(self._soak, self._daemon.port, number, self._lives[number])

    def step(self) -> None:
        """One act, and the end of stops whose time has come."""
        now = time.monotonic()
        for engine in self.engines:
            if engine.resume_at is not None and engine.resume_at <= now:
                engine.resume()
            if engine.process.poll() is not None:
                self._outcome.faults.append(f"engine {engine.number} ended by itself")
                self._outcome.faults += engine.faults(killed=False)
                self._replace(engine)
        victim = self._random.choice(self.engines)
        act = self._random.random()
        if act < 0.35:
            self._outcome.events["SIGKILL"] += 1
            victim.kill()
            self._outcome.faults += victim.faults(killed=True)
            self._replace(victim)
        elif act < 0.9 and victim.resume_at is None:
            self._outcome.events["SIGSTOP"] += 1
            # Some sleep through every TTL: they wake up with copies under way into memory that is not theirs.
            victim.stop_for(self._random.choice((0.2, 1.0, 2 * TTL_SECONDS)))
        elif act > 0.95:
            self._outcome.events["SIGSTOP of the daemon"] += 1
            self._daemon.signal(signal.SIGSTOP)
            time.sleep(0.5)
            self._daemon.signal(signal.SIGCONT)

    def _replace(self, engine: EngineProcess) -> None:
        self.ended.append(engine)
        self.engines[self.engines.index(engine)] = self._born(engine.number)

    def end(self) -> None:
        """Two die in the middle of their work, the others stop in order."""
        for engine in self.engines:
            if engine.resume_at is not None:
                engine.resume()
        # One born a moment ago has no signal handlers yet: it has once it has said what it is.
        eventually(lambda: all(each.err.stat().st_size for each in self.engines), "engines started", 60)
        time.sleep(2.0)
        dying, orderly = self.engines[:2], self.engines[2:]
        for engine in dying:
            engine.kill()
            self._outcome.faults += engine.faults(killed=True)
        for engine in orderly:
            engine.process.terminate()
        for engine in orderly:
            try:
                engine.process.wait(60)
            except subprocess.TimeoutExpired:
                engine.kill()
            self._outcome.faults += engine.faults(killed=False)

    def kill_all(self) -> None:
        """Whatever happened, leave no process."""
        for engine in self.engines:
            if engine.process.poll() is None:
                engine.kill()


def run(soak: Soak) -> Outcome:
    """Run it; the outcome has everything that was wrong."""
    outcome = Outcome()
    daemon = DaemonProcess(
        soak.directory,
        l1_size_gb=soak.l1_mib / 1024,
        extent_kib=16,
        chunk_size=32,
        heartbeat_seconds=0.5,
        l1_read_ttl_seconds=TTL_SECONDS,
        l1_write_ttl_seconds=TTL_SECONDS,
        session_ttl_seconds=TTL_SECONDS,
        engine_inflight_share=0.5,
    )
    daemon.start()
    chaos = Chaos(soak, daemon, outcome)
    try:
        _work(soak, daemon, chaos, outcome)
        chaos.end()
        _check_the_end(daemon, chaos, outcome)
    finally:
        chaos.kill_all()
        daemon.close()
    return outcome


def _work(soak: Soak, daemon: DaemonProcess, chaos: Chaos, outcome: Outcome) -> None:
    pace = random.Random(soak.seed + 1)
    end = time.monotonic() + soak.seconds
    check_at = time.monotonic() + CHECK_EVERY_SECONDS
    loaded, loaded_at = 0, time.monotonic()
    while time.monotonic() < end:
        time.sleep(pace.uniform(0.3, 1.2) * 8 / soak.engines)
        chaos.step()
        if time.monotonic() >= check_at:
            _check(daemon, outcome)
            check_at = time.monotonic() + CHECK_EVERY_SECONDS
            with daemon.client(timeout_seconds=20) as client:
                status = client.call("status", {}, DaemonStatus)
            now_loaded = status.counters.get("objects_loaded", 0)
            if now_loaded > loaded:
                loaded, loaded_at = now_loaded, time.monotonic()
            elif time.monotonic() - loaded_at > STANDSTILL_SECONDS:
                outcome.faults.append(f"no engine has loaded anything for {STANDSTILL_SECONDS:g} s")
                return


def _check(daemon: DaemonProcess, outcome: Outcome) -> None:
    with daemon.client(timeout_seconds=20) as client:
        result = run_check(client)
    outcome.events["checks"] += 1
    outcome.faults += [finding.sentence for finding in result.findings]
    if result.failure:
        outcome.faults.append(result.failure)
    longest = outcome.figures.get("longest look, ms", 0.0)
    outcome.figures["longest look, ms"] = max(longest, round(result.longest_look_ms, 1))


def _check_the_end(daemon: DaemonProcess, chaos: Chaos, outcome: Outcome) -> None:
    deadline = time.monotonic() + END_SECONDS
    with daemon.client(timeout_seconds=20) as client:
        while (status := _status(client)) is None or (_held(status) and time.monotonic() < deadline):
            time.sleep(0.2)
    outcome.faults += [f"{what}: {left} are left after the TTLs" for what, left in _held(status).items()]
    _check(daemon, outcome)
    counters = status.counters
    if counters.get("handler_errors"):
        outcome.faults.append(f"{counters['handler_errors']} handlers failed; the daemon's log says where")
    outcome.faults += [
        f"the loop '{each.name}' failed: {each.last_error}" for each in status.loops if each.errors
    ]
    _sum_up(status, chaos, outcome)


def _status(client: RequestClient) -> DaemonStatus | None:
    with contextlib.suppress(DaemonUnreachable):
        return client.call("status", {}, DaemonStatus)
    return None


def _held(status: DaemonStatus) -> dict[str, int]:
    held = {
        "leases": status.leases_total,
        "leased bytes": status.l1.leased_bytes,
        "reserved bytes": status.l1.reserved_bytes,
        "bytes in limbo": status.l1.limbo_bytes,
        "draining bytes": status.l1.draining_bytes,
    }
    return {what: left for what, left in held.items() if left}


def _sum_up(status: DaemonStatus, chaos: Chaos, outcome: Outcome) -> None:
    counters = status.counters
    told = [engine.summary() for engine in (*chaos.engines, *chaos.ended)]
    failures: Counter[str] = Counter()
    for each in told:
        failures.update(each.get("load_failures", {}))
    outcome.figures |= {
        "lookups": counters.get("requests_lookup", 0),
        "objects stored": counters.get("objects_stored", 0),
        "objects loaded and compared": counters.get("objects_loaded", 0),
        "MiB loaded": counters.get("bytes_loaded", 0) >> 20,
        "MiB stored": counters.get("bytes_stored", 0) >> 20,
        "entries evicted": dict(status.evictions),
        "lease ends": dict(status.lease_end_causes),
        "reservation ends": dict(status.reservation_end_causes),
        "session ends": {
            name.removeprefix("sessions_ended_"): n
            for name, n in counters.items()
            if name.startswith("sessions_ended_")
        },
        "objects that a load could not use": {
            name.removeprefix("load_failures_"): n
            for name, n in counters.items()
            if name.startswith("load_failures_")
        },
        "loads failed, as the surviving engines tell": dict(failures),
        "leases restored": counters.get("leases_restored", 0),
        "commits refused": counters.get("commits_refused", 0),
        "misses": dict(status.miss_reasons),
        "pages compared by surviving engines": sum(each.get("pages_compared", 0) for each in told),
        "wrong pages": sum(each.get("wrong_pages", 0) for each in told),
    }


def table(outcome: Outcome) -> str:
    """The outcome as text."""
    rows = {**outcome.events, **outcome.figures}
    width = max(len(name) for name in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, *(f"FAULT: {fault}" for fault in outcome.faults)])


def main() -> None:
    """Run it from the command line; exit status 1 with faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory for the logs; a temporary one by default")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        keep = arguments.keep
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagewarden-soak-")))
        outcome = run(Soak(directory, arguments.seconds, arguments.engines, arguments.seed))
    print(table(outcome), flush=True)
    sys.exit(1 if outcome.faults else 0)


if __name__ == "__main__":
    main()
