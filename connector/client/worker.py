"""The worker's client: attaches, maps the arena or finds the bulk socket, and copies on threads of its own."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from appliance.errors import PagewardenError
from appliance.protocol.base import Role, Transport, parse
from appliance.protocol.client import endpoint_of
from appliance.protocol.messages import AttachResult, HeartbeatResult, HelloResult, WorkerGroup
from connector.client import forks
from connector.client.attachment import Attachment
from connector.client.bulk import BulkAddress
from connector.client.carrier import Carrier, SharedCarrier
from connector.client.inline import InlineCarrier
from connector.client.jobs import (
    ClientHealth,
    ClientOptions,
    ClientState,
    LoadJob,
    LoadResult,
    SaveJob,
    SaveResult,
)
from connector.client.link import Link
from connector.client.mapping import ArenaMapping, SegmentWatcher
from connector.client.transfer import Transfer
from connector.client.writing import Writing
from kernels import Backend, GroupPages, load_backend

logger = logging.getLogger("vllm.pagewarden")

_T = TypeVar("_T")

STOP_SECONDS = 5.0
FAIL_LOADS_VARIABLE = "PAGEWARDEN_TEST_FAIL_LOADS"


class WorkerClient:
    """The daemon as one rank sees it. ``save`` and ``load`` never wait; results are drained by the engine's step.

    ``pages`` are this rank's pages by cache group; ``replicas`` the replica count of each group. ``backend`` copies;
    ``segments`` is told which parts of the arena are mapped, where the backend must prepare for them.
    """

    role = Role.WORKER

    def __init__(
        self,
        options: ClientOptions,
        *,
        rank: int,
        world_size: int,
        groups: Sequence[WorkerGroup],
        layers: Mapping[str, Mapping[str, Any]],
        pages: Mapping[int, GroupPages],
        replicas: Sequence[int] | None = None,
        backend: Backend | None = None,
        segments: SegmentWatcher | None = None,
    ) -> None:
        self._options = options
        self._attach: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "groups": [group.model_dump() for group in groups],
            "layers": {name: dict(facts) for name, facts in layers.items()},
        }
        self._mapping = ArenaMapping(options.arena_dir, segments)
        self._attachment = Attachment(options.transport, options.arena_dir)
        self._bulk_port = self._bulk_frame_bytes = self._bulk_credits = 0
        self._writing = Writing()
        self._fail_loads = int(os.environ.get(FAIL_LOADS_VARIABLE, "0"))
        self._saves_done: deque[SaveResult] = deque()
        self._loads_done: deque[LoadResult] = deque()
        self._saves: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[tuple[LoadJob, float] | None] = queue.SimpleQueue()
        self.link = Link(options, self)
        backend = backend or load_backend()
        self._shared = SharedCarrier(backend, self._mapping)
        self._inline = InlineCarrier(backend, options.save_timeout_seconds)
        self._transfer = Transfer(
            options,
            groups,
            list(replicas) if replicas is not None else [1] * len(groups),
            pages,
            self._carrier,
            self.link.submit,
            self._writing,
            self._acknowledge,
        )
        self._threads = [
            threading.Thread(target=self._run_saves, name="pagewarden-saves", daemon=True),
            threading.Thread(target=self._run_loads, name="pagewarden-loads", daemon=True),
        ]
        forks.watch(self)

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect, in the background."""
        self.link.start()
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def stop(self) -> None:
        """Let copies under way end, bounded, and say bye."""
        if self.link.health.state in (ClientState.FORKED, ClientState.STOPPED):
            return
        self._saves.put(None)
        self._loads.put(None)
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return  # a copy hangs: no bye, since bye says that none is in flight; the lock proves our death later
        self.link.stop()
        self._mapping.close()
        self._inline.close()
        self._attachment.release()

    @property
    def health(self) -> ClientHealth:
        """How the client stands with the daemon, and how its page bytes travel."""
        transport = self._attachment.transport
        return replace(
            self.link.health,
            transport="" if transport is None else transport.value,
            transport_reason=self._attachment.reason,
        )

    def save(self, job: SaveJob) -> None:
        """Store a job's objects in the background; reported once by :meth:`finished_saves`."""
        if self.link.usable:
            self._saves.put(job)
        else:
            self._saves_done.append(SaveResult(job.job_id, 0, 0, len(job.items), 0))

    def load(self, job: LoadJob) -> None:
        """Load a job's objects in the background; reported exactly once by :meth:`finished_loads`."""
        if self.link.health.state is ClientState.FORKED:
            self._loads_done.append(
                LoadResult(
                    job.request_id,
                    ok=False,
                    failed_chunks=(),
                    reason="this process is a fork",
                    bytes_loaded=0,
                )
            )
        else:
            self._loads.put((job, time.monotonic() + self._options.load_timeout_seconds))

    def finished_saves(self) -> list[SaveResult]:
        """Results since the last call."""
        return _drain(self._saves_done)

    def finished_loads(self) -> list[LoadResult]:
        """Results since the last call."""
        return _drain(self._loads_done)

    def after_fork_in_child(self) -> None:
        """See :mod:`connector.client.forks`."""
        self._saves_done = deque()
        self._loads_done = deque()
        self.link.after_fork_in_child()

    # --- copy threads --------------------------------------------------------------------------------------------------

    def _run_saves(self) -> None:
        while (job := self._saves.get()) is not None:
            result = SaveResult(job.job_id, 0, 0, len(job.items), 0)
            try:
                # The engine keeps a job's blocks until it is reported: behind a daemon that is away, give up at once.
                if self.link.usable:
                    result = self._transfer.save(job)
            except Exception:
                logger.exception("Pagewarden could not store job %d", job.job_id)
            self._saves_done.append(result)

    def _run_loads(self) -> None:
        while (taken := self._loads.get()) is not None:
            job, deadline = taken
            result = LoadResult(
                job.request_id,
                ok=False,
                failed_chunks=(),
                reason="the load failed; the log says why",
                bytes_loaded=0,
            )
            try:
                result = self._transfer.load(job, deadline)
            except Exception:
                logger.exception("Pagewarden could not load request %s", job.request_id)
            self._loads_done.append(self._maybe_fail(job, result))

    def _maybe_fail(self, job: LoadJob, result: LoadResult) -> LoadResult:
        """Fail the first loads on purpose where a test asks for it, after their bytes have been written."""
        if self._fail_loads <= 0 or not result.ok:
            return result
        self._fail_loads -= 1
        chunks = tuple(sorted({item.chunk for item in job.items}))
        return LoadResult(
            job.request_id,
            ok=False,
            failed_chunks=chunks,
            reason=f"{FAIL_LOADS_VARIABLE} is set",
            bytes_loaded=result.bytes_loaded,
        )

    def _carrier(self) -> Carrier:
        """What moves page bytes in the present session."""
        return self._inline if self._attachment.transport is Transport.INLINE else self._shared

    def _acknowledge(self) -> None:
        """A revoked copy has ended: the daemon waits for that word."""
        self.link.heartbeat_soon()

    # --- the IO thread: see link.Member ----------------------------------------------------------------------------------

    def may_join(self) -> bool:
        """Attach says that no copy is in flight: wait until that is so."""
        return self._writing.idle

    def join(self, hello: HelloResult) -> tuple[str, dict[str, Any]]:
        """Attach with a lock, which proves our death later, or inline. Raises ArenaUnreachable."""
        self._bulk_port = hello.bulk_port
        self._bulk_frame_bytes, self._bulk_credits = hello.bulk_frame_bytes, hello.bulk_credits
        return "attach", {**self._attach, **self._attachment.begin(hello)}

    def joined(self, result: dict[str, Any]) -> None:
        """Map the arena, or know where the bulk socket is. Raises ArenaUnreachable."""
        if self._attachment.transport is Transport.SHARED:
            self._mapping.attached(parse(AttachResult, result).segments)
            return
        boot, session = self.link.identity
        self._inline.address = BulkAddress(
            endpoint_of(self._options.host, self._bulk_port),
            boot,
            session,
            self._bulk_frame_bytes,
            self._bulk_credits,
        )

    def refused(self, error: PagewardenError) -> None:
        """The next try may have to go another way."""
        self._attachment.failed(error)

    def heartbeat(self) -> dict[str, Any]:
        """Acknowledge revocations whose copies have stopped; name the holds that a load restored."""
        return {
            "leases": sorted(self._transfer.restored),
            "stopped": self._writing.take_stopped(),
            "segments_known": self._mapping.known,
        }

    def heard(self, result: dict[str, Any]) -> None:
        """Stop what was revoked; map new segments."""
        told = parse(HeartbeatResult, result)
        if told.segments:
            self._mapping.update(told.segments)
        if self._writing.revoke(told.revoked):
            self.link.heartbeat_soon()

    def hurried(self) -> bool:
        """A worker has nothing to wait for."""
        return False

    def lost(self) -> None:
        """The session is gone: nothing written from now on will be committed."""
        self._inline.address = None
        self._attachment.new_session()
        self._writing.new_session()


def _drain(done: deque[_T]) -> list[_T]:
    results = []
    while done:
        results.append(done.popleft())
    return results
