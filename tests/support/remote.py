"""Engines in processes of their own, driven by lines of JSON, so that tests can stop and kill them for real.

Run as a module it is the engine process; :class:`RemoteEngine` is the test's handle on it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from appliance.protocol.messages import LookupResult
from connector.client import inline
from kernels import Backend, Direction, Spans, reference_backend
from tests.support.engine import HYBRID, Engine, Rank, Shape, sharded


class StoppingCopy:
    """Copies like the reference backend, but stops its own process between two spans where it is told to."""

    def __init__(self) -> None:
        self.stop_after_spans: int | None = None
        self.skip_copies = 0
        self._real = reference_backend()

    def backend(self) -> Backend:
        """The backend to give to a worker."""
        real = self._real
        return Backend(
            name="stopping",
            copy_spans=real.copy_spans,
            copy_spans_checksummed=self._copy,
            checksum_bytes=real.checksum_bytes,
            acquire_fence=real.acquire_fence,
            load_word=real.load_word,
        )

    def _copy(self, spans: Spans, direction: Direction, object_count: int) -> Any:
        if self.stop_after_spans is None or self.skip_copies:
            self.skip_copies = max(0, self.skip_copies - 1)
            return self._real.copy_spans_checksummed(spans, direction, object_count)
        at, self.stop_after_spans = self.stop_after_spans, None
        begin = self._real.copy_spans_checksummed(_part(spans, slice(None, at)), direction, object_count)
        # To this very thread: it must not run on until another thread has taken the signal.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        end = self._real.copy_spans_checksummed(_part(spans, slice(at, None)), direction, object_count)
        return begin + end  # sums of parts add up modulo 2**64


def _part(spans: Spans, rows: slice) -> Spans:
    return Spans(
        engine_address=spans.engine_address[rows],
        arena_address=spans.arena_address[rows],
        length_bytes=spans.length_bytes[rows],
        stream_offset=spans.stream_offset[rows],
        object_index=spans.object_index[rows],
    )


class RemoteEngine:
    """An engine, or one rank of one, in a child process."""

    def __init__(
        self,
        port: int,
        engine_id: str,
        log: Path,
        *,
        world_size: int = 1,
        only_rank: int | None = None,
        staging_bytes: int | None = None,
        **rank_options: Any,
    ) -> None:
        self._log = log.open("ab")
        arguments = json.dumps(
            {
                "port": port,
                "engine_id": engine_id,
                "world_size": world_size,
                "only_rank": only_rank,
                "staging_bytes": staging_bytes,
                "rank_options": rank_options,
            }
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.remote", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.read()["ready"]

    def send(self, **command: Any) -> None:
        """Give a command without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine process ended: {self.process.poll()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        self.send(**command)
        return self.read()

    def wait_stopped(self) -> None:
        """Wait until the process has stopped itself."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "T":
                return
            time.sleep(0.01)
        raise AssertionError("the engine never stopped itself")

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """End the process whatever its state."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self._log.close()


# --- the engine process ------------------------------------------------------------------------------------------


def _lone_rank(arguments: dict[str, Any], shape: Shape, copy: StoppingCopy) -> Rank:
    return Rank(
        arguments["port"],
        arguments["engine_id"],
        shape,
        arguments["only_rank"],
        arguments["world_size"],
        backend=copy.backend(),
        **arguments["rank_options"],
    )


def _serve_rank(rank: Rank, copy: StoppingCopy) -> None:
    """One rank alone: the test's process has the scheduler and tells it what to save."""
    from connector.client import SaveItem, SaveJob

    rank.client.start()
    _say(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        copy.stop_after_spans = command.get("stop_after_spans")
        items = []
        for group, chunk, key, parent, blocks, seed in command["items"]:
            for block in blocks:
                rank.fill(group, block, seed)
            items.append(SaveItem(group, chunk, bytes.fromhex(key), bytes.fromhex(parent), tuple(blocks)))
        rank.client.save(SaveJob(command["job"], tuple(items)))
        while command["job"] not in rank.saved:
            rank.poll()
            time.sleep(0.005)
        result = rank.saved[command["job"]]
        _say(stored=result.stored, skipped=result.skipped, failed=result.failed)


def _serve_engine(engine: Engine, copy: StoppingCopy) -> None:
    engine.start()
    _say(ready=True)
    found: dict[str, LookupResult] = {}
    for line in sys.stdin:
        command = json.loads(line)
        copy.stop_after_spans = command.get("stop_after_spans")
        copy.skip_copies = command.get("skip_copies", 0)
        tokens, request = command.get("tokens", []), command.get("request", "r")
        if command["do"] == "save":
            [result] = engine.save(tokens, command["seed"], command.get("states"))
            _say(stored=result.stored, skipped=result.skipped, failed=result.failed)
        elif command["do"] == "lookup":
            found[request] = engine.lookup(request, tokens)
            _say(hit_chunks=found[request].hit_chunks, lease=found[request].lease)
        elif command["do"] == "load":
            for rank in engine.ranks:
                for layers in rank.buffers:
                    for layer in layers:
                        layer[:] = np.uint8(0)
            [loaded] = engine.load(request, tokens, found[request])
            exact = loaded.ok
            if loaded.ok:
                engine.check_loaded(found[request].hit_chunks, command["seed"])
            engine.scheduler.release(found[request].lease)
            _say(ok=loaded.ok, exact=exact, reason=loaded.reason, failed_chunks=list(loaded.failed_chunks))
        elif command["do"] == "health":
            ranks = [rank.client.health for rank in engine.ranks]
            settled = engine.scheduler.chunk_tokens is not None
            healthy = settled and all(health.state == "joined" for health in ranks)
            _say(ready=healthy, boots=[each.boot.hex() for each in (engine.scheduler.health, *ranks)])


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _main() -> None:
    arguments = json.loads(sys.argv[1])
    copy = StoppingCopy()
    if arguments["staging_bytes"] is not None:
        inline.STAGING_BYTES = arguments["staging_bytes"]
    world_size = arguments["world_size"]
    shape = HYBRID if world_size == 1 else sharded(world_size)
    if arguments["only_rank"] is not None:
        _serve_rank(_lone_rank(arguments, shape, copy), copy)
    else:
        options = {"backend": copy.backend(), **arguments["rank_options"]}
        _serve_engine(
            Engine(arguments["port"], arguments["engine_id"], shape, world_size, rank_options=options), copy
        )


if __name__ == "__main__":
    _main()
