"""The real data path with an engine whose pages lie in a device's memory: one suite for every way to run the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from appliance.protocol.messages import ClearResult
from connector.client import SaveJob
from connector.client.device.engine import DeviceCopies
from connector.client.device.pinning import PinnedArena
from kernels import Direction
from tests.support.daemon import DaemonProcess
from tests.support.device import HostRuntime, RunTable
from tests.support.engine import HYBRID, Engine, Rank, Shape
from tests.support.waiting import eventually

PROMPT = list(range(1000, 1000 + 32 * 4 + 5))
PIECE_BYTES = 1 << 20
ODD = Shape(groups=HYBRID.groups, page_bytes=(1032, 3001))
"""Pages of which neither the start nor the length is a multiple of 16."""


@dataclass
class DeviceEngine:
    """A test engine with its device."""

    runtime: HostRuntime
    copies: DeviceCopies
    engine: Engine

    @property
    def pinned(self) -> PinnedArena:
        """The arena as the device sees it."""
        return self.copies.pinned

    def launches(self, since: int) -> list[tuple[object, ...]]:
        """What happened on the device since then."""
        return self.runtime.log[since:]


def start(
    daemon: DaemonProcess,
    name: str,
    run_table: RunTable,
    *,
    shape: Shape = HYBRID,
    pinned: bool = True,
    piece_bytes: int = PIECE_BYTES,
) -> DeviceEngine:
    """Start an engine; with `pinned`, wait until the whole arena is registered, else never register anything."""
    runtime = HostRuntime(run_table=run_table)
    if not pinned:
        runtime.refuse_registration = "this test copies through the buffer"
    arena = PinnedArena(runtime, piece_bytes=piece_bytes, settle_seconds=0.02)
    copies = DeviceCopies(runtime, arena)
    options: dict[str, Any] = {"backend": copies.backend, "segments": copies}
    engine = Engine(daemon.port, name, shape=shape, rank_options=options)
    for group in engine.ranks[0].buffers:
        for layer in group:
            runtime.own(layer)
    engine.start()
    started = DeviceEngine(runtime, copies, engine)
    if pinned:
        eventually(
            lambda: arena.registered_bytes and not arena.waiting_bytes, f"{name} has registered the arena"
        )
    return started


def _collect(rank: Rank, done: Callable[[], bool], what: str) -> None:
    def polled() -> bool:
        rank.poll()
        return done()

    eventually(polled, what)


def stores_and_loads(daemon: DaemonProcess, run_table: RunTable, *, pinned: bool, shape: Shape) -> None:
    """What a device stores, a CPU loads, and the other way round; every byte is compared."""
    device = start(daemon, "device", run_table, shape=shape, pinned=pinned)
    [saved] = device.engine.save(PROMPT, seed=7)
    assert (saved.stored, saved.failed) == (5, 0)
    host = Engine(daemon.port, "host", shape=shape).start()
    found = host.lookup("h", PROMPT)
    assert found.hit_chunks == 4
    [loaded] = host.load("h", PROMPT, found)
    assert loaded.ok, loaded.reason
    host.check_loaded(4, seed=7)
    other = list(range(5000, 5000 + 32 * 3 + 1))
    host.save(other, seed=8)
    found = device.engine.lookup("d", other)
    [loaded] = device.engine.load("d", other, found)
    assert loaded.ok, loaded.reason
    device.engine.check_loaded(3, seed=8)
    direct = [entry for entry in device.runtime.log if entry[0] == "register" and entry[3] is False]
    assert bool(direct) == pinned, "the other path was tested"
    device.engine.stop()
    host.stop()
    assert not device.runtime.registered, "pinned after the engine has said bye"


def pieces_come_while_copies_run(daemon: DaemonProcess, run_table: RunTable) -> None:
    """Small pieces, registered while objects are stored and loaded: batches are direct, bounced and mixed."""
    device = start(daemon, "device", run_table, pinned=False, piece_bytes=16 << 10)
    seed = 0
    for seed in range(1, 4):
        if seed == 2:
            device.runtime.refuse_registration = ""
        tokens = list(range(seed * 1000, seed * 1000 + 32 * 3 + 1))
        [saved] = device.engine.save(tokens, seed=seed)
        assert saved.stored == 4
        found = device.engine.lookup(f"r{seed}", tokens)
        [loaded] = device.engine.load(f"r{seed}", tokens, found)
        assert loaded.ok, loaded.reason
        device.engine.check_loaded(3, seed=seed)
    device.engine.stop()


def a_generation_changed_under_the_copy_is_seen(daemon: DaemonProcess, run_table: RunTable) -> None:
    """The object is freed while the kernel runs: after the launch, before the event."""
    device = start(daemon, "device", run_table)
    device.engine.save(PROMPT, seed=7)
    found = device.engine.lookup("r", PROMPT)

    def free(_direction: Direction) -> None:
        device.runtime.on_run = None
        device.engine.scheduler.release(found.lease)
        with daemon.client(10.0) as client:
            client.call("clear", {"requested_by": "tests"}, ClearResult)
        eventually(lambda: daemon.status().l1.occupied_bytes == 0, "the objects are gone")
        eventually(lambda: daemon.status().l1.draining_bytes == 0, "and nothing holds them")

    device.runtime.on_run = free
    [loaded] = device.engine.load("r", PROMPT, found)
    assert device.runtime.on_run is None, "no kernel ran"
    assert not loaded.ok, "bytes of a freed object would have been used"
    assert "generation" in loaded.reason
    device.engine.stop()


def changed_bytes_are_seen(daemon: DaemonProcess, run_table: RunTable) -> None:
    """Bytes in the arena that change after the commit do not pass the checksum of what arrived."""
    device = start(daemon, "device", run_table)
    device.engine.save(PROMPT, seed=7)
    [segment_file] = daemon.arena_dir.glob("*segment*")
    found = device.engine.lookup("r", PROMPT)
    content = device.engine.ranks[0].buffers[0][0][0].tobytes()
    data = bytearray(segment_file.read_bytes())
    at = data.index(content)
    with segment_file.open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([data[at + 5] ^ 0x10]))
    [loaded] = device.engine.load("r", PROMPT, found)
    assert not loaded.ok
    assert loaded.failed_chunks == (0,)
    assert "checksum" in loaded.reason
    device.engine.stop()


def copies_wait_for_the_engine(daemon: DaemonProcess, run_table: RunTable) -> None:
    """A save waits for what computes its pages, a load for what still uses its blocks; the engine's thread for nobody."""
    device = start(daemon, "device", run_table)
    engine, runtime = device.engine, device.runtime
    rank = engine.ranks[0]
    items = engine.save_items(PROMPT, seed=7)
    computed = [[layer.copy() for layer in group] for group in rank.buffers]
    for group in rank.buffers:
        for layer in group:
            layer[:] = 0xEE

    def compute() -> None:
        for group, right in zip(rank.buffers, computed, strict=True):
            for layer, bytes_ in zip(group, right, strict=True):
                layer[:] = bytes_

    runtime.compute(compute)
    ready = device.copies.mark(Direction.STORE)
    assert rank.buffers[0][0][0][0] == 0xEE, "the mark computed: it waited on the engine's thread"
    rank.client.save(SaveJob(901, items, ready=ready))
    _collect(rank, lambda: 901 in rank.saved, "the save's result")
    assert rank.saved[901].stored == 5

    found = engine.lookup("r", PROMPT)
    job = engine.load_job("r", PROMPT, found)

    def a_former_owner_writes() -> None:
        for group in rank.buffers:
            for layer in group:
                layer[len(layer) // 2 :] = 0xDD

    runtime.compute(a_former_owner_writes)
    rank.client.load(replace(job, ready=device.copies.mark(Direction.LOAD)))
    _collect(rank, lambda: "r" in rank.loaded, "the load's result")
    assert rank.loaded["r"].ok, rank.loaded["r"].reason
    runtime.compute_all()
    engine.check_loaded(4, seed=7)
    engine.stop()


def a_new_arena_retires_the_old_one(make_daemon: Callable[..., DaemonProcess], run_table: RunTable) -> None:
    """A daemon that comes back with another arena: what was registered is unregistered, the new one registered."""
    daemon = make_daemon()
    device = start(daemon, "device", run_table)
    before = set(device.runtime.registered)
    daemon.kill()
    for file in daemon.arena_dir.glob("*segment*"):
        file.unlink()
    daemon.start()
    eventually(lambda: not before & set(device.runtime.registered), "the old arena is unregistered", 40.0)
    eventually(
        lambda: device.pinned.registered_bytes and not device.pinned.waiting_bytes,
        "the new one is registered",
    )
    device.engine.wait_settled()
    eventually(lambda: device.engine.save(PROMPT, seed=3)[0].stored, "the device stores again")
    found = device.engine.lookup("again", PROMPT)
    [loaded] = device.engine.load("again", PROMPT, found)
    assert loaded.ok, loaded.reason
    device.engine.check_loaded(4, seed=3)
    device.engine.stop()
