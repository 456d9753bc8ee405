"""A real core with its dispatcher, and peers that send it messages as bytes."""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.errors import PagewardenError
from appliance.hashing import join_keys
from appliance.l1.opening import open_arena
from appliance.protocol.base import Role
from appliance.protocol.status import CatalogStatus
from appliance.protocol.wire import NO_ID, Reply, Request, pack_request, unpack_reply
from appliance.server.core import Core, Phase, build_core
from appliance.server.dispatch import Dispatcher, Outgoing, Waiting
from appliance.settings import load_settings
from appliance.ttl import Ttls
from tests.support.core_store import CHUNK, EXTENT, ROOT, scratch_directory

ADMIN_SECRET = "the daemon's secret"
LAYER = {
    "backend": "FLASH",
    "kernel_block_tokens": CHUNK,
    "dtype": "bfloat16",
    "shape": [2, CHUNK, 8],
    "strides": [64, 8, 1],
    "page_bytes": 512,
}
FACTS: dict[str, Any] = {
    "model": {"name": "m", "architecture": "A", "weights": "w", "dtype": "bf16", "config": {"layers": 2}},
    "cache": {"dtype": "auto", "layout": "NHD"},
    "engine": {"name": "vllm", "version": "1", "platform": "cpu"},
    "parallel": {"tensor": 1, "pipeline": 1, "decode_context": 1},
    "draft": "none",
    "pages": {"layout": 1, "checksum": "mix64"},
}
GROUPS: list[dict[str, Any]] = [
    {
        "index": 0,
        "name": "attention",
        "kind": "attention",
        "block_tokens": CHUNK,
        "shards": 1,
        "replicas": 1,
        "facts": {"page_bytes": 512, "spec": {"heads": 8}},
    },
    {
        "index": 1,
        "name": "state",
        "kind": "recurrent",
        "block_tokens": CHUNK,
        "shards": 1,
        "replicas": 1,
        "facts": {"page_bytes": 512, "spec": {"state": 8}},
    },
]


