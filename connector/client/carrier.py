"""How page bytes get from this process to the daemon's memory and back: the part that depends on the transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from appliance.protocol.base import LoadFailure
from appliance.protocol.messages import LocateResult, ReserveResult
from connector.client.jobs import LoadItem
from connector.client.mapping import ArenaMapping, MappedSegment
from kernels import Backend, Direction, Spans, StreamRuns, finish, plan_object


class Carrier(Protocol):
    """Moves streams on the thread that calls it, and may wait there, bounded."""

    def store(self, granted: ReserveResult, runs: Sequence[StreamRuns]) -> list[int]:
        """Bring what was granted into the arena; the checksums of those objects, in order.

        ``runs`` are those of all objects asked for. Raises PagewardenError if it cannot be done.
        """

    def load(
        self, items: Sequence[LoadItem], runs: Sequence[StreamRuns], located: LocateResult, deadline: float
    ) -> list[LoadFailure | None]:
        """Bring located objects into the engine's pages and verify what arrived; what failed, by object.

        ``deadline`` is on ``time.monotonic``. Raises PagewardenError if nothing could be read.
        """


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


def stream_lengths(runs: Sequence[StreamRuns]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Lengths of streams, for their checksums."""
    return np.array([run.stream_bytes for run in runs], dtype=np.uint64)


class SharedCarrier:
    """Copies between the engine's pages and the mapped arena."""

    def __init__(self, backend: Backend, mapping: ArenaMapping) -> None:
        self._backend = backend
        self._mapping = mapping

    def store(self, granted: ReserveResult, runs: Sequence[StreamRuns]) -> list[int]:
        """See :class:`Carrier`."""
        placed = place(self._mapping, granted.segments, granted.words, granted.run_counts, granted.runs)
        chosen = [(run, each) for run, each in zip(runs, placed, strict=True) if each is not None]
        spans = Spans.concatenate([_plan(run, each, n) for n, (run, each) in enumerate(chosen)])
        sums = self._backend.copy_spans_checksummed(spans, Direction.STORE, len(chosen))
        return [int(each) for each in finish(sums, stream_lengths([run for run, _ in chosen]))]

    def load(
        self,
        items: Sequence[LoadItem],
        runs: Sequence[StreamRuns],
        located: LocateResult,
        deadline: float,  # noqa: ARG002  # a copy of mapped memory waits for nobody
    ) -> list[LoadFailure | None]:
        """Copy, then re-read every generation, then compare the checksums of the bytes that arrived."""
        placed = place(self._mapping, located.segments, located.words, located.run_counts, located.runs)
        plans = [
            _plan(run, each, n)
            for n, (run, each) in enumerate(zip(runs, placed, strict=True))
            if each is not None
        ]
        sums = self._backend.copy_spans_checksummed(Spans.concatenate(plans), Direction.LOAD, len(items))
        self._backend.acquire_fence()
        arrived = finish(sums, stream_lengths(runs))
        failed: list[LoadFailure | None] = []
        for position, each in enumerate(placed):
            if each is None or self._backend.load_word(each.word_address) != located.words[position]:
                failed.append(LoadFailure.GENERATION)
            elif int(arrived[position]) != located.checksums[position]:
                failed.append(LoadFailure.CHECKSUM)
            else:
                failed.append(None)
        return failed


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
