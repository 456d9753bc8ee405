"""The worker's half of the connector: copies between vLLM's pages and the arena, each reported exactly once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from connector.client import SaveJob
from connector.vllm.figures import Tally
from connector.vllm.orders import Report, StepOrders
from kernels import Direction

if TYPE_CHECKING:
    from connector.client import WorkerClient

logger = logging.getLogger("vllm.pagewarden")


Mark = Callable[[Direction], Callable[[], None] | None]
"""Where the engine's computation is now, as a wait for a copy thread; see `connector.client.device.Copies.mark`."""


class WorkerSide:
    """Passes jobs to the client's copy threads and its results to vLLM. Belongs to the worker's thread.

    Orders are the same for every rank; `groups` are those of which this rank's pipeline stage has layers.
    """

    def __init__(self, client: WorkerClient, mark: Mark, groups: Collection[int]) -> None:
        self._client = client
        self._groups = frozenset(groups)
        self._mark = mark
        self._loading: set[str] = set()
        self._saving = 0
        self._failed_at_once: set[str] = set()
        self._report = Report()
        self.tally = Tally()

    def start_loads(self, orders: StepOrders) -> None:
        """Begin this step's loads; on a device they wait, off this thread, for what earlier steps do with the blocks."""
        ready = self._mark(Direction.LOAD) if orders.loads else None
        for job in orders.loads:
            self._loading.add(job.request_id)
            items = tuple(item for item in job.items if item.group in self._groups)
            self._client.load(replace(job, items=items, ready=ready))
        self._failed_at_once.update(orders.broken_loads)

    def start_saves(self, orders: StepOrders) -> None:
        """Begin this step's saves; on a device they wait, off this thread, for what the step has computed."""
        if not orders.saves:
            return
        ready = self._mark(Direction.STORE)
        for order in orders.saves:
            items = tuple(item for item in order.items if item.group in self._groups)
            self._client.save(SaveJob(order.job_id, items, order.salt, ready))
            self._saving += 1

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those of them whose load failed.

        A request id that vLLM does not expect ends the engine, so a result that nobody waits for is dropped.
        """
        finished, failed = self._failed_at_once, set(self._failed_at_once)
        self._failed_at_once = set()
        for result in self._client.finished_loads():
            if result.request_id not in self._loading:
                logger.error("Pagewarden has a second report of the load of request %s", result.request_id)
                continue
            self._loading.discard(result.request_id)
            finished.add(result.request_id)
            self.tally.add(
                rank_loads=1,
                rank_loads_failed=not result.ok,
                loaded_bytes=result.bytes_loaded if result.ok else 0,
            )
            if not result.ok:
                logger.warning("Pagewarden's load of request %s failed: %s", result.request_id, result.reason)
                failed.add(result.request_id)
                self._report.failed_chunks[result.request_id] = frozenset(result.failed_chunks)
        return finished, failed

    def take_report(self) -> Report | None:
        """What the scheduler's half must know of this worker since the last call."""
        if self._loading or self._saving:
            # An engine that only waits for copies steps without a pause. The client's threads need the interpreter too.
            time.sleep(0)
        for result in self._client.finished_saves():
            self._report.saves_done[result.job_id] = 1
            self._saving -= 1
            self.tally.add(
                stored_objects=result.stored, stored_bytes=result.bytes_stored, failed_objects=result.failed
            )
        report, self._report = self._report, Report()
        return report or None

    def stop(self) -> None:
        """Let copies under way end, bounded by the client, and say goodbye."""
        self._client.stop()
