"""The scheduler's client: lookups that are a miss when in doubt, and the leases they hold."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appliance.errors import ArenaUnreachable, AttachmentNotProven, PagewardenError
from appliance.hashing import join_keys
from appliance.protocol.base import Role, parse
from appliance.protocol.messages import (
    GroupFacts,
    HeartbeatResult,
    HelloResult,
    LookupResult,
    RegisterResult,
    Settlement,
)
from connector.client import forks
from connector.client.calls import Call
from connector.client.jobs import ClientHealth, ClientOptions, ClientState
from connector.client.link import Link
from connector.client.lock import AttachLock

logger = logging.getLogger("vllm.pagewarden")

ANSWER_KEPT_SECONDS = 10.0
"""How long a late answer is still awaited, only to release the lease it brings."""

RELEASE_TIMEOUT_SECONDS = 5.0


class PendingLookup:
    """One lookup under way; ``poll`` always gives a result within the lookup timeout."""

    def __init__(self, client: SchedulerClient, call: Call, timeout_seconds: float) -> None:
        self._client = client
        self._call = call
        self._deadline = time.monotonic() + timeout_seconds
        self._given_up = False

    def poll(self) -> LookupResult | None:
        """The result, ``None`` while there is still time for one. A dead or slow daemon gives a miss."""
        call = self._call
        if call.done:
            if call.result is None or self._given_up:
                return _miss()
            result = parse(LookupResult, call.result)
            if result.lease and not self._client.take_lease(result.lease):
                return _miss()
            return result
        if time.monotonic() < self._deadline:
            return None
        self._client.link.unresponsive()
        self.cancel()
        return _miss()

    def cancel(self) -> None:
        """Nobody waits any more; the lease of a late answer is released."""
        if not self._given_up:
            self._given_up = True
            self._call.give_up()


def _miss() -> LookupResult:
    return LookupResult(hit_chunks=0, settled=False)


class SchedulerClient:
    """The daemon as one engine's scheduler sees it. No method waits."""

    role = Role.SCHEDULER

    def __init__(
        self,
        options: ClientOptions,
        *,
        world_size: int,
        facts: dict[str, Any],
        groups: list[GroupFacts],
        require_namespace: str = "",
        max_batched_tokens: int = 0,
        snapshots: str = "chosen",
    ) -> None:
        self._options = options
        self._register: dict[str, Any] = {
            "world_size": world_size,
            "facts": facts,
            "groups": [group.model_dump(mode="json") for group in groups],
            "require_namespace": require_namespace,
            "max_batched_tokens": max_batched_tokens,
            "snapshots": snapshots,
        }
        self._settlement: Settlement | None = None
        self._waiting = ""
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self._attach_lock: AttachLock | None = None
        self._lock_directory: Path | None = None
        self._lock_unseen = False
        self.link = Link(options, self)
        forks.watch(self)

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect, in the background."""
        self.link.start()

    def stop(self) -> None:
        """Say bye; bounded. The daemon ends all leases of the session."""
        self.link.stop()
        if self._attach_lock is not None and self.link.health.state is ClientState.STOPPED:
            self._attach_lock.release()

    @property
    def settlement(self) -> Settlement | None:
        """What the registration gave; ``None`` until it is settled and while the daemon is away."""
        return self._settlement if self.link.health.state is ClientState.JOINED else None

    @property
    def chunk_tokens(self) -> int | None:
        """The negotiated chunk size."""
        settled = self.settlement
        return settled.chunk_tokens if settled is not None else None

    @property
    def health(self) -> ClientHealth:
        """How the client stands with the daemon."""
        return self.link.health

    def lookup(
        self,
        request_id: str,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int,
        local_tokens: int,
        refused_chunks: Sequence[int] = (),
    ) -> PendingLookup:
        """Ask how much of a prompt can be loaded."""
        call = Call(
            "lookup",
            {
                "request": request_id[:256],
                "keys": join_keys(keys),
                "prompt_tokens": prompt_tokens,
                "local_tokens": local_tokens,
                "refused_chunks": list(refused_chunks),
            },
            ANSWER_KEPT_SECONDS,
            on_unwanted=self._release_unwanted,
        )
        if self.link.usable and self._settlement is not None:
            self.link.submit(call)
        else:
            call.complete(None)
        return PendingLookup(self, call, self._options.lookup_timeout_seconds)

    def take_lease(self, lease: int) -> bool:
        """A lookup's lease is ours to keep and to release; ``False`` if it has gone with its session."""
        if not self.link.usable and self.link.health.state is not ClientState.JOINED:
            return False
        with self._lock:
            self._held.add(lease)
        return True

    def release(self, lease: int) -> None:
        """Let go of a lease; one that is not held is no error."""
        with self._lock:
            known = lease in self._held
            self._held.discard(lease)
        if known:
            self.link.submit(Call("release", {"leases": [lease]}, RELEASE_TIMEOUT_SECONDS))

    def after_fork_in_child(self) -> None:
        """See :mod:`connector.client.forks`."""
        self._settlement = None
        self._held = set()
        self._lock = threading.Lock()
        self.link.after_fork_in_child()

    def _release_unwanted(self, result: dict[str, Any]) -> None:
        lease = result.get("lease")
        if isinstance(lease, int) and lease:
            self.link.submit(Call("release", {"leases": [lease]}, RELEASE_TIMEOUT_SECONDS))

    # --- the IO thread: see link.Member ----------------------------------------------------------------------------

    def may_join(self) -> bool:
        """A scheduler has no copies in flight."""
        return True

    def join(self, hello: HelloResult) -> tuple[str, dict[str, Any]]:
        """Register, with a lock where the arena's directory can be seen: then our death ends our leases at once."""
        directory = Path(self._options.arena_dir or hello.arena_dir)
        if self._lock_unseen:
            self._attach_lock = None
        elif self._attach_lock is None or self._lock_directory != directory:
            try:
                self._attach_lock = AttachLock(directory)
                self._lock_directory = directory
            except ArenaUnreachable:
                self._attach_lock = None
        attach_id = self._attach_lock.attach_id if self._attach_lock is not None else 0
        return "register", {**self._register, "attach_id": attach_id}

    def joined(self, result: dict[str, Any]) -> None:
        """The registration was taken; it may still wait for ranks."""
        registered = parse(RegisterResult, result)
        self._waiting = registered.waiting
        self._settle(registered.settled)

    def refused(self, error: PagewardenError) -> None:
        """A daemon that does not see our lock, on another host or kernel, is registered with without one."""
        if isinstance(error, AttachmentNotProven) and self._attach_lock is not None:
            self._attach_lock.release()
            self._lock_unseen = True

    def heartbeat(self) -> dict[str, Any]:
        """Name exactly the leases we hold."""
        with self._lock:
            return {"leases": sorted(self._held)}

    def heard(self, result: dict[str, Any]) -> None:
        """Leases that ended, TTLs, and the settlement once it is there."""
        told = parse(HeartbeatResult, result)
        if told.leases_ended:
            logger.warning("Pagewarden ended leases %s before they were released", told.leases_ended[:16])
            with self._lock:
                self._held.difference_update(told.leases_ended)
        if told.refused is not None and self._waiting != told.waiting:
            logger.warning("Pagewarden refuses this engine: %s", told.waiting)
        self._waiting = told.waiting
        self._settle(told.settled)

    def hurried(self) -> bool:
        """Until the ranks have attached, ask often: the engine is starting."""
        return self._settlement is None

    def lost(self) -> None:
        """The session is gone and all leases with it."""
        self._settlement = None
        self._lock_unseen = False
        with self._lock:
            self._held.clear()

    def _settle(self, settled: Settlement | None) -> None:
        if settled is not None and self._settlement is None:
            logger.info(
                "Pagewarden serves namespace %s with chunks of %d tokens",
                settled.namespace,
                settled.chunk_tokens,
            )
            for notice in settled.notices:
                logger.info("Pagewarden: %s", notice)
            for other in settled.others:
                fields = ", ".join(difference.field for difference in other.differences)
                logger.info(
                    "Pagewarden does not share with namespace %s: they differ in %s", other.namespace, fields
                )
        self._settlement = settled
