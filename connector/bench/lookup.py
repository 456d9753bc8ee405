"""Lookup round trips while half a million objects are indexed, against the bare ZeroMQ round trip.

A daemon process of its own is filled through the real protocol: every chunk of 736 prompts of 170 chunks, with an
attention object and three states each (the cache groups of Kimi-Linear), as small as an object can be. Then, one after
the other in each round: an echo, a small request (a lookup of one chunk), the echo again and the lookup of a whole
prompt. A round trip is from the send to the receipt of the reply; medians over the rounds.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import zmq

from appliance.hashing import ChunkHasher, PromptIdentity, join_keys
from appliance.protocol.base import Role
from appliance.protocol.messages import (
    CommitResult,
    Done,
    HeartbeatResult,
    LookupResult,
    ReleaseResult,
    ReserveResult,
    WorkerGroup,
)
from appliance.protocol.wire import unpack_reply
from appliance.served_models import Geometry, geometry_of
from connector.bench.peer import Peer, running_daemon, running_echo, status_of
from connector.client.lock import AttachLock
from connector.simulate.describe import engine_facts, group_facts, layer_facts

OBJECTS = 500_000
CHUNKS = 170
EXTENT_KIB = 4
ROUNDS = 1500
WARM_ROUNDS = 50
RESERVED_AT_ONCE = 2 * CHUNKS
SPARE = 1.12
SETTLE_SECONDS = 120.0
ENGINE_ID = "bench"


class Figures(TypedDict):
    """``indexed`` objects; ratios of medians to the echo's, and the long prompt's median."""

    indexed: int
    small_vs_echo: float
    long_prompt_ms: float
    long_prompt_vs_echo: float


def measure(objects: int = OBJECTS, rounds: int = ROUNDS) -> Figures:
    """Fill a daemon and measure; takes a few minutes."""
    geometry = geometry_of("kimi-linear-48b", 1, scale=1024)
    prompts = -(-objects // (CHUNKS * len(geometry.groups)))
    l1_bytes = int(prompts * CHUNKS * len(geometry.groups) * EXTENT_KIB * 1024 * SPARE)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with running_daemon(l1_bytes, EXTENT_KIB) as (port, arena), running_echo(context) as echo:
            worker, lock = _attach(context, port, geometry, arena)
            scheduler, chunk_tokens = _register(context, port, geometry)
            keys = [_fill(worker, geometry, chunk_tokens, number) for number in range(prompts)]
            _wait_for_catalog(port)
            figures = _time(scheduler, echo, keys, chunk_tokens, rounds)
            indexed = status_of(port).l1.objects
            worker.close()
            scheduler.close()
            lock.release()
    finally:
        context.destroy(linger=0)  # also sockets that an error left open: a plain term() would wait for them
    return {"indexed": indexed, **figures}  # type: ignore[typeddict-item]


def _attach(
    context: zmq.Context[zmq.Socket[bytes]], port: int, geometry: Geometry, arena: Path
) -> tuple[Peer, AttachLock]:
    peer = Peer(context, port, Role.WORKER, ENGINE_ID)
    lock = AttachLock(arena)
    groups = [WorkerGroup(index=g.group.index, shard=0, replica=0).model_dump() for g in geometry.groups]
    args = {
        "attach_id": lock.attach_id,
        "rank": 0,
        "world_size": 1,
        "groups": groups,
        "layers": layer_facts(geometry, geometry.model.backend),
    }
    peer.ask("attach", args, Done)
    return peer, lock


def _register(context: zmq.Context[zmq.Socket[bytes]], port: int, geometry: Geometry) -> tuple[Peer, int]:
    peer = Peer(context, port, Role.SCHEDULER, ENGINE_ID)
    groups = [facts.model_dump(mode="json") for facts in group_facts(geometry)]
    peer.ask("register", {"world_size": 1, "facts": engine_facts(geometry), "groups": groups}, Done)
    settled = peer.ask("heartbeat", {}, HeartbeatResult).settled
    assert settled is not None, "an engine whose ranks are all there is settled"
    return peer, settled.chunk_tokens


def _fill(worker: Peer, geometry: Geometry, chunk_tokens: int, number: int) -> list[bytes]:
    """Store every object of one prompt; returns its chunk keys. No bytes are written: nobody loads them."""
    tokens = np.random.default_rng(number).integers(0, 2**31, CHUNKS * chunk_tokens, dtype=np.uint32)
    hasher = ChunkHasher(chunk_tokens, PromptIdentity())
    keys = hasher.keys(tokens.data)
    places = [(chunk, each.group.index) for chunk in range(CHUNKS) for each in geometry.groups]
    for first in range(0, len(places), RESERVED_AT_ONCE):
        some = places[first : first + RESERVED_AT_ONCE]
        granted = worker.ask(
            "reserve",
            {
                "groups": [group for _, group in some],
                "chunks": [chunk for chunk, _ in some],
                "keys": join_keys([keys[chunk] for chunk, _ in some]),
                "parents": join_keys([hasher.parent(chunk) for chunk, _ in some]),
                "lengths": [EXTENT_KIB * 1024] * len(some),
            },
            ReserveResult,
        )
        committed = worker.ask(
            "commit",
            {"reservations": granted.reservations, "checksums": [0] * len(some)},
            CommitResult,
        ).committed
        assert committed == len(some), "fewer objects would be indexed than are said to be"
    return keys


def _wait_for_catalog(port: int) -> None:
    """The catalog's writer shares the daemon's interpreter: let it finish with the filling."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while status_of(port).catalog.queued and time.monotonic() < deadline:
        time.sleep(0.5)


