"""Clients that share no memory with the daemon: the same bytes, the same namespace, and nothing written too late."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.protocol.messages import ClearResult
from connector.client import SaveJob, inline
from connector.client.device.engine import DeviceCopies
from connector.client.device.pinning import PinnedArena
from kernels import Backend, Direction, Spans, reference_backend
from kernels.pointer_table import run_table
from tests.integration.test_data_path import accounted
from tests.integration.test_shared_memory_safety import check_all, fill
from tests.support.daemon import DaemonProcess
from tests.support.device import HostRuntime
from tests.support.engine import HYBRID, Engine, Rank, Shape, sharded
from tests.support.remote import RemoteEngine
from tests.support.waiting import eventually

PROMPT = list(range(5000, 5000 + 32 * 4 + 5))
NOWHERE = "/nowhere/pagewarden"
TWO_OBJECTS = 8192
"""A staging buffer for two of the small objects, so that a save takes several batches."""
MIB = 1 / 1024
BIG = Shape(HYBRID.groups, (700_001, 1_500_000))
"""Objects of 2.8 and 3 MB: several frames each, the last one odd."""


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


class ActingCopy:
    """Copies like the reference backend; before copy number `at` it does something to the daemon."""

    def __init__(self, at: int, action: Callable[[], object]) -> None:
        self.left = at
        self.action = action

    def backend(self) -> Backend:
        """The backend to give to a worker."""
        real = reference_backend()

        def copy(spans: Spans, direction: Direction, object_count: int) -> Any:
            self.left -= 1
            if self.left == 0:
                self.action()
            return real.copy_spans_checksummed(spans, direction, object_count)

        return Backend(
            name="acting",
            copy_spans=real.copy_spans,
            copy_spans_checksummed=copy,
            checksum_bytes=real.checksum_bytes,
            acquire_fence=real.acquire_fence,
            load_word=real.load_word,
        )


def loaded_exactly(engine: Engine, seed: int, request: str, chunks: int = 4) -> None:
    """A hit of the whole prompt whose bytes are those that were stored with `seed`."""
    found = engine.lookup(request, PROMPT)
    assert found.hit_chunks == chunks, found
    for rank in engine.ranks:
        for layers in rank.buffers:
            for layer in layers:
                layer[:] = np.uint8(0)
    loaded = engine.load(request, PROMPT, found)
    assert all(each.ok for each in loaded), loaded
    engine.check_loaded(chunks, seed=seed)
    engine.scheduler.release(found.lease)


def transports(daemon: DaemonProcess) -> dict[str, str]:
    """How each engine's page bytes travel."""
    return {engine.engine_id: engine.transport for engine in daemon.status().engines}


@pytest.mark.parametrize("shape", [HYBRID, BIG], ids=["one frame", "many frames"])
def test_what_is_stored_inline_is_loaded_shared_and_the_reverse(
    make_daemon: Callable[..., DaemonProcess], shape: Shape
) -> None:
    daemon = make_daemon(l1_size_gb=64 * MIB)
    far = Engine(daemon.port, "far", shape=shape, rank_options={"arena_dir": NOWHERE}).start()
    near = Engine(daemon.port, "near", shape=shape).start()
    health = far.ranks[0].client.health
    assert health.transport == "inline"
    assert NOWHERE in health.transport_reason
    assert near.ranks[0].client.health.transport == "shared"
    assert transports(daemon) == {"far": "inline", "near": "shared"}
    assert far.scheduler.settlement is not None
    assert near.scheduler.settlement is not None
    assert far.scheduler.settlement.namespace == near.scheduler.settlement.namespace

    [saved] = far.save(PROMPT, seed=7)
    assert (saved.stored, saved.failed) == (5, 0)
    [again] = near.save(PROMPT, seed=7)
    assert (again.stored, again.skipped) == (0, 5)
    loaded_exactly(near, 7, "near")
    loaded_exactly(far, 7, "far")
    with daemon.client(10.0) as client:
        client.call("clear", {}, ClearResult)
    near.save(PROMPT, seed=8)
    loaded_exactly(far, 8, "far again")
    inline_status = daemon.status().inline
    assert inline_status.bytes_in == saved.bytes_stored
    assert inline_status.bytes_out == 2 * saved.bytes_stored
    assert (inline_status.sessions, inline_status.refusals) == (1, 0)
    eventually(lambda: daemon.status().leases_total == 0, "the leases are released")
    accounted(daemon)
    far.stop()
    near.stop()
    assert daemon.status().inline.sessions == 0


