"""Saves and loads, step by step: reserve, copy, commit; locate, copy, verify. Runs on copy threads and may wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from appliance.errors import ArenaUnreachable, LeaseEnded, PagewardenError
from appliance.geometry import writes_chunk
from appliance.hashing import join_keys
from appliance.protocol.messages import (
    CommitResult,
    Grant,
    LoadFailure,
    LocateResult,
    ReserveResult,
    WorkerGroup,
    parse,
)
from connector.client.calls import Call
from connector.client.jobs import ClientOptions, LoadItem, LoadJob, LoadResult, SaveItem, SaveJob, SaveResult
from connector.client.mapping import ArenaMapping, MappedSegment
from connector.client.writing import Writing
from kernels import Backend, Direction, GroupPages, Spans, StreamRuns, finish, plan_object

logger = logging.getLogger("vllm.pagewarden")

REPORT_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Placed:
    """One object as the daemon placed it, mapped into this process."""

    segment: MappedSegment
    word: int
    runs: tuple[tuple[int, int], ...]

    @property
    def word_address(self) -> int:
        """Where its commit word lies."""
        return self.segment.word_address(self.runs[0][0])


def place(
    mapping: ArenaMapping,
    segments: Sequence[int],
    words: Sequence[int],
    run_counts: Sequence[int],
    runs: bytes,
) -> list[Placed | None]:
    """The columns of a reply as placements; ``None`` where nothing was placed."""
    pairs = np.frombuffer(runs, dtype="<u4").reshape(-1, 2).tolist()
    placed: list[Placed | None] = []
    at = 0
    for segment, word, count in zip(segments, words, run_counts, strict=True):
        mine = tuple((int(first), int(length)) for first, length in pairs[at : at + count])
        at += count
        placed.append(Placed(mapping.segment(segment), word, mine) if count else None)
    return placed


class Transfer:
    """The steps of a save and of a load for one worker.

    ``submit`` sends a call; ``writing`` knows what may be written; ``acknowledge`` is called when a copy that the daemon
    wants stopped has ended.
    """

    def __init__(
        self,
        options: ClientOptions,
        groups: Sequence[WorkerGroup],
        replicas: Sequence[int],
        pages: Mapping[int, GroupPages],
        backend: Backend,
        mapping: ArenaMapping,
        submit: Callable[[Call], Call],
        writing: Writing,
        acknowledge: Callable[[], None],
    ) -> None:
        self._options = options
        self._groups = {group.index: group for group in groups}
        self._replicas = replicas
        self._pages = pages
        self._backend = backend
        self._mapping = mapping
        self._submit = submit
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
        session = self._writing.session
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
            refused = sum(grant in (Grant.OUT_OF_SPACE, Grant.OVER_LIMIT) for grant in granted.grants)
            return 0, len(items) - refused, refused, 0
        if not self._writing.begin(ids, session):
            self._submit(Call("abort", {"reservations": ids}, REPORT_TIMEOUT_SECONDS))
            return 0, 0, len(items), 0
        try:
            checksums, lengths = self._copy_out(granted, runs)
        except Exception:
            self._end(ids)
            self._submit(Call("abort", {"reservations": ids}, REPORT_TIMEOUT_SECONDS))
            raise
        self._end(ids)
        return self._commit(ids, checksums, granted, lengths)

    def _end(self, ids: list[int]) -> None:
        if self._writing.end(ids):
            self._acknowledge()

    def _copy_out(self, granted: ReserveResult, runs: list[StreamRuns]) -> tuple[list[int], list[int]]:
        """Copy what was granted; returns checksums and lengths of those objects, in order."""
        placed = place(self._mapping, granted.segments, granted.words, granted.run_counts, granted.runs)
        chosen = [(run, each) for run, each in zip(runs, placed, strict=True) if each is not None]
        spans = Spans.concatenate([_plan(run, each, n) for n, (run, each) in enumerate(chosen)])
        sums = self._backend.copy_spans_checksummed(spans, Direction.STORE, len(chosen))
        lengths = [run.stream_bytes for run, _ in chosen]
        return [int(each) for each in finish(sums, np.array(lengths, dtype=np.uint64))], lengths

    def _commit(
        self, ids: list[int], checksums: list[int], granted: ReserveResult, lengths: list[int]
    ) -> tuple[int, int, int, int]:
        args = {"reservations": ids, "checksums": checksums}
        done = parse(CommitResult, self._ask("commit", args, self._options.save_timeout_seconds))
        refused = set(done.refused)
        size = sum(length for each, length in zip(ids, lengths, strict=True) if each not in refused)
        no_room = sum(grant in (Grant.OUT_OF_SPACE, Grant.OVER_LIMIT) for grant in granted.grants)
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
        try:
            located = self._locate(job, left)
        except LeaseEnded as error:
            chunks = error.details.get("chunks")
            lost = tuple(int(chunk) for chunk in chunks) if isinstance(chunks, list) else ()
            return LoadResult(job.request_id, ok=False, failed_chunks=lost, reason=str(error), bytes_loaded=0)
        except PagewardenError as error:
            return LoadResult(job.request_id, ok=False, failed_chunks=(), reason=str(error), bytes_loaded=0)
        failed, size = self._copy_in(job, located)
        self._report(job, located, failed, size, time.monotonic() - began)
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
        return parse(LocateResult, self._submit(call).wait())

    def _copy_in(
        self, job: LoadJob, located: LocateResult
    ) -> tuple[list[tuple[LoadItem, int, LoadFailure]], int]:
        """Copy, then re-read every generation, then compare the checksums of the bytes that arrived."""
        try:
            placed = place(self._mapping, located.segments, located.words, located.run_counts, located.runs)
            spans, lengths = self._plan_load(job, located, placed)
            sums = self._backend.copy_spans_checksummed(spans, Direction.LOAD, len(job.items))
        except Exception as error:  # noqa: BLE001  # reported as a failed load, whatever it is
            logger.warning("Pagewarden cannot load request %s: %s", job.request_id, error)
            return [(item, 0, LoadFailure.ERROR) for item in job.items], 0
        self._backend.acquire_fence()
        arrived = finish(sums, lengths)
        failed = []
        for position, item in enumerate(job.items):
            each = placed[position]
            word = located.words[position]
            if each is None or self._backend.load_word(each.word_address) != word:
                failed.append((item, word, LoadFailure.GENERATION))
            elif int(arrived[position]) != located.checksums[position]:
                failed.append((item, word, LoadFailure.CHECKSUM))
        return failed, int(lengths.sum())

    def _plan_load(
        self, job: LoadJob, located: LocateResult, placed: list[Placed | None]
    ) -> tuple[Spans, Any]:
        plans, lengths = [], []
        for position, (item, each) in enumerate(zip(job.items, placed, strict=True)):
            runs = self._pages[item.group].stream_runs(item.block_ids)
            if each is None or runs.stream_bytes != located.lengths[position]:
                raise ArenaUnreachable(
                    f"Chunk {item.chunk} of group {item.group} has {located.lengths[position]} bytes, "
                    f"this engine's pages take {runs.stream_bytes}."
                )
            plans.append(_plan(runs, each, position))
            lengths.append(runs.stream_bytes)
        return Spans.concatenate(plans), np.array(lengths, dtype=np.uint64)

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
        self._let_go(job, located.lease)

    def _let_go(self, job: LoadJob, lease: int) -> None:
        """A hold that had to be restored is this session's to release; the scheduler's own is the scheduler's."""
        if lease and lease != job.lease:
            self._submit(Call("release", {"leases": [lease]}, REPORT_TIMEOUT_SECONDS))


def _plan(runs: StreamRuns, placed: Placed, object_index: int) -> Spans:
    segment = placed.segment
    return plan_object(
        runs,
        placed.runs,
        extent_bytes=segment.extent_bytes,
        data_base_address=segment.data_address,
        extent_limit=segment.extent_count,
        object_index=object_index,
    )
