"""The ways in which a late, stopped or dying process could hurt shared memory, each provoked for real.

Every test ends by comparing bytes: what others stored meanwhile must be exactly what they load.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from appliance.hashing import join_keys
from appliance.protocol import arena_layout as layout
from appliance.protocol.base import MissReason
from appliance.protocol.client import endpoint_of
from appliance.protocol.messages import ClearResult
from appliance.protocol.wire import Request, pack_request, unpack_reply
from tests.integration.test_data_path import accounted
from tests.support.daemon import DaemonProcess
from tests.support.engine import Engine, sharded
from tests.support.remote import RemoteEngine
from tests.support.waiting import eventually

PROMPT = list(range(5000, 5000 + 32 * 4 + 5))
MIB = 1 / 1024


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
    return list(range(100_000 + number * 1000, 100_000 + number * 1000 + 32 * 4 + 5))


def fill(engine: RemoteEngine, daemon: DaemonProcess, least: int = 8) -> list[int]:
    """Store prompts until memory was reused; returns the numbers whose bytes must still be right."""
    for number in range(500):
        engine.ask(do="save", tokens=prompt(number), seed=number)
        if number >= least and daemon.status().evictions.get("evicted", 0) > 20:
            return list(range(number + 1))
    raise AssertionError("L1 never filled up")


def found_again(engine: RemoteEngine, daemon: DaemonProcess) -> None:
    """Wait until an engine serves with the daemon's present boot."""
    boot = daemon.status().boot

    def found() -> bool:
        health = engine.ask(do="health")
        return bool(health["ready"]) and set(health["boots"]) == {boot}

    eventually(found, "the engine found the restarted daemon")


def check_all(engine: RemoteEngine, numbers: list[int]) -> int:
    """Load every prompt that is still there and compare its bytes; returns how many were."""
    hits = 0
    for number in numbers:
        found = engine.ask(do="lookup", tokens=prompt(number), request=f"check-{number}")
        if found["hit_chunks"]:
            loaded = engine.ask(do="load", tokens=prompt(number), request=f"check-{number}", seed=number)
            assert loaded["ok"], loaded
            assert loaded["exact"]
            hits += 1
    assert hits > 3
    return hits