def test_pages_in_device_memory_travel_inline_too(make_daemon: Callable[..., DaemonProcess]) -> None:
    """A staging buffer is host memory that no driver knows, as the arena is before its registration."""
    daemon = make_daemon()
    runtime = HostRuntime(run_table=run_table)
    copies = DeviceCopies(runtime, PinnedArena(runtime))
    options = {"arena_dir": NOWHERE, "backend": copies.backend, "segments": copies}
    device = Engine(daemon.port, "device", rank_options=options)
    for group in device.ranks[0].buffers:
        for layer in group:
            runtime.own(layer)
    device.start()
    assert device.save(PROMPT, seed=7)[0].stored == 5
    host = Engine(daemon.port, "host").start()
    loaded_exactly(host, 7, "host")
    loaded_exactly(device, 7, "device")
    assert daemon.status().inline.frames_out == 5
    host.stop()
    device.stop()


def test_the_option_decides_over_what_could_be_shared(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port, rank_options={"transport": "inline"}).start()
    assert "pagewarden.transport" in engine.ranks[0].client.health.transport_reason
    assert list(daemon.arena_dir.glob("attach-*.lock")) == [
        Path(daemon.arena_dir) / f"attach-{engine.scheduler._attach_lock.attach_id:016x}.lock"  # type: ignore[union-attr]
    ], "an inline worker needs no lock"
    engine.save(PROMPT, seed=3)
    loaded_exactly(engine, 3, "r")
    engine.stop()
    accounted(daemon)


def test_an_inline_worker_is_not_taken_for_dead_for_want_of_a_lock(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port, rank_options={"arena_dir": NOWHERE}).start()
    identity = engine.ranks[0].client.link.identity
    time.sleep(2.5)  # more than two rounds of the probe
    assert daemon.status().counters.get("sessions_ended_died", 0) == 0
    assert engine.ranks[0].client.link.identity == identity
    engine.stop()


