"""Restarts of real daemon processes under real engines: what comes back, what must not, and who is fenced."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.catalog.queries import CatalogReader
from appliance.protocol import arena_layout as layout
from appliance.protocol.messages import ClearResult
from appliance.protocol.status import DaemonStatus
from tests.integration.test_data_path import accounted
from tests.support.daemon import DaemonProcess
from tests.support.engine import Engine, sharded
from tests.support.remote import RemoteEngine
from tests.support.waiting import eventually

CHUNK = 32
PROMPT = list(range(5000, 5000 + CHUNK * 4 + 5))
SHARED = [*PROMPT[: CHUNK * 2], *range(9000, 9000 + CHUNK * 2 + 5)]
OBJECTS = 5


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., RemoteEngine]]:
    """Starts engine processes and ends them after the test."""
    engines: list[RemoteEngine] = []

    def make(daemon: DaemonProcess, engine_id: str, **options: Any) -> RemoteEngine:
        engines.append(RemoteEngine(daemon.port, engine_id, tmp_path / "engines.log", **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(number: int) -> list[int]:
    """A prompt of four chunks that shares nothing with any other number's."""
    return list(range(100_000 + number * 1000, 100_000 + number * 1000 + CHUNK * 4 + 5))


def end(daemon: DaemonProcess, how: str) -> None:
    """An orderly stop, or SIGKILL."""
    if how == "stop":
        assert daemon.stop() == 0
    else:
        daemon.kill()


def back_with(engine: Engine, daemon: DaemonProcess) -> None:
    """Wait until the engine serves with the daemon's present boot."""
    boot = daemon.status().boot

    def joined() -> bool:
        members = [engine.scheduler.health, *(rank.client.health for rank in engine.ranks)]
        return all(each.state == "joined" and each.boot.hex() == boot for each in members)

    eventually(joined, "the engine found the restarted daemon")
    engine.wait_settled()


def hits(engine: Engine, request: str, tokens: list[int], seed: int, chunks: int = 4) -> None:
    """A prompt is found in full, and every byte of it is what was stored."""
    found = engine.lookup(request, tokens)
    assert (found.hit_chunks, found.reason) == (chunks, None), found
    loaded = engine.load(request, tokens, found)
    assert all(each.ok for each in loaded), loaded
    engine.check_loaded(chunks, seed)
    engine.scheduler.release(found.lease)


def check(daemon: DaemonProcess) -> None:
    """`pagewarden check` finds nothing, and the catalog has caught up with what was taken back."""
    told = subprocess.run(
        [sys.executable, "-m", "appliance.cli", "check", "--json", *daemon.reach()],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    objects = daemon.status().l1.objects
    eventually(lambda: catalogued(daemon) == objects, "the catalog has a row for every object")


def catalogued(daemon: DaemonProcess) -> int:
    return sum(total.objects for total in CatalogReader(daemon.directory / "catalog.db").totals())


def outcomes(status: DaemonStatus) -> dict[str, str]:
    assert status.restart is not None
    return {gate.name: gate.outcome for gate in status.restart.gates}


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_everything_committed_is_back(make_daemon: Callable[..., DaemonProcess], how: str) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port, shape=sharded(2), world_size=2).start()
    engine.save(PROMPT, seed=3)
    engine.save(prompt(1), seed=1)
    before = daemon.status()
    assert before.restart is not None
    assert before.restart.reason == "There was no arena."
    held = engine.lookup("held", PROMPT)
    assert before.l1.objects == 2 * 6
    for number in (1, 2):
        end(daemon, how)
        daemon.start()
        after = daemon.status()
        restart = after.restart
        assert restart is not None
        assert (restart.mode, restart.objects, restart.left_behind) == ("warm", 12, {}), restart
        assert restart.clean_stop == (how == "stop")
        assert set(outcomes(after).values()) == {"passed"}
        assert after.l1.objects == before.l1.objects
        assert after.l1.occupied_bytes == before.l1.occupied_bytes
        assert after.leases_total == 0, "leases do not survive"
        [namespace] = after.namespaces
        assert (namespace.chunks, namespace.model) == (8, "tests/tiny")
        assert namespace.fields["cache.dtype"] == "auto"
        back_with(engine, daemon)
        hits(engine, f"after-{number}", PROMPT, seed=3)
        hits(engine, f"other-{number}", prompt(1), seed=1)
        assert engine.save(prompt(1), seed=1)[0].stored == 0, "what is back is not stored again"
        accounted(daemon)
        check(daemon)
    assert held.lease
    engine.stop()


