"""Saves and loads, step by step: reserve, copy, commit; locate, copy, verify. Runs on copy threads and may wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from appliance.errors import ArenaUnreachable, LeaseEnded, PagewardenError
from appliance.geometry import writes_chunk
from appliance.hashing import join_keys
from appliance.protocol.base import Grant, LoadFailure, parse
from appliance.protocol.messages import CommitResult, LocateResult, ReserveResult, WorkerGroup
from connector.client.calls import Call
from connector.client.carrier import Carrier
from connector.client.jobs import ClientOptions, LoadItem, LoadJob, LoadResult, SaveItem, SaveJob, SaveResult
from connector.client.writing import Writing
from kernels import GroupPages, StreamRuns

logger = logging.getLogger("vllm.pagewarden")

REPORT_TIMEOUT_SECONDS = 10.0
NO_ROOM = frozenset({Grant.OUT_OF_SPACE, Grant.OVER_LIMIT, Grant.WARMING})
"""Grants that store nothing, and would have stored with more memory."""


class Transfer:
    """The steps of a save and of a load for one worker.

    ``carrier`` gives what moves bytes in the present session; ``submit`` sends a call; ``writing`` knows what may be
    written; ``acknowledge`` is called when a copy that the daemon wants stopped has ended.
    """

    def __init__(
        self,
        options: ClientOptions,
        groups: Sequence[WorkerGroup],
        replicas: Sequence[int],
        pages: Mapping[int, GroupPages],
        carrier: Callable[[], Carrier],
        submit: Callable[[Call], Call],
        writing: Writing,
        acknowledge: Callable[[], None],
    ) -> None:
        self._options = options
        self._groups = {group.index: group for group in groups}
        self._replicas = replicas
        self._pages = pages
        self._carrier = carrier
        self._submit = submit
        self.restored: set[int] = set()  # leases that this session holds: its heartbeats name them
        self._writing = writing
        self._acknowledge = acknowledge

    def _ask(self, op: str, args: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        return self._submit(Call(op, args, timeout_seconds)).wait()

    # --- saving --------------------------------------------------------------------------------------------------

    def my_turn(self, item: SaveItem) -> bool:
        """Whether this replica is the one that stores the chunk."""
        group = self._groups[item.group]
        return writes_chunk(group.replica, self._replicas[item.group], item.chunk)

    def save(self, job: SaveJob) -> SaveResult:
        """Store a job's objects; whatever goes wrong costs only their caching."""
        mine = [item for item in job.items if self.my_turn(item)]
        others = len(job.items) - len(mine)
        if not mine:
            return SaveResult(job.job_id, 0, others, 0, 0)
        try:
            stored, skipped, failed, size = self._save(job, mine)
        except PagewardenError as error:
            logger.debug("Pagewarden did not store job %d: %s", job.job_id, error)
            return SaveResult(job.job_id, 0, others, len(mine), 0)
        return SaveResult(job.job_id, stored, others + skipped, failed, size)

    def _save(self, job: SaveJob, items: list[SaveItem]) -> tuple[int, int, int, int]:
        if job.ready is not None:
            job.ready()
        runs = [self._pages[item.group].stream_runs(item.block_ids) for item in items]
        session, carrier = self._writing.session, self._carrier()
        answer = self._submit(
            Call(
                "reserve",
                {
                    "groups": [item.group for item in items],
                    "chunks": [item.chunk for item in items],
                    "keys": join_keys([item.key for item in items]),
                    "parents": join_keys([item.parent for item in items]),
                    "lengths": [run.stream_bytes for run in runs],
                    "salt": job.salt,
                },
                self._options.save_timeout_seconds,
                on_unwanted=self._abort_unwanted,
            )
        ).wait()
        granted = parse(ReserveResult, answer)
        ids = [each for each in granted.reservations if each]
        if not ids:
            refused = sum(grant in NO_ROOM for grant in granted.grants)
            return 0, len(items) - refused, refused, 0
        if not self._writing.begin(ids, session):
            self._submit(Call("abort", {"reservations": ids}, REPORT_TIMEOUT_SECONDS))
            return 0, 0, len(items), 0
        try:
            checksums = carrier.store(granted, runs)
        except Exception:
            self._end(ids)
            self._submit(Call("abort", {"reservations": ids}, REPORT_TIMEOUT_SECONDS))
            raise
        self._end(ids)
        lengths = [run.stream_bytes for run, each in zip(runs, granted.reservations, strict=True) if each]
        return self._commit(ids, checksums, granted, lengths)

    def _end(self, ids: list[int]) -> None:
        if self._writing.end(ids):
            self._acknowledge()

    def _commit(
        self, ids: list[int], checksums: list[int], granted: ReserveResult, lengths: list[int]
    ) -> tuple[int, int, int, int]:
        args = {"reservations": ids, "checksums": checksums}
        done = parse(CommitResult, self._ask("commit", args, self._options.save_timeout_seconds))
        refused = set(done.refused)
        size = sum(length for each, length in zip(ids, lengths, strict=True) if each not in refused)
        no_room = sum(grant in NO_ROOM for grant in granted.grants)
        skipped = len(granted.grants) - len(ids) - no_room
        return done.committed, skipped, no_room + len(refused), size

    def _abort_unwanted(self, result: dict[str, Any]) -> None:
        ids = [each for each in result.get("reservations", ()) if each]
        if ids:
            self._submit(Call("abort", {"reservations": ids}, REPORT_TIMEOUT_SECONDS))

    # --- loading ---------------------------------------------------------------------------------------------------

    def load(self, job: LoadJob, deadline: float) -> LoadResult:
        """Load a job's objects into their blocks and verify what arrived."""
        began = time.monotonic()
        left = deadline - began
        if left <= 0:
            return LoadResult(
                job.request_id, ok=False, failed_chunks=(), reason="its turn came too late", bytes_loaded=0
            )
        if not job.items:
            return LoadResult(job.request_id, ok=True, failed_chunks=(), reason="", bytes_loaded=0)
        if job.ready is not None:
            job.ready()
        try:
            located = self._locate(job, left)
        except LeaseEnded as error:
            chunks = error.details.get("chunks")
            lost = tuple(int(chunk) for chunk in chunks) if isinstance(chunks, list) else ()
            return LoadResult(job.request_id, ok=False, failed_chunks=lost, reason=str(error), bytes_loaded=0)
        except PagewardenError as error:
            return LoadResult(job.request_id, ok=False, failed_chunks=(), reason=str(error), bytes_loaded=0)
        try:
            failed, size = self._copy_in(job, located, deadline)
            self._report(job, located, failed, size, time.monotonic() - began)
        finally:
            self._let_go(job, located.lease)  # a hold that is named for ever would make its memory immortal
        if failed:
            chunks_failed = tuple(sorted({item.chunk for item, _, _ in failed}))
            causes = ", ".join(sorted({cause.value for _, _, cause in failed}))
            return LoadResult(
                job.request_id,
                ok=False,
                failed_chunks=chunks_failed,
                reason=f"{causes} in chunks {chunks_failed[:16]}",
                bytes_loaded=size,
            )
        return LoadResult(job.request_id, ok=True, failed_chunks=(), reason="", bytes_loaded=size)

    def _locate(self, job: LoadJob, timeout_seconds: float) -> LocateResult:
        args = {
            "lease": job.lease,
            "request": job.request_id[:256],
            "hit_chunks": job.hit_chunks,
            "keys": join_keys(job.keys[: job.hit_chunks]),
            "groups": [item.group for item in job.items],
            "chunks": [item.chunk for item in job.items],
        }
        call = Call(
            "locate",
            args,
            timeout_seconds,
            on_unwanted=lambda reply: self._let_go(job, reply.get("lease", 0)),
        )
        located = parse(LocateResult, self._submit(call).wait())
        if located.lease != job.lease:
            self.restored.add(located.lease)
        return located

    def _copy_in(
        self, job: LoadJob, located: LocateResult, deadline: float
    ) -> tuple[list[tuple[LoadItem, int, LoadFailure]], int]:
        """Bring the bytes into the pages; what failed, and the bytes that arrived."""
        try:
            runs = self._stream_runs(job, located)
            causes = self._carrier().load(job.items, runs, located, deadline)
        except Exception as error:  # noqa: BLE001  # reported as a failed load, whatever it is
            logger.warning("Pagewarden cannot load request %s: %s", job.request_id, error)
            return [(item, 0, LoadFailure.ERROR) for item in job.items], 0
        failed = [
            (item, word, cause)
            for item, word, cause in zip(job.items, located.words, causes, strict=True)
            if cause is not None
        ]
        return failed, sum(run.stream_bytes for run in runs)

    def _stream_runs(self, job: LoadJob, located: LocateResult) -> list[StreamRuns]:
        runs = [self._pages[item.group].stream_runs(item.block_ids) for item in job.items]
        for item, run, length in zip(job.items, runs, located.lengths, strict=True):
            if run.stream_bytes != length:
                raise ArenaUnreachable(
                    f"Chunk {item.chunk} of group {item.group} has {length} bytes, "
                    f"this engine's pages take {run.stream_bytes}."
                )
        return runs

    def _report(
        self,
        job: LoadJob,
        located: LocateResult,
        failed: list[tuple[LoadItem, int, LoadFailure]],
        size: int,
        seconds: float,
    ) -> None:
        args = {
            "lease": located.lease,
            "request": job.request_id[:256],
            "objects": len(job.items) - len(failed),
            "bytes_loaded": size if not failed else 0,
            "seconds": seconds,
            "failed": [
                {
                    "group": i.group,
                    "chunk": i.chunk,
                    "key": job.keys[i.chunk],
                    "word": word,
                    "cause": cause.value,
                }
                for i, word, cause in failed
            ],
        }
        self._submit(Call("loads", args, REPORT_TIMEOUT_SECONDS))

    def _let_go(self, job: LoadJob, lease: int) -> None:
        """A hold that had to be restored is this session's to release; the scheduler's own is the scheduler's."""
        if lease and lease != job.lease:
            self.restored.discard(lease)
            self._submit(Call("release", {"leases": [lease]}, REPORT_TIMEOUT_SECONDS))