def test_a_lock_that_the_daemon_does_not_see_leads_inline(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    """As on another host that has a directory of the same name, or on another kernel."""
    daemon = make_daemon()
    other = tmp_path / "arena of another host"
    other.mkdir()
    engine = Engine(daemon.port, rank_options={"arena_dir": str(other)}).start()
    health = engine.ranks[0].client.health
    assert health.transport == "inline"
    assert "lock" in health.transport_reason
    assert list(other.iterdir()) == []
    engine.save(PROMPT, seed=3)
    loaded_exactly(engine, 3, "r")
    engine.stop()


def test_ranks_of_one_engine_may_differ(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port, "mixed", shape=sharded(2), world_size=2)
    engine.ranks[1] = Rank(daemon.port, "mixed", engine.shape, 1, 2, arena_dir=NOWHERE)
    engine.start()
    assert transports(daemon) == {"mixed": "inline+shared"}
    assert [result.stored for result in engine.save(PROMPT, seed=3)] == [3, 3]
    loaded_exactly(engine, 3, "r")
    accounted(daemon)
    engine.stop()


def test_an_expired_writer_that_wakes_up_overwrites_nothing_and_holds_nothing(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(l1_size_gb=MIB, l1_write_ttl_seconds=0.5)
    late = make_engine(daemon, "late", arena_dir=NOWHERE, staging_bytes=TWO_OBJECTS)
    other = make_engine(daemon, "other")
    late.send(do="save", tokens=PROMPT, seed=1, skip_copies=1, stop_after_spans=1)
    late.wait_stopped()
    assert daemon.status().inline.frames_in == 2, "it stopped in mid-stream"
    eventually(lambda: daemon.status().reservation_end_causes.get("expired") == 5, "the reservations expire")
    status = daemon.status()
    assert (status.l1.limbo_bytes, status.l1.reserved_bytes) == (0, 0), "only the daemon writes: no limbo"
    stored = other.ask(do="save", tokens=PROMPT, seed=99)
    assert stored["stored"] == 5
    numbers = fill(other, daemon)
    late.resume()
    assert late.read()["failed"] == 5, "a late commit must be refused"
    assert daemon.status().inline.refusals >= 1
    check_all(other, numbers)
    accounted(daemon)
    assert late.ask(do="save", tokens=PROMPT, seed=99)["failed"] == 0, "the next save works again"


def test_a_session_that_ended_while_its_writer_was_stopped(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(l1_size_gb=MIB, session_ttl_seconds=2.0)
    late = make_engine(daemon, "late", arena_dir=NOWHERE, staging_bytes=TWO_OBJECTS)
    other = make_engine(daemon, "other")
    late.send(do="save", tokens=PROMPT, seed=1, skip_copies=1, stop_after_spans=1)
    late.wait_stopped()
    eventually(lambda: daemon.status().counters.get("sessions_ended_ttl", 0) >= 1, "the session ends", 60)
    eventually(lambda: daemon.status().l1.reserved_bytes + daemon.status().l1.limbo_bytes == 0, "all is free")
    numbers = fill(other, daemon)
    late.resume()
    assert late.read()["failed"] == 5
    check_all(other, numbers)
    eventually(lambda: late.ask(do="health")["ready"], "it attaches again")
    accounted(daemon)


def test_a_clear_in_mid_stream_is_not_undone(
    make_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    monkeypatch.setattr(inline, "STAGING_BYTES", TWO_OBJECTS)

    def clear() -> None:
        with daemon.client(10.0) as client:
            client.call("clear", {}, ClearResult)

    copy = ActingCopy(2, clear)
    engine = Engine(daemon.port, rank_options={"arena_dir": NOWHERE, "backend": copy.backend()}).start()
    [saved] = engine.save(PROMPT, seed=1)
    assert (saved.stored, saved.failed) == (0, 5)
    assert daemon.status().reservation_end_causes == {"cleared": 5}
    assert daemon.status().l1.free_bytes == daemon.status().l1.populated_bytes
    assert engine.lookup("after", PROMPT).hit_chunks == 0
    [saved] = engine.save(PROMPT, seed=2)
    assert saved.stored == 5
    loaded_exactly(engine, 2, "r")
    accounted(daemon)
    engine.stop()


def test_a_daemon_killed_in_mid_put_and_in_mid_get(
    make_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    monkeypatch.setattr(inline, "STAGING_BYTES", TWO_OBJECTS)
    copy = ActingCopy(2, daemon.kill)
    options = {
        "arena_dir": NOWHERE,
        "backend": copy.backend(),
        "save_timeout_seconds": 1.0,
        "load_timeout_seconds": 2.0,
    }
    engine = Engine(daemon.port, rank_options=options).start()
    [saved] = engine.save(PROMPT, seed=1)
    assert (saved.stored, saved.failed) == (0, 5), "half a stream must not become an object"

    def served() -> None:
        boot = engine.scheduler.health.boot
        daemon.start()
        eventually(lambda: engine.scheduler.health.boot not in (b"", boot), "the restart is noticed")
        engine.wait_settled()
        eventually(lambda: engine.ranks[0].client.link.usable, "by the worker too")

    served()
    assert daemon.status().l1.limbo_bytes == 0, "no process can still write what an inline client reserved"
    [saved] = engine.save(PROMPT, seed=2)
    assert saved.stored == 5
    found = engine.lookup("r", PROMPT)
    copy.left = 1
    [loaded] = engine.load("r", PROMPT, found)
    assert not loaded.ok
    assert "timeout" in loaded.reason
    served()
    assert engine.save(PROMPT, seed=2)[0].stored == 0, "what was committed is there again"
    loaded_exactly(engine, 2, "again")
    accounted(daemon)
    engine.stop()


def test_a_daemon_restarted_in_mid_put_takes_nothing_of_the_former_session(
    make_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    monkeypatch.setattr(inline, "STAGING_BYTES", TWO_OBJECTS)

    def restart() -> None:
        daemon.kill()
        daemon.start()

    copy = ActingCopy(2, restart)
    engine = Engine(daemon.port, rank_options={"arena_dir": NOWHERE, "backend": copy.backend()}).start()
    [saved] = engine.save(PROMPT, seed=1)
    assert (saved.stored, saved.failed) == (0, 5)
    assert daemon.status().inline.frames_in == 0
    eventually(lambda: engine.ranks[0].client.link.usable, "it has attached again")
    engine.wait_settled()
    eventually(lambda: engine.save(PROMPT, seed=2)[0].failed == 0, "the next save is stored")
    loaded_exactly(engine, 2, "r")
    engine.stop()


def test_a_daemon_that_hangs_costs_a_bounded_wait(
    make_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    monkeypatch.setattr(inline, "STAGING_BYTES", TWO_OBJECTS)
    copy = ActingCopy(2, lambda: daemon.signal(signal.SIGSTOP))
    options = {
        "arena_dir": NOWHERE,
        "backend": copy.backend(),
        "save_timeout_seconds": 0.5,
        "load_timeout_seconds": 1.0,
    }
    engine = Engine(daemon.port, rank_options=options).start()
    try:
        [saved] = engine.save(PROMPT, seed=1)
        assert saved.failed == 5
        engine.ranks[0].client.save(SaveJob(500, ()))
    finally:
        daemon.signal(signal.SIGCONT)
    eventually(lambda: engine.ranks[0].client.link.usable, "it answers again")
    eventually(
        lambda: daemon.status().l1.reserved_bytes + daemon.status().l1.limbo_bytes == 0,
        "what was given up is free",
    )
    [saved] = engine.save(PROMPT, seed=2)
    assert saved.stored == 5
    loaded_exactly(engine, 2, "r")
    accounted(daemon)
    engine.stop()


def test_an_object_that_goes_in_mid_get_fails_the_load(
    make_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that ended takes the right to read with it, and what is freed is never passed on."""
    daemon = make_daemon()
    monkeypatch.setattr(inline, "STAGING_BYTES", TWO_OBJECTS)
    copy = ActingCopy(10**6, lambda: None)
    engine = Engine(daemon.port, rank_options={"arena_dir": NOWHERE, "backend": copy.backend()}).start()
    engine.save(PROMPT, seed=1)
    found = engine.lookup("r", PROMPT)

    def end_lease_and_clear() -> None:
        engine.scheduler.release(found.lease)
        eventually(lambda: daemon.status().leases_total == 0, "the lease is gone")
        with daemon.client(10.0) as client:
            client.call("clear", {}, ClearResult)

    copy.action, copy.left = end_lease_and_clear, 1
    [loaded] = engine.load("r", PROMPT, found)
    assert not loaded.ok
    assert "generation" in loaded.reason
    assert daemon.status().counters["load_failures_generation"] > 0
    engine.save(PROMPT, seed=5)
    loaded_exactly(engine, 5, "again")
    accounted(daemon)
    engine.stop()


def test_bytes_damaged_in_the_arena_are_found_and_quarantined(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port, rank_options={"arena_dir": NOWHERE}).start()
    engine.save(PROMPT, seed=1)
    [path] = daemon.arena_dir.glob("segment-*.arena")
    pattern = engine.ranks[0].buffers[0][0][0].tobytes()[:64]
    with path.open("r+b") as file:
        content = file.read()
        at = content.index(pattern)
        file.seek(at)
        file.write(bytes(byte ^ 0xFF for byte in pattern))
    found = engine.lookup("r", PROMPT)
    [loaded] = engine.load("r", PROMPT, found)
    assert not loaded.ok
    assert "checksum" in loaded.reason
    eventually(lambda: daemon.status().counters.get("quarantined") == 1, "the object is quarantined")
    engine.scheduler.release(found.lease)
    engine.stop()


def test_an_orderly_stop_waits_for_inline_copies(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port, rank_options={"arena_dir": NOWHERE}).start()
    engine.save(PROMPT, seed=1)
    loaded_exactly(engine, 1, "r")
    assert daemon.stop() == 0
    assert '"drained": true' in daemon.log.read_text()
    engine.stop()
