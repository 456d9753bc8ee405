"""What the two halves of the connector tell each other, in plain data: vLLM's envelopes are in `metadata`."""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.client import LoadJob, SaveItem


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """One save for every rank. Its blocks are pinned until all ranks reported it."""

    job_id: int
    items: tuple[SaveItem, ...]
    salt: bytes


@dataclass(frozen=True, slots=True)
class StepOrders:
    """The loads and saves that begin with one step. `broken_loads` cannot begin and are reported as failed."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    broken_loads: tuple[str, ...] = ()


@dataclass
class Report:
    """What one worker finished since its last report, or several workers' reports together.

    `saves_done` counts ranks by job. `failed_chunks` holds the chunks that a request's failed load lost on any rank;
    an empty set means that the load failed as a whole.
    """

    saves_done: dict[int, int] = field(default_factory=dict)
    failed_chunks: dict[str, frozenset[int]] = field(default_factory=dict)

    def merged(self, other: Report) -> Report:
        """Both reports as one."""
        saves = dict(self.saves_done)
        for job_id, ranks in other.saves_done.items():
            saves[job_id] = saves.get(job_id, 0) + ranks
        failed = dict(self.failed_chunks)
        for request_id, chunks in other.failed_chunks.items():
            failed[request_id] = failed.get(request_id, frozenset()) | chunks
        return Report(saves, failed)

    def __bool__(self) -> bool:
        return bool(self.saves_done or self.failed_chunks)