def _time(
    scheduler: Peer, echo: zmq.Socket[bytes], keys: list[list[bytes]], chunk_tokens: int, rounds: int
) -> dict[str, float]:
    random = np.random.default_rng(0)
    seconds = np.zeros((rounds, 4))
    for at in range(-WARM_ROUNDS, rounds):
        prompt = keys[int(random.integers(len(keys)))]
        took = []
        for chunks in (1, CHUNKS):
            body = scheduler.pack("lookup", _lookup_of(prompt[:chunks], chunk_tokens))
            took.append(_echo(echo, body))
            # A long prompt's body is sixty times as large: the bare round trip of the small one is the yardstick.
            passed, reply = scheduler.round_trip(body)
            took.append(passed)
            _check_and_release(scheduler, reply, chunks)
        if at >= 0:
            seconds[at] = took
    small_echo, small, _, long_prompt = np.median(seconds, axis=0)
    return {
        "small_vs_echo": round(float(small / small_echo), 2),
        "long_prompt_ms": round(float(long_prompt * 1000), 3),
        "long_prompt_vs_echo": round(float(long_prompt / small_echo), 2),
    }


def _lookup_of(keys: list[bytes], chunk_tokens: int) -> dict[str, Any]:
    return {
        "request": secrets.token_hex(8),
        "keys": join_keys(keys),
        "prompt_tokens": len(keys) * chunk_tokens + 1,
    }


def _echo(socket: zmq.Socket[bytes], body: bytes) -> float:
    began = time.perf_counter()
    socket.send(body)
    socket.recv()
    return time.perf_counter() - began


def _check_and_release(scheduler: Peer, reply: bytes, chunks: int) -> None:
    answered = unpack_reply(reply)
    if answered.error is not None:
        raise answered.error
    found = LookupResult.model_validate(answered.result)
    assert found.hit_chunks == chunks, "a miss would be measured instead of a hit"
    scheduler.ask("release", {"leases": [found.lease]}, ReleaseResult)


def table(figures: Figures) -> str:
    """The figures as text."""
    return "\n".join(
        (
            f"lookup round trips with {figures['indexed']} objects indexed, medians",
            f"one chunk, to the bare ZeroMQ round trip           {figures['small_vs_echo']:.2f}",
            f"{CHUNKS} chunks in 4 groups, to the same               {figures['long_prompt_vs_echo']:.2f}",
            f"{CHUNKS} chunks in 4 groups                            {figures['long_prompt_ms']:.3f} ms",
        )
    )