def test_engines_are_back_within_a_heartbeat_and_hit_at_once(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    """Nobody restarts the engine or tells it anything: its next heartbeat meets another boot."""
    daemon = make_daemon(heartbeat_seconds=0.2)
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    old = engine.scheduler.health.boot
    end(daemon, "stop")
    daemon.start()
    began = time.monotonic()
    eventually(lambda: engine.scheduler.health.boot not in (b"", old), "the restart is noticed")
    back_with(engine, daemon)
    told = f"registered again {time.monotonic() - began:.2f} s after the daemon was ready"
    hits(engine, "first", PROMPT, seed=1)
    assert daemon.status().engines[0].lookups == 1, told
    engine.stop()


def test_a_load_located_before_the_crash_completes_or_fails_but_never_lies(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon()
    reader = make_engine(daemon, "reader")
    reader.ask(do="save", tokens=PROMPT, seed=1)
    reader.ask(do="lookup", tokens=PROMPT, request="r")
    reader.send(do="load", tokens=PROMPT, request="r", seed=1, stop_after_spans=2)
    reader.wait_stopped()
    daemon.kill()
    daemon.start()
    reader.resume()
    loaded = reader.read()
    assert loaded["ok"], loaded
    assert loaded["exact"], "the words did not change, so the bytes must be those that were stored"


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_writer_of_the_boot_before_is_fenced(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine], how: str
) -> None:
    """Stopped in mid-copy, it wakes up under another boot and writes: into memory that nobody else was given."""
    daemon = make_daemon(l1_size_gb=1 / 1024, drain_seconds=0.2)
    late, other = make_engine(daemon, "late"), make_engine(daemon, "other")
    other.ask(do="save", tokens=prompt(900), seed=900)
    late.send(do="save", tokens=PROMPT, seed=1, stop_after_spans=3)
    late.wait_stopped()
    writing = daemon.status().l1.reserved_bytes
    assert writing > 0
    end(daemon, how)
    daemon.start()
    status = daemon.status()
    assert status.restart is not None
    assert (status.restart.mode, status.restart.objects) == ("warm", OBJECTS)
    assert status.restart.limbo_objects == OBJECTS
    assert status.l1.limbo_bytes == writing
    boot = status.boot
    eventually(
        lambda: (health := other.ask(do="health"))["ready"] and set(health["boots"]) == {boot},
        "other is back",
    )
    stored = {900: 900}
    for number in range(40):
        other.ask(do="save", tokens=prompt(number), seed=number)
        stored[number] = number
    assert daemon.status().l1.limbo_bytes == writing, "memory left limbo while its writer could still write"
    late.resume()
    assert late.read()["stored"] == 0, "a commit of the boot before must be refused"
    eventually(lambda: daemon.status().l1.limbo_bytes == 0, "its writer attached anew: nothing is in flight")
    found = 0
    for number, seed in stored.items():
        request = f"check-{number}"
        if other.ask(do="lookup", tokens=prompt(number), request=request)["hit_chunks"]:
            loaded = other.ask(do="load", tokens=prompt(number), request=request, seed=seed)
            assert loaded["ok"], loaded
            assert loaded["exact"]
            found += 1
    assert found > 3
    accounted(daemon)
    check(daemon)


def test_limbo_of_a_writer_that_died_with_the_daemon_ends_after_the_grace(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon()
    writer = make_engine(daemon, "writer")
    writer.send(do="save", tokens=PROMPT, seed=1, stop_after_spans=3)
    writer.wait_stopped()
    writing = daemon.status().l1.reserved_bytes
    daemon.kill()
    writer.kill()
    daemon.settings["death_grace_seconds"] = 600.0
    daemon.start()
    assert daemon.status().l1.limbo_bytes == writing, "dead, but what it started may still be in flight"
    daemon.kill()
    daemon.settings["death_grace_seconds"] = 0.2
    daemon.start()
    eventually(lambda: daemon.status().l1.limbo_bytes == 0, "proven dead, and the grace is over")
    check(daemon)


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("one", [True, False], ids=["namespace", "all"])
def test_an_acknowledged_clear_holds(make_daemon: Callable[..., DaemonProcess], how: str, one: bool) -> None:
    daemon = make_daemon()
    first, second = (
        Engine(daemon.port, "first").start(),
        Engine(daemon.port, "second", shape=sharded(2), world_size=2).start(),
    )
    for engine in (first, second):
        engine.save(PROMPT, seed=1)
    held = first.lookup("held", PROMPT)
    namespace = first.scheduler.settlement.namespace if one else ""
    with daemon.client(10.0) as client:
        cleared = client.call("clear", {"namespace": namespace, "requested_by": "tests"}, ClearResult)
    assert cleared.held_bytes > 0, "a lease reads what was cleared"
    assert held.lease
    end(daemon, how)
    daemon.start()
    for engine in (first, second):
        back_with(engine, daemon)
    assert first.lookup("after", PROMPT).hit_chunks == 0, "a restart undid a clear"
    if one:
        hits(second, "other", PROMPT, seed=1)
    else:
        assert second.lookup("after", PROMPT).hit_chunks == 0, "a restart undid a clear"
    first.save(PROMPT, seed=2)
    end(daemon, how)
    daemon.start()
    back_with(first, daemon)
    hits(first, "again", PROMPT, seed=2)
    check(daemon)
    first.stop()
    second.stop()


def test_a_chain_that_was_shared_is_whole_again(make_daemon: Callable[..., DaemonProcess]) -> None:
    """Two prompts with a common beginning: what one evicts, the other's chunks follow."""
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    engine.save(SHARED, seed=1, states=[1, 3])
    daemon.kill()
    daemon.start()
    back_with(engine, daemon)
    hits(engine, "one", PROMPT, seed=1)
    hits(engine, "two", SHARED, seed=1)
    hits(engine, "common", SHARED[: CHUNK * 2 + 5], seed=1, chunks=2)
    assert daemon.status().l1.chunks == 6
    engine.stop()


def test_killed_over_and_over_while_it_stores_it_never_serves_a_wrong_byte(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    """SIGKILL at moments that nobody chose; what was acknowledged before a kill is there after it."""
    daemon = make_daemon(l1_size_gb=4 / 1024)
    writer = make_engine(daemon, "writer")
    acknowledged: dict[int, int] = {}
    for turn in range(6):
        boot = daemon.status().boot
        eventually(
            lambda boot=boot: (health := writer.ask(do="health"))["ready"] and set(health["boots"]) == {boot},
            "the writer is back",
        )
        for number in range(turn * 4, turn * 4 + 3):
            if writer.ask(do="save", tokens=prompt(number), seed=number)["stored"] == OBJECTS:
                acknowledged[number] = number
        writer.send(do="save", tokens=prompt(turn * 4 + 3), seed=turn * 4 + 3)
        time.sleep(0.003 * turn)
        daemon.kill()
        daemon.start()
        writer.read()
    assert len(acknowledged) == 18
    boot = daemon.status().boot
    eventually(
        lambda: (health := writer.ask(do="health"))["ready"] and set(health["boots"]) == {boot},
        "back once more",
    )
    for number in range(24):
        request = f"check-{number}"
        found = writer.ask(do="lookup", tokens=prompt(number), request=request)["hit_chunks"]
        assert found == 4 or number not in acknowledged, "what was acknowledged was lost"
        if found:
            loaded = writer.ask(do="load", tokens=prompt(number), request=request, seed=number)
            assert loaded["ok"], loaded
            assert loaded["exact"]
    accounted(daemon)
    check(daemon)


def test_each_start_is_told_in_the_log_and_in_the_catalog(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    daemon.stop()
    daemon.start()
    daemon.stop()
    [path] = daemon.arena_dir.glob("segment-*.arena")
    with path.open("r+b") as file:
        file.seek(layout.HEADER.fields["layout"][1])
        file.write(np.uint32(99).tobytes())
    daemon.start()
    reader = CatalogReader(daemon.directory / "catalog.db")
    cold, warm, first = eventually(
        lambda: rows if len(rows := reader.restarts()) == 3 else None, "three starts in the catalog"
    )
    assert (first.mode, first.clean_stop, first.reason) == ("cold", False, "There was no arena.")
    assert (warm.mode, warm.clean_stop) == ("warm", True)
    assert warm.gates["table_walk"]["facts"]["objects"] == OBJECTS
    assert (cold.mode, cold.clean_stop) == ("cold", True)
    assert "arena layout version 99" in cold.reason
    ordered = sorted(cold.gates.items(), key=lambda each: each[1]["place"])
    assert [(name, gate["outcome"]) for name, gate in ordered] == [
        ("lock", "passed"),
        ("size", "passed"),
        ("magic", "passed"),
        ("schema", "failed"),
        ("layout", "skipped"),
        ("epochs", "skipped"),
        ("table_walk", "skipped"),
        ("fit", "skipped"),
    ]
    log = daemon.log.read_text()
    assert '"gate": "schema", "outcome": "failed"' in log
    assert log.count('"event": "the arena is open"') == 3
    engine.stop()


def test_a_restart_with_a_larger_l1_keeps_everything(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(l1_size_gb=0.25 / 1024)
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    daemon.stop()
    daemon.settings["l1_size_gb"] = 0.75 / 1024
    status = daemon.start().status()
    assert status.restart is not None
    assert (status.restart.mode, status.restart.objects) == ("warm", OBJECTS), status.restart
    assert (status.l1.segments, status.l1.capacity_bytes) == (2, 3 << 18)
    back_with(engine, daemon)
    hits(engine, "kept", PROMPT, seed=1)
    for number in range(12):
        assert engine.save(prompt(number), seed=number)[0].failed == 0
    assert daemon.status().l1.occupied_bytes > 1 << 18, "the new segment is used"
    for number in range(8, 12):
        hits(engine, f"new-{number}", prompt(number), seed=number)
    daemon.kill()
    daemon.start()
    back_with(engine, daemon)
    hits(engine, "both", prompt(11), seed=11)
    check(daemon)
    engine.stop()


def test_objects_of_a_namespace_that_nothing_describes_are_left_out(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    namespace = engine.scheduler.settlement.namespace
    engine.save(PROMPT, seed=1)
    path = daemon.arena_dir / f"namespace-{namespace}.json"
    assert path.exists()
    path.unlink()
    daemon.kill()
    daemon.start()
    restart = daemon.status().restart
    assert restart is not None
    assert (restart.mode, restart.objects, restart.left_behind) == ("warm", 0, {"namespace": OBJECTS})
    back_with(engine, daemon)
    assert engine.lookup("gone", PROMPT).hit_chunks == 0
    engine.save(PROMPT, seed=2)
    hits(engine, "new", PROMPT, seed=2)
    check(daemon)
    engine.stop()


def test_sigterm_in_the_middle_of_stores_keeps_what_was_committed(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon()
    writer = make_engine(daemon, "writer")
    writer.ask(do="save", tokens=prompt(1), seed=1)
    writer.send(do="save", tokens=PROMPT, seed=2, stop_after_spans=3)
    writer.wait_stopped()
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    writer.resume()
    told = writer.read()
    assert daemon.process.wait(20) == 0
    daemon.start()
    restart = daemon.status().restart
    assert restart is not None
    assert restart.objects == OBJECTS + told["stored"]
    assert restart.clean_stop, "the copy under way was waited for"


def test_simulated_engines_serve_on_through_restarts(make_daemon: Callable[..., DaemonProcess]) -> None:
    """Stopped and killed under load: no request is lost, no byte is wrong, and the cache goes on hitting."""
    daemon = make_daemon(l1_size_gb=0.05, heartbeat_seconds=0.2)
    engines = subprocess.Popen(
        [
            *(sys.executable, "-m", "connector.simulate", f"--port={daemon.port}", "--json", "--scale=256"),
            *("--speed=50", "--cache-tokens=16384", "--tp=2", "--engines=2", "--seconds=90"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def serving(objects: int) -> bool:
        status = daemon.status()
        loaded = status.counters.get("objects_loaded", 0)
        return loaded > 10 and status.l1.objects > objects and all(e.hit_tokens for e in status.engines)

    try:
        eventually(lambda: serving(20), "both engines load what was stored", 60.0)
        for how in ("stop", "kill", "kill"):
            objects = daemon.status().l1.objects
            end(daemon, how)
            restart = daemon.start().status().restart
            assert restart is not None
            assert restart.mode == "warm", restart.reason
            assert restart.objects >= objects // 2, (
                "an eviction may go on until the end, but not of half of the cache"
            )
            eventually(lambda: serving(0), "they load again", 60.0)
        engines.send_signal(signal.SIGTERM)
        out, err = engines.communicate(timeout=60)
    finally:
        engines.kill()
        engines.communicate()
    assert engines.returncode == 0, err
    told = json.loads(out)
    assert told["wrong_pages"] == 0
    assert told["pages_compared"] > 0
    assert told["finished"] + told["aborted"] == told["requests"]
    check(daemon)


def test_nothing_is_evicted_until_earlier_engines_are_back_or_dead(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(l1_size_gb=0.25 / 1024)
    asleep, other = make_engine(daemon, "asleep"), make_engine(daemon, "other")
    for number in range(20):
        asleep.ask(do="save", tokens=prompt(number), seed=number)
    assert daemon.status().evictions, "the cache is full"
    asleep.process.send_signal(signal.SIGSTOP)
    daemon.kill()
    daemon.start()
    before = daemon.status()
    assert before.l1.objects > 20
    boot = before.boot
    eventually(
        lambda: (health := other.ask(do="health"))["ready"] and set(health["boots"]) == {boot},
        "other is back",
    )
    for number in range(50, 56):
        other.ask(do="save", tokens=prompt(number), seed=number)
    status = daemon.status()
    assert status.counters.get("reserve_warming", 0) > 0
    assert not status.evictions, "what a sleeping engine may still read was evicted"
    asleep.kill()
    eventually(lambda: "eviction may go on" in daemon.log.read_text(), "its death is proven")
    other.ask(do="save", tokens=prompt(60), seed=60)
    eventually(lambda: daemon.status().evictions.get("evicted", 0) > 0, "eviction goes on")
    request = "after"
    assert other.ask(do="lookup", tokens=prompt(60), request=request)["hit_chunks"] == 4
    assert other.ask(do="load", tokens=prompt(60), request=request, seed=60)["exact"]
    accounted(daemon)