def test_a_worker_stopped_in_mid_copy_writes_after_its_reservation_expired(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(l1_size_gb=MIB, l1_write_ttl_seconds=0.5)
    late, other = make_engine(daemon, "late"), make_engine(daemon, "other")
    late.send(do="save", tokens=PROMPT, seed=1, stop_after_spans=3)
    late.wait_stopped()
    eventually(lambda: daemon.status().reservation_end_causes.get("expired") == 5, "the reservations expire")
    limbo = daemon.status().l1.limbo_bytes
    assert limbo > 0
    stored = other.ask(do="save", tokens=PROMPT, seed=99)
    assert stored["stored"] == 5, "the keys of an expired reservation are free at once"
    numbers = fill(other, daemon)
    assert daemon.status().l1.limbo_bytes == limbo, "memory left limbo while its writer could still write"
    late.resume()
    assert late.read()["failed"] == 5, "a late commit must be refused"
    eventually(lambda: daemon.status().l1.limbo_bytes == 0, "the writer has acknowledged")
    check_all(other, numbers)
    accounted(daemon)


def test_a_dead_writer_s_memory_returns_after_proof_of_death(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(session_ttl_seconds=600, l1_write_ttl_seconds=600)
    writer = make_engine(daemon, "writer")
    writer.send(do="save", tokens=PROMPT, seed=1, stop_after_spans=3)
    writer.wait_stopped()
    assert daemon.status().l1.reserved_bytes > 0
    time.sleep(1.5)  # more than the probe's interval: a stopped process is not dead
    assert daemon.status().l1.reserved_bytes > 0
    writer.kill()
    eventually(lambda: daemon.status().counters.get("sessions_ended_died", 0) >= 1, "death is proven")
    eventually(
        lambda: daemon.status().l1.free_bytes == daemon.status().l1.populated_bytes, "all memory is free"
    )
    accounted(daemon)


def test_a_lost_lookup_reply_holds_no_memory_for_ever(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    link = engine.scheduler.link
    keys, _ = engine.keys(PROMPT)
    args = {"request": "lost", "keys": join_keys(keys), "prompt_tokens": len(PROMPT)}
    body = pack_request(Request("lookup", 2**40, link._boot, link._session, args))
    context = zmq.Context()
    try:
        leases = []
        for _ in range(2):  # a retry of the same request gets the same lease, not a second one
            socket = context.socket(zmq.DEALER)
            socket.connect(endpoint_of("127.0.0.1", daemon.port))
            socket.send(body)
            assert socket.poll(5000)
            leases.append(unpack_reply(socket.recv()).result["lease"])
            socket.close(linger=0)
        assert leases[0] == leases[1] != 0
        silent = context.socket(zmq.DEALER)
        silent.connect(endpoint_of("127.0.0.1", daemon.port))
        silent.send(
            pack_request(Request("lookup", 2**40 + 1, link._boot, link._session, {**args, "request": "x"}))
        )
        eventually(
            lambda: daemon.status().lease_end_causes.get("orphaned") == 2, "unnamed leases are orphaned"
        )
        silent.close(linger=0)
    finally:
        context.term()
    found = engine.lookup("kept", PROMPT)
    time.sleep(1.0)  # ten heartbeats
    assert [lease.lease for lease in daemon.status().leases] == [found.lease], "a lease that is named stays"
    engine.stop()


def test_the_daemon_killed_right_after_a_reserve_reply(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(l1_size_gb=MIB)
    late, other = make_engine(daemon, "late"), make_engine(daemon, "other")
    late.send(do="save", tokens=PROMPT, seed=1, stop_after_spans=3)
    late.wait_stopped()
    reserved = daemon.status().l1.reserved_bytes
    assert reserved > 0
    daemon.kill()
    daemon.start()
    status = daemon.status()
    assert status.l1.limbo_bytes == reserved, "what was being written must not be handed out"
    found_again(other, daemon)
    numbers = fill(other, daemon)
    assert daemon.status().l1.limbo_bytes == reserved
    late.resume()
    assert late.read()["failed"] == 5
    eventually(
        lambda: daemon.status().l1.limbo_bytes == 0, "the writer attached again, with nothing in flight"
    )
    check_all(other, numbers)
    accounted(daemon)


def test_a_cold_start_under_a_live_mapping_is_detected_by_the_reader(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(l1_size_gb=MIB)
    reader, other = make_engine(daemon, "reader"), make_engine(daemon, "other")
    with daemon.client(10.0) as client:
        client.call("clear", {"requested_by": "tests"}, ClearResult)
    reader.ask(do="save", tokens=PROMPT, seed=1)
    assert reader.ask(do="lookup", tokens=PROMPT, request="r")["hit_chunks"] == 4
    reader.send(do="load", tokens=PROMPT, request="r", seed=1, stop_after_spans=2)
    reader.wait_stopped()
    daemon.kill()
    [segment] = daemon.arena_dir.glob("segment-*.arena")
    with segment.open("r+b") as file:  # a header that has lost the clear: its objects are not taken back
        file.seek(layout.HEADER.fields["global_clear_epoch"][1])
        file.write(bytes(4))
    restart = daemon.start().status().restart
    assert restart is not None
    assert restart.mode == "cold", restart.reason
    found_again(other, daemon)
    fill(other, daemon)
    reader.resume()
    loaded = reader.read()
    assert not loaded["ok"], "bytes of another object would have been used"
    assert "generation" in loaded["reason"]


def test_a_clear_between_reserve_and_commit_is_not_undone(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon()
    writer = make_engine(daemon, "writer")
    writer.ask(do="save", tokens=prompt(1), seed=1)
    writer.send(do="save", tokens=PROMPT, seed=2, stop_after_spans=3)
    writer.wait_stopped()
    with daemon.client(10.0) as client:
        cleared = client.call("clear", {"requested_by": "tests"}, ClearResult)
    assert cleared.removed_objects == 5
    assert daemon.status().l1.limbo_bytes > 0
    writer.resume()
    assert writer.read()["failed"] == 5, "the commit would undo the clear"
    for tokens in (PROMPT, prompt(1)):
        assert writer.ask(do="lookup", tokens=tokens, request="after")["hit_chunks"] == 0
    eventually(
        lambda: daemon.status().l1.free_bytes == daemon.status().l1.populated_bytes, "all memory is free"
    )
    accounted(daemon)


def test_bytes_under_a_lease_outlive_a_clear_until_the_reader_is_done(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(l1_size_gb=MIB)
    reader, other = make_engine(daemon, "reader"), make_engine(daemon, "other")
    reader.ask(do="save", tokens=PROMPT, seed=1)
    reader.ask(do="lookup", tokens=PROMPT, request="r")
    reader.send(do="load", tokens=PROMPT, request="r", seed=1, stop_after_spans=2)
    reader.wait_stopped()
    with daemon.client(10.0) as client:
        cleared = client.call("clear", {"requested_by": "tests"}, ClearResult)
    assert cleared.held_bytes > 0
    fill(other, daemon)
    assert daemon.status().l1.draining_bytes == cleared.held_bytes
    reader.resume()
    loaded = reader.read()
    assert loaded["ok"], loaded
    assert loaded["exact"], "bytes under a live hold were reused"
    eventually(lambda: daemon.status().l1.draining_bytes == 0, "the last reader is done")
    accounted(daemon)


def test_one_rank_dead_at_commit_leaves_a_set_that_nobody_hits(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon()
    first = make_engine(daemon, "tp2", world_size=2, only_rank=0)
    second = make_engine(daemon, "tp2", world_size=2, only_rank=1)
    watcher = Engine(daemon.port, "tp2", shape=sharded(2), world_size=2)
    watcher.scheduler.start()
    watcher.wait_settled()
    keys, parents = watcher.keys(PROMPT)
    items: list[list[Any]] = [
        [0, chunk, key.hex(), parent.hex(), [2 * chunk, 2 * chunk + 1], 1]
        for chunk, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]
    items.append([1, 3, keys[3].hex(), parents[3].hex(), [3], 1])
    second.send(job=1, items=items, stop_after_spans=1)
    second.wait_stopped()
    assert first.ask(job=1, items=items)["stored"] == 3
    second.kill()
    eventually(lambda: daemon.status().counters.get("sessions_ended_died", 0) >= 1, "death is proven")
    eventually(
        lambda: daemon.status().l1.reserved_bytes + daemon.status().l1.limbo_bytes == 0, "its memory is free"
    )
    assert watcher.scheduler.link.health.state == "joined"
    eventually(lambda: watcher.scheduler.settlement is None, "an engine without a rank is not settled")
    again = make_engine(daemon, "tp2", world_size=2, only_rank=1)
    watcher.wait_settled()
    found = watcher.lookup("half", PROMPT)
    assert found.hit_chunks == 0
    assert again.ask(job=2, items=items[:-1])["stored"] == 2
    found = watcher.lookup("state missing", PROMPT)
    assert (found.hit_chunks, found.reason) == (0, MissReason.RANK_MISSING)
    assert again.ask(job=3, items=items)["stored"] == 1
    assert watcher.lookup("whole", PROMPT).hit_chunks == 4
    watcher.scheduler.stop()
    accounted(daemon)


def test_a_daemon_stopped_past_the_session_ttl_wakes_up_and_expires_nobody(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(session_ttl_seconds=2.5, l1_read_ttl_seconds=2.5)
    engine = make_engine(daemon, "engine")
    engine.ask(do="save", tokens=PROMPT, seed=1)
    found = engine.ask(do="lookup", tokens=PROMPT, request="r")
    daemon.signal(signal.SIGSTOP)
    time.sleep(5.0)
    daemon.signal(signal.SIGCONT)
    status = eventually(
        lambda: daemon.status() if daemon.status().leases_total else None, "the lease is still held"
    )
    assert [lease.lease for lease in status.leases] == [found["lease"]]
    assert status.counters.get("sessions_ended_ttl", 0) == 0
    loaded = engine.ask(do="load", tokens=PROMPT, request="r", seed=1)
    assert loaded["ok"], loaded


def test_an_engine_that_dies_gives_its_leases_back_long_before_the_ttl(
    make_daemon: Callable[..., DaemonProcess], make_engine: Callable[..., RemoteEngine]
) -> None:
    daemon = make_daemon(session_ttl_seconds=600, l1_read_ttl_seconds=600)
    engine = make_engine(daemon, "engine")
    engine.ask(do="save", tokens=PROMPT, seed=1)
    engine.ask(do="lookup", tokens=PROMPT, request="r")
    assert daemon.status().leases_total == 1
    engine.kill()
    eventually(lambda: daemon.status().leases_total == 0, "its leases end with it")
    assert daemon.status().lease_end_causes == {"session_ended": 1}


def test_a_reader_finds_bytes_that_were_changed_behind_its_back(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    [segment] = daemon.arena_dir.glob("segment-*.arena")
    located = engine.lookup("r", PROMPT)
    mapped = engine.ranks[0].client._mapping.segment(0)
    with segment.open("r+b") as file:
        file.seek(mapped._shape.data_offset)
        original = file.read(64)
        file.seek(mapped._shape.data_offset)
        file.write(bytes(byte ^ 0xFF for byte in original))
    [loaded] = engine.load("r", PROMPT, located)
    assert not loaded.ok
    assert "checksum" in loaded.reason
    eventually(lambda: daemon.status().counters.get("quarantined") == 1, "the object is quarantined")
    engine.scheduler.release(located.lease)
    again = engine.lookup("again", PROMPT)
    assert (again.hit_chunks, again.reason) == (0, MissReason.QUARANTINED)
    eventually(lambda: daemon.status().leases_total == 0, "released")
    accounted(daemon)
    engine.stop()


def test_ids_are_not_taken_for_those_of_another_boot(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    before = engine.lookup("r", PROMPT)
    assert before.lease
    boot = engine.scheduler.health.boot
    daemon.kill()
    daemon.start()
    eventually(lambda: engine.scheduler.health.boot not in (b"", boot), "the restart is noticed")
    engine.wait_settled()
    eventually(
        lambda: daemon.status().engines and daemon.status().engines[0].state == "ready", "settled again"
    )
    [loaded] = engine.load("r", PROMPT, before)
    assert loaded.ok, "the lease is gone, but its objects are untouched, so that the hold is restored"
    engine.check_loaded(4, seed=1)
    found = engine.lookup("r3", PROMPT)
    assert found.lease != before.lease
    with daemon.client(10.0) as client:
        client.call("clear", {"requested_by": "tests"}, ClearResult)
    daemon.kill()
    daemon.start()
    eventually(lambda: engine.scheduler.health.boot.hex() == daemon.status().boot, "noticed again")
    engine.wait_settled()
    eventually(
        lambda: daemon.status().engines and daemon.status().engines[0].state == "ready", "settled again"
    )
    [loaded] = engine.load("r4", PROMPT, found)
    assert not loaded.ok
    assert loaded.failed_chunks == (0, 1, 2, 3)
    engine.scheduler.release(found.lease)
    engine.save(PROMPT, seed=4)
    again = engine.lookup("r5", PROMPT)
    assert again.lease not in (before.lease, found.lease)
    [loaded] = engine.load("r5", PROMPT, again)
    assert loaded.ok, loaded.reason
    engine.check_loaded(4, seed=4)
    engine.stop()
