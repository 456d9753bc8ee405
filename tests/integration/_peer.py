"""A peer that speaks the wire protocol over a real ROUTER socket, and the status documents it can serve.

It stands in for the daemon where a test needs a state that is hard to bring a daemon into: stuck, populating, degraded,
or full of hostile names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from appliance.errors import PagewardenError
from appliance.protocol.status import DaemonStatus
from appliance.protocol.wire import pack_error, pack_result, unpack_request

GIB = 1 << 30
MIB = 1 << 20
BOOT = bytes(range(16))


class Peer:
    """Answers ``ping`` and ``status`` in a thread of its own; ``silent`` makes it accept and never answer."""

    def __init__(self, status: dict[str, Any], *, port: int = 0) -> None:
        self.status = status
        self.silent = False
        self.error: PagewardenError | None = None
        self.raw_result: dict[str, Any] | None = None
        self.requests: list[str] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rsplit(":", 1)[1])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)
        self._context.term()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._socket.poll(20):
                identity, body = self._socket.recv_multipart()
                request = unpack_request(body)
                self.requests.append(request.op)
                if not self.silent:
                    self._socket.send_multipart([identity, self._answer(request.request_id, request.op)])
        self._socket.close(linger=0)

    def _answer(self, request_id: int, op: str) -> bytes:
        if self.error is not None:
            return pack_error(request_id, BOOT, self.error)
        if op == "ping":
            return pack_result(request_id, BOOT, {"uptime_seconds": 12.5, "phase": self.status["phase"]})
        return pack_result(request_id, BOOT, self.status if self.raw_result is None else self.raw_result)


@contextmanager
def serving(status: dict[str, Any]) -> Iterator[Peer]:
    peer = Peer(status)
    try:
        yield peer
    finally:
        peer.close()


def checked(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` as it is, once it is sure that a daemon could have sent it."""
    DaemonStatus.model_validate(document)
    return document


def l1(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "capacity_bytes": 64 * GIB,
        "populated_bytes": 64 * GIB,
        "free_bytes": 64 * GIB,
        "occupied_bytes": 0,
        "reserved_bytes": 0,
        "limbo_bytes": 0,
        "draining_bytes": 0,
        "leased_bytes": 0,
        "pinned_bytes": 0,
        "objects": 0,
        "chunks": 0,
        "extent_bytes": 256 * 1024,
        "segments": 4,
        "watermark_bytes": 58 * GIB,
        "policy": "lru",
        "arena_dir": "/dev/shm/pagewarden",
    }
    fields.update(changes)
    return fields


def empty_status(**changes: Any) -> dict[str, Any]:
    """A daemon that is ready and that nobody uses."""
    document: dict[str, Any] = {
        "version": "0.1.0",
        "boot": BOOT.hex(),
        "phase": "ready",
        "ready": True,
        "uptime_seconds": 93.0,
        "started_unix": 1_800_000_000.0,
        "gates": [
            {"name": "arena", "open": True, "reason": "All 64.0 GiB are populated."},
            {"name": "catalog", "open": True, "reason": "The catalog is at its newest version."},
        ],
        "l1": l1(),
        "groups": [],
        "namespaces": [],
        "refusals": [],
        "engines": [],
        "leases": [],
        "leases_total": 0,
        "lease_ends": [],
        "lease_end_causes": {},
        "reservation_end_causes": {},
        "evictions": {},
        "evicted_bytes": {},
        "miss_reasons": {},
        "counters": {},
        "catalog": {
            "state": "ok",
            "reason": "",
            "path": "/var/lib/pagewarden/catalog.db",
            "queued": 0,
            "written": 0,
            "dropped": 0,
            "last_commit_age_seconds": None,
        },
        "loops": [
            {"name": "router", "idle_seconds": 0.0, "errors": 0, "last_error": ""},
            {"name": "evictor", "idle_seconds": 0.4, "errors": 0, "last_error": ""},
            {"name": "catalog writer", "idle_seconds": 0.2, "errors": 0, "last_error": ""},
        ],
        "settings": {"chunk_size": 256, "max_workers": 4},
    }
    document.update(changes)
    return checked(document)


def populating_status() -> dict[str, Any]:
    return empty_status(
        phase="populating",
        ready=False,
        uptime_seconds=4.2,
        gates=[
            {"name": "arena", "open": False, "reason": "12.0 of 64.0 GiB are populated."},
            {"name": "catalog", "open": True, "reason": "The catalog is at its newest version."},
        ],
        l1=l1(populated_bytes=12 * GIB, free_bytes=12 * GIB, segments=1),
    )


KIMI = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
NS_A = "5f0c9a7be2d14a3388ce01b7d9aa4410"
NS_B = "c81e728d9d4c2f636f067f89cc14862c"
NS_C = "1679091c5a880faf6fb5e6087eb1b2dc"


