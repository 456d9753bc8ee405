"""A rank in a process of its own, as in a real engine: it can be stopped and killed apart from the others."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from connector.client import LoadJob, LoadResult, SaveJob, SaveResult
from connector.simulate.rank import Loaded, RankSettings, Report, SimulatedRank

_POLL_SECONDS = 0.001
_IDLE_POLL_SECONDS = 0.02
_STOP_SECONDS = 10.0


def _serve(settings: RankSettings, pipe: Connection) -> None:
    """The rank process: obeys until it is told to stop or its engine is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the engine says when
    rank = SimulatedRank(settings)
    rank.start()
    under_way, joined = 0, False
    try:
        while True:
            if pipe.poll(_POLL_SECONDS if under_way else _IDLE_POLL_SECONDS):
                order = pipe.recv()
                if order is None:
                    return
                under_way += 1
                _obey(rank, order)
            report = rank.poll()
            under_way -= len(report.saved) + len(report.loaded)
            if report.saved or report.loaded or report.joined != joined:
                joined = report.joined
                pipe.send(report)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        rank.stop()


def _obey(rank: SimulatedRank, order: SaveJob | LoadJob) -> None:
    if isinstance(order, SaveJob):
        rank.store(order)
    else:
        rank.load(order)


class RankProcess:
    """A rank elsewhere, with the methods of :class:`SimulatedRank`. One that died fails what it was given."""

    def __init__(self, settings: RankSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._settings = settings
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(settings, self._theirs), daemon=True)
        self._saves: dict[int, int] = {}
        self._loads: set[str] = set()
        self._joined = False

    def start(self) -> None:
        """Start the process."""
        self._process.start()
        self._theirs.close()

    def stop(self) -> None:
        """Have it say bye and end, bounded."""
        with contextlib.suppress(BrokenPipeError, OSError):
            self._pipe.send(None)
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def store(self, job: SaveJob) -> None:
        """See :meth:`SimulatedRank.store`."""
        self._saves[job.job_id] = len(job.items)
        self._send(job)

    def load(self, job: LoadJob) -> None:
        """See :meth:`SimulatedRank.load`."""
        self._loads.add(job.request_id)
        self._send(job)

    def poll(self) -> Report:
        """See :meth:`SimulatedRank.poll`."""
        total = Report()
        try:
            while self._pipe.poll():
                report: Report = self._pipe.recv()
                self._joined = report.joined
                total.saved += report.saved
                total.loaded += report.loaded
        except (EOFError, ConnectionResetError):
            total = self._all_failed(total)
        total.joined = self._joined
        for saved in total.saved:
            self._saves.pop(saved.job_id, None)
        self._loads.difference_update(each.result.request_id for each in total.loaded)
        return total

    def _send(self, order: Any) -> None:
        try:
            self._pipe.send(order)
        except (BrokenPipeError, OSError):
            return  # poll finds the end of the pipe and fails what is under way

    def _all_failed(self, heard: Report) -> Report:
        self._joined = False
        told = {saved.job_id for saved in heard.saved}
        done = {each.result.request_id for each in heard.loaded}
        heard.saved += [SaveResult(job, 0, 0, n, 0) for job, n in self._saves.items() if job not in told]
        heard.loaded += [
            Loaded(
                LoadResult(
                    request, ok=False, failed_chunks=(), reason="the rank process ended", bytes_loaded=0
                )
            )
            for request in self._loads
            if request not in done
        ]
        return heard


def make_rank_processes(settings: Sequence[RankSettings]) -> list[RankProcess]:
    """All ranks of an engine, each in a process of its own."""
    return [RankProcess(each) for each in settings]
