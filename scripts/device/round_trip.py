"""Checks through a real daemon: what the device stores comes back, and what changed meanwhile is never used."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance.protocol.messages import ClearResult
from connector.client import LoadResult, SaveJob
from connector.client.device.engine import DeviceCopies
from connector.client.device.pinning import PinnedArena
from kernels import Backend, Direction, Spans
from scripts.device.subject import Pages, Subject
from scripts.device.verify import require
from tests.support.daemon import DaemonProcess
from tests.support.engine import BLOCKS, HYBRID, Engine, Rank, Shape
from tests.support.waiting import eventually

ODD = Shape(groups=HYBRID.groups, page_bytes=(1032, 3001))
PROMPT = list(range(1000, 1000 + 32 * 4 + 5))
PIECE_BYTES = 1 << 20


class Daemon(DaemonProcess):
    """A daemon run by another interpreter: the one with vLLM in it may lack what a daemon needs."""

    python = ""

    def start(self, *, ready: bool = True) -> Daemon:
        """Start it."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.python, "-m", "appliance.cli", "server", *self.arguments()], stdout=log, stderr=log
            )
        if ready:
            self.wait_ready()
        return self


def daemon_can_run(python: str) -> str:
    """Why a daemon cannot run with this interpreter; empty if it can."""
    tried = subprocess.run(
        [python, "-c", "import appliance.cli, appliance.server.daemon"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else tried.stderr.strip().splitlines()[-1]


@contextmanager
def daemon_of(python: str) -> Iterator[Daemon]:
    """A daemon on free ports with a small arena."""
    with tempfile.TemporaryDirectory(prefix="pagewarden-device-check-") as directory:
        daemon = Daemon(Path(directory), chunk_size=32)
        daemon.python = python
        try:
            yield daemon.start()
        finally:
            daemon.close()


@dataclass
class DeviceEngine:
    """The test engine with its pages on the device; its numpy buffers are a shadow that is moved explicitly."""

    subject: Subject
    copies: DeviceCopies
    engine: Engine
    pages: list[tuple[NDArray[np.uint8], Pages]]
    next_job: int = 1

    def upload(self) -> None:
        """Shadow to device."""
        for shadow, pages in self.pages:
            pages.write(shadow.reshape(-1))

    def download(self) -> None:
        """Device to shadow."""
        for shadow, pages in self.pages:
            shadow.reshape(-1)[:] = pages.read()

    def save(self, tokens: list[int], seed: int) -> int:
        """Store a prompt; returns the objects stored."""
        items = self.engine.save_items(tokens, seed)
        self.upload()
        job = SaveJob(self.next_job, items, ready=self.copies.mark(Direction.STORE))
        self.next_job += 1
        [rank] = self.engine.ranks
        rank.client.save(job)
        _collect(rank, lambda: job.job_id in rank.saved, "the save's result")
        return rank.saved[job.job_id].stored

    def load(self, request: str, tokens: list[int], found: Any) -> LoadResult:
        """Load a hit."""
        job = self.engine.load_job(request, tokens, found)
        [rank] = self.engine.ranks
        rank.client.load(replace(job, ready=self.copies.mark(Direction.LOAD)))
        _collect(rank, lambda: request in rank.loaded, "the load's result")
        self.download()
        return rank.loaded[request]


def _collect(rank: Rank, done: Callable[[], bool], what: str) -> None:
    def polled() -> bool:
        rank.poll()
        return done()

    eventually(polled, what, 60.0)


@contextmanager
def device_engine(
    subject: Subject,
    port: int,
    shape: Shape,
    *,
    registered: bool,
    backend: Callable[[Backend], Backend] | None = None,
) -> Iterator[DeviceEngine]:
    """An engine on the device; leaves when its arena is registered, or will never be."""
    runtime = subject.make_runtime()
    # A day to settle: no piece is registered while this engine lives.
    pinned = PinnedArena(runtime, piece_bytes=PIECE_BYTES, settle_seconds=0.02 if registered else 86_400.0)
    copies = DeviceCopies(runtime, pinned)
    pages: list[tuple[NDArray[np.uint8], Pages]] = []

    def address_of(shadow: NDArray[np.uint8]) -> int:
        pages.append((shadow, subject.pages(runtime, shadow.nbytes)))
        return pages[-1][1].address

    options: dict[str, Any] = {
        "backend": backend(copies.backend) if backend else copies.backend,
        "segments": copies,
        "address_of": address_of,
    }
    engine = Engine(port, f"device-{id(copies)}", shape=shape, rank_options=options).start()
    made = DeviceEngine(subject, copies, engine, pages)
    try:
        if registered:
            eventually(
                lambda: pinned.registered_bytes and not pinned.waiting_bytes, "the arena is registered", 60.0
            )
        yield made
    finally:
        if not registered:
            pinned.settle(0.02)  # so that the thread looks soon and ends
        engine.stop()
    require(pinned.registered_bytes == 0, "bytes are registered after the engine has ended")


def there_and_back(subject: Subject, daemon: Daemon, *, registered: bool, shape: Shape) -> None:
    """Device to arena to CPU engine, CPU engine to arena to device; every byte is compared."""
    with device_engine(subject, daemon.port, shape, registered=registered) as device:
        first = 10 * shape.page_bytes[0] + 1000 * registered
        tokens = list(range(first, first + len(PROMPT)))
        require(device.save(tokens, seed=7) == 5, "not everything was stored")
        host = Engine(daemon.port, "host", shape=shape).start()
        found = host.lookup("h", tokens)
        require(found.hit_chunks == 4, f"{found.hit_chunks} chunks hit instead of 4")
        [loaded] = host.load("h", tokens, found)
        require(loaded.ok, f"a CPU engine cannot load what the device stored: {loaded.reason}")
        host.check_loaded(4, seed=7)
        other = [each + 40_000 for each in tokens]
        host.save(other, seed=8)
        found = device.engine.lookup("d", other)
        require(found.hit_chunks == 4, f"{found.hit_chunks} chunks hit instead of 4")
        loaded = device.load("d", other, found)
        require(loaded.ok, f"the device cannot load what a CPU engine stored: {loaded.reason}")
        device.engine.check_loaded(4, seed=8)
        host.stop()


def freed_between_copy_and_event(subject: Subject, daemon: Daemon) -> None:
    """An object that is freed before its generation is read again is never used, though its bytes arrived."""
    state: dict[str, Any] = {}

    def freeing(backend: Backend) -> Backend:
        def copy(spans: Spans, direction: Direction, objects: int) -> NDArray[np.uint64]:
            sums = backend.copy_spans_checksummed(spans, direction, objects)
            if direction is Direction.LOAD and state:
                state.pop("device").engine.scheduler.release(state.pop("lease"))
                with daemon.client(10.0) as client:
                    client.call("clear", {"requested_by": "device check"}, ClearResult)
                eventually(lambda: daemon.status().l1.occupied_bytes == 0, "the objects are gone")
                eventually(lambda: daemon.status().l1.draining_bytes == 0, "and nothing holds them")
            return sums

        return replace(backend, copy_spans_checksummed=copy)

    with device_engine(subject, daemon.port, HYBRID, registered=True, backend=freeing) as device:
        device.save(PROMPT, seed=7)
        found = device.engine.lookup("r", PROMPT)
        require(found.hit_chunks == 4, f"{found.hit_chunks} chunks hit instead of 4")
        state.update(device=device, lease=found.lease)
        loaded = device.load("r", PROMPT, found)
        require(not state, "the load copied nothing")
        require(not loaded.ok and "generation" in loaded.reason, f"a freed object was used: {loaded}")


def changed_in_the_arena(subject: Subject, daemon: Daemon) -> None:
    """A byte that changed in shared memory is a checksum mismatch on the device."""
    with device_engine(subject, daemon.port, HYBRID, registered=True) as device:
        device.save(PROMPT, seed=9)
        found = device.engine.lookup("r", PROMPT)
        content = device.engine.ranks[0].buffers[0][0][0].tobytes()
        for path in daemon.arena_dir.iterdir():
            if path.stat().st_size > len(content) and (at := path.read_bytes().find(content)) >= 0:
                with path.open("r+b") as file:
                    file.seek(at + 5)
                    file.write(bytes([content[5] ^ 0x10]))
                break
        else:
            require(condition=False, what="the stored page is not in the arena")
        loaded = device.load("r", PROMPT, found)
        require(not loaded.ok and "checksum" in loaded.reason, f"changed bytes were used: {loaded}")


def daemon_checks(subject: Subject, daemon: Daemon) -> list[tuple[str, Callable[[], None]]]:
    """Everything that needs a daemon, by name."""
    assert BLOCKS % 2 == 0, "loads go to the other half of the blocks"
    return [
        (
            "round trip through a daemon, registered",
            lambda: there_and_back(subject, daemon, registered=True, shape=HYBRID),
        ),
        (
            "round trip through a daemon, bounced, odd pages",
            lambda: there_and_back(subject, daemon, registered=False, shape=ODD),
        ),
        ("an object freed during a load is not used", lambda: freed_between_copy_and_event(subject, daemon)),
        ("a byte changed in the arena is not used", lambda: changed_in_the_arena(subject, daemon)),
    ]