def engine(engine_id: str, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "engine_id": engine_id,
        "state": "ready",
        "reason": "",
        "model": KIMI,
        "namespace": NS_A,
        "chunk_tokens": 768,
        "block_tokens": [768, 768, 768, 768],
        "world_size": 2,
        "ranks_attached": [0, 1],
        "host": "gpu-07",
        "pid": 4242,
        "client": "pagewarden-connector/0.1.0",
        "heartbeat_age_seconds": 0.8,
        "lookups": 18_220,
        "asked_tokens": 412_330_112,
        "hit_tokens": 301_989_888,
        "loads": 16_030,
        "load_failures": 0,
        "bytes_loaded": 38_400 * GIB // 10,
        "bytes_stored": 640 * GIB,
        "objects_stored": 310_221,
        "leases": 3,
        "reserved_bytes": 96 * MIB,
        "limbo_bytes": 0,
        "notices": [],
    }
    fields.update(changes)
    return fields


def group(namespace: str, model: str, index: int, name: str, kind: str, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "namespace": namespace,
        "model": model,
        "group": index,
        "name": name,
        "kind": kind,
        "shards": 2,
        "replicas": 1,
        "objects": 41_002,
        "bytes": 9 * GIB,
        "leased_bytes": 0,
        "reserved_bytes": 0,
    }
    fields.update(changes)
    return fields


def lease(number: int, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "lease": number,
        "engine_id": "vllm-a-3f9c1e",
        "request": f"chatcmpl-{number:08x}a1b2c3d4e5f6",
        "namespace": NS_A,
        "chunks": 42,
        "objects": 172,
        "bytes": 903 * MIB,
        "age_seconds": 3.4 + number,
        "remaining_seconds": 296.6 - number,
        "renewals": number % 4,
    }
    fields.update(changes)
    return fields


def lease_end(number: int, cause: str, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "lease": number,
        "engine_id": "vllm-a-3f9c1e",
        "request": f"chatcmpl-{number:08x}a1b2c3d4e5f6",
        "namespace": NS_A,
        "cause": cause,
        "chunks": 17,
        "bytes": 511 * MIB,
        "age_seconds": 1.9,
        "ended_ago_seconds": 2.0 * number,
    }
    fields.update(changes)
    return fields


def namespace(digest: str, model: str, engines: list[str]) -> dict[str, Any]:
    return {
        "namespace": digest,
        "model": model,
        "chunk_tokens": 768,
        "engines": engines,
        "chunks": 20_500,
        "bytes": 27 * GIB,
        "read_lease_ttl_seconds": 300.0,
        "write_ttl_seconds": 600.0,
        "session_ttl_seconds": 600.0,
        "fields": {"model.name": model, "cache.dtype": "auto", "parallel.tensor": 2},
    }


def full_status(**changes: Any) -> dict[str, Any]:
    """A daemon under load, with everything on the page that can be there."""
    occupied, reserved, limbo, draining = 57 * GIB, 1 * GIB, GIB // 2, GIB // 4
    document = {
        "uptime_seconds": 412_331.0,
        "l1": l1(
            occupied_bytes=occupied,
            reserved_bytes=reserved,
            limbo_bytes=limbo,
            draining_bytes=draining,
            free_bytes=64 * GIB - occupied - reserved - limbo - draining,
            leased_bytes=6 * GIB,
            pinned_bytes=2 * GIB,
            objects=331_204,
            chunks=82_801,
        ),
        "groups": [
            group(NS_A, KIMI, 0, "kda.0", "recurrent", bytes=12 * GIB, leased_bytes=2 * GIB),
            group(NS_A, KIMI, 1, "kda.1", "recurrent", bytes=12 * GIB, leased_bytes=2 * GIB),
            group(NS_A, KIMI, 2, "mla", "attention", shards=1, replicas=2, bytes=3 * GIB, objects=82_004),
            group(NS_B, KIMI, 0, "kda.0", "recurrent", bytes=5 * GIB, objects=9_114),
            group(NS_B, KIMI, 1, "kda.1", "recurrent", bytes=5 * GIB, objects=9_114),
            group(NS_B, KIMI, 2, "mla", "attention", shards=1, replicas=2, bytes=2 * GIB, objects=20_772),
            group(NS_C, LLAMA, 0, "full", "attention", bytes=18 * GIB, objects=101_221, reserved_bytes=GIB),
        ],
        "namespaces": [
            namespace(NS_A, KIMI, ["vllm-a-3f9c1e", "vllm-c-77d0aa"]),
            namespace(NS_B, KIMI, ["vllm-b-90aa12"]),
            namespace(NS_C, LLAMA, ["vllm-d-00f1c2"]),
        ],
        "engines": [
            engine("vllm-a-3f9c1e"),
            engine(
                "vllm-b-90aa12",
                state="suspect",
                namespace=NS_B,
                heartbeat_age_seconds=47.0,
                load_failures=3,
                notices=[
                    "max_num_batched_tokens is 512, below the block size of 768: fewer snapshots are taken."
                ],
            ),
            engine(
                "vllm-c-77d0aa",
                state="registering",
                reason="Rank 1 of 2 has not attached.",
                namespace="",
                chunk_tokens=0,
                ranks_attached=[0],
                lookups=12,
                asked_tokens=0,
                hit_tokens=0,
                loads=0,
                bytes_loaded=0,
                bytes_stored=0,
                objects_stored=0,
                leases=0,
                reserved_bytes=0,
            ),
            engine(
                "vllm-d-00f1c2",
                model=LLAMA,
                namespace=NS_C,
                chunk_tokens=256,
                block_tokens=[16],
                world_size=1,
                ranks_attached=[0],
                limbo_bytes=GIB // 2,
            ),
        ],
        "refusals": [
            {
                "model": KIMI,
                "engine_id": "vllm-b-90aa12",
                "namespace": NS_B,
                "other_namespace": NS_A,
                "other_engines": ["vllm-a-3f9c1e"],
                "differences": [
                    {"field": "cache.state_dtype", "ours": "bfloat16", "theirs": "float32"},
                    {"field": "groups[0].page_bytes", "ours": 1_081_344, "theirs": 2_162_688},
                    {"field": "layers.model.layers.0.kda.strides", "ours": [1, 2], "theirs": None},
                ],
                "lookups": 4_120,
            }
        ],
        "leases": [lease(number) for number in range(1, 7)],
        "leases_total": 6,
        "lease_ends": [lease_end(number, "released" if number % 5 else "expired") for number in range(1, 12)],
        "lease_end_causes": {"released": 15_990, "expired": 2, "orphaned": 1},
        "reservation_end_causes": {"committed": 310_221, "expired": 4},
        "evictions": {"evicted": 90_112, "write_expired": 410, "cleared": 12},
        "evicted_bytes": {"evicted": 402 * GIB, "write_expired": 19 * GIB, "cleared": 88 * MIB},
        "miss_reasons": {
            "never_stored": 9_021,
            "recurrent_missing": 2_204,
            "evicted": 1_980,
            "refused_fingerprint": 4_120,
            "rank_missing": 3,
            "write_expired": 2,
            "quarantined": 1,
            "too_short": 640,
            "registering": 12,
        },
        "counters": {"lookups": 54_660, "commits": 310_221},
        "catalog": {
            "state": "ok",
            "reason": "",
            "path": "/var/lib/pagewarden/catalog.db",
            "queued": 14,
            "written": 1_204_331,
            "dropped": 0,
            "last_commit_age_seconds": 0.3,
        },
    }
    document.update(changes)
    return empty_status(**document)