def register_args(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy({"world_size": 1, "facts": FACTS, "groups": GROUPS, **changes})


def attach_args(attach_id: int, rank: int = 0, **changes: Any) -> dict[str, Any]:
    groups = [{"index": each["index"], "shard": 0, "replica": 0} for each in GROUPS]
    base = {"attach_id": attach_id, "rank": rank, "world_size": 1, "groups": groups, "layers": {"l0": LAYER}}
    return copy.deepcopy({**base, **changes})


@dataclass
class Peer:
    """One session. ``ask`` gives the result or raises the typed error."""

    daemon: Daemon
    role: Role
    engine_id: str = "engine"
    session: bytes = field(default_factory=lambda: os.urandom(16))
    next_id: int = 1

    def __post_init__(self) -> None:
        said = {"role": self.role.value, "protocol": 1, "client": "test", "engine_id": self.engine_id}
        if self.role is Role.ADMIN:
            said["secret"] = ADMIN_SECRET
        self.ask("hello", said)

    def body(self, op: str, args: dict[str, Any], request_id: int | None = None) -> bytes:
        if request_id is None:
            request_id = self.next_id
            self.next_id += 1
        return pack_request(Request(op, request_id, self.daemon.core.boot, self.session, args))

    def ask(self, op: str, args: dict[str, Any], request_id: int | None = None) -> dict[str, Any]:
        reply = self.daemon.reply(self.body(op, args, request_id))
        assert reply is not None, "the reply waits for the catalog"
        if reply.error is not None:
            raise reply.error
        return reply.result


class Daemon:
    """A core over a real arena of 64 extents. Attach ids must be locked by some other process."""

    def __init__(self, directory: Path | None = None, **settings: Any) -> None:
        self.directory = directory or scratch_directory()
        gib = 64 * EXTENT / (1 << 30)
        self.settings = load_settings(
            {
                "l1_size_gb": gib,
                "extent_kib": EXTENT // 1024,
                "chunk_size": CHUNK,
                "arena_dir": self.directory,
                **settings,
            }
        )
        boot = os.urandom(16)
        self.opened = open_arena(
            self.directory, size_bytes=self.settings.l1_bytes, extent_bytes=EXTENT, boot=boot
        )
        space = self.opened.arena.spaces[0]
        space.segment.populate(0, space.segment.shape.extent_count)
        space.add_populated(space.segment.shape.extent_count)
        self.events: list[Any] = []
        self.core: Core = build_core(self.settings, boot, self.opened, self._submit, Ttls())
        self.core.admin_secret = ADMIN_SECRET
        self.core.move_to(Phase.POPULATING)
        self.core.move_to(Phase.READY)
        self.catalog_error: PagewardenError | None = None
        self.dispatcher = Dispatcher(self.core, self._health, self._require_catalog)

    def _submit(self, event: Any) -> bool:
        self.events.append(event)
        return True

    def _require_catalog(self) -> None:
        if self.catalog_error is not None:
            raise self.catalog_error

    @staticmethod
    def _health() -> dict[str, Any]:
        catalog = CatalogStatus(state="ok", reason="", path="", queued=0, written=0, dropped=0)
        return {"gates": [], "catalog": catalog, "loops": []}

    def handle(self, body: bytes) -> Outgoing | Waiting | None:
        return self.dispatcher.handle(body)

    def reply(self, body: bytes) -> Reply | None:
        """The reply to ``body``; what waits for the catalog is made durable at once."""
        answer = self.handle(body)
        if answer is None:
            return None
        sent = self.dispatcher.finish(answer, None) if isinstance(answer, Waiting) else answer.body
        return unpack_reply(sent)

    def close(self) -> None:
        self.opened.arena.close(clean=False)
        os.close(self.opened.lock_descriptor)
        for pattern in ("segment-*", "namespace-*"):  # where the directory stays, for the locks in it
            for path in self.directory.glob(pattern):
                path.unlink()
        shutil.rmtree(self.directory)

    # --- what a peer can do with it ---------------------------------------------------------------------------------

    def engine(self, attach_id: int, engine_id: str = "engine", **changes: Any) -> tuple[Peer, Peer]:
        """A scheduler and its one worker, settled."""
        worker, scheduler = Peer(self, Role.WORKER, engine_id), Peer(self, Role.SCHEDULER, engine_id)
        worker.ask("attach", attach_args(attach_id))
        settled = scheduler.ask("register", register_args(**changes))["settled"]
        assert settled is not None
        return scheduler, worker

    def counts(self) -> dict[str, Any]:
        """Everything that a refused request must not change."""
        core = self.core
        return {
            "arena": core.arena.account(),
            "leases": sorted(core.leases.live),
            "reservations": sorted(core.reservations.live),
            "revoked": {each: sorted(of) for each, of in core.reservations.revoked.items()},
            "limbo": {each: sorted(of) for each, of in core.arena.limbo_by_attach.items()},
            "sessions": sorted(core.sessions.live),
            "objects": [
                (index.row_count, [totals.objects for totals in index.totals]) for index in core.store.by_slot
            ],
            "engines": {
                each: (engine.state, engine.scheduler, sorted(engine.workers))
                for each, engine in core.engines.engines.items()
            },
            "ttls": (
                core.ttls.read_lease_ttl_seconds,
                core.ttls.write_ttl_seconds,
                dict(core.ttls.overrides),
            ),
            "epoch": core.arena.global_clear_epoch,
            "accounts": (dict(core.accounts.users), dict(core.accounts.tokens), dict(core.accounts.logins)),
        }


def reserve_args(
    keys: list[bytes], *, groups: tuple[int, ...] = (0, 1), length: int = EXTENT
) -> dict[str, Any]:
    """Every chunk of ``keys`` in every group."""
    asked = [(chunk, group) for chunk in range(len(keys)) for group in groups]
    return {
        "groups": [group for _, group in asked],
        "chunks": [chunk for chunk, _ in asked],
        "keys": join_keys([keys[chunk] for chunk, _ in asked]),
        "parents": join_keys([keys[chunk - 1] if chunk else ROOT for chunk, _ in asked]),
        "lengths": [length] * len(asked),
    }


def lookup_args(keys: list[bytes], **changes: Any) -> dict[str, Any]:
    tokens = len(keys) * CHUNK + 1
    return {"request": "r", "keys": join_keys(keys), "prompt_tokens": tokens, **changes}


def store(worker: Peer, keys: list[bytes], **changes: Any) -> None:
    """A worker reserves and commits."""
    got = worker.ask("reserve", reserve_args(keys, **changes))
    mine = [each for each in got["reservations"] if each]
    worker.ask("commit", {"reservations": mine, "checksums": [0] * len(mine)})


__all__ = ["NO_ID", "Daemon", "Peer", "attach_args", "lookup_args", "register_args", "reserve_args", "store"]