def degraded_status() -> dict[str, Any]:
    return full_status(
        catalog={
            "state": "down",
            "reason": "The catalog's disk is full.",
            "path": "/var/lib/pagewarden/catalog.db",
            "queued": 65_536,
            "written": 12,
            "dropped": 44_101,
            "last_commit_age_seconds": 340.0,
        },
        loops=[
            {"name": "router", "idle_seconds": 0.0, "errors": 0, "last_error": ""},
            {
                "name": "evictor",
                "idle_seconds": 0.4,
                "errors": 3,
                "last_error": "KeyError: 'a chunk that is not there'",
            },
            {"name": "scrubber", "idle_seconds": 130.0, "errors": 0, "last_error": ""},
        ],
    )


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202e\x00{{7*7}}" + "x" * 100


def hostile_status() -> dict[str, Any]:
    """Every text that a peer can choose is an attack."""
    document = full_status()
    for name in ("engine_id", "reason", "model", "host", "client"):
        document["engines"][0][name] = HOSTILE[:256]
    document["engines"][0]["state"] = HOSTILE
    document["engines"][0]["notices"] = [HOSTILE]
    document["groups"][0].update(name=HOSTILE, model=HOSTILE, kind=HOSTILE, namespace=HOSTILE)
    document["refusals"][0].update(
        engine_id=HOSTILE,
        model=HOSTILE,
        other_engines=[HOSTILE],
        differences=[{"field": HOSTILE, "ours": {HOSTILE: [HOSTILE]}, "theirs": HOSTILE}],
    )
    document["leases"][0].update(engine_id=HOSTILE, request=HOSTILE, namespace=HOSTILE)
    document["lease_ends"][0].update(engine_id=HOSTILE, request=HOSTILE, cause=HOSTILE)
    document["lease_end_causes"][HOSTILE] = 1
    document["evictions"][HOSTILE] = 1
    document["miss_reasons"][HOSTILE] = 1_000_000
    document["gates"][0].update(name=HOSTILE, reason=HOSTILE)
    document["loops"][0].update(name=HOSTILE, errors=1, last_error=HOSTILE)
    document["catalog"].update(state=HOSTILE, reason=HOSTILE, path=HOSTILE)
    document["l1"].update(policy=HOSTILE, arena_dir=HOSTILE)
    document.update(version=HOSTILE, boot=HOSTILE, phase=HOSTILE)
    return checked(document)


def wait_for(condition: Callable[[], bool], what: str, *, tries: int = 600) -> None:
    """Wait for ``condition``, a bounded number of short pauses."""
    pause = threading.Event()
    for _ in range(tries):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"{what} did not come to pass")
