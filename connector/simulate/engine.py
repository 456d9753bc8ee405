"""One simulated engine: a scheduler, its ranks, and requests that are looked up, loaded, computed, stored and aborted."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from appliance.geometry import GroupKind
from appliance.hashing import ChunkHasher, PromptIdentity
from appliance.protocol.messages import LookupResult
from connector.client import (
    LoadItem,
    LoadJob,
    SaveItem,
    SaveJob,
    SaveResult,
    SchedulerClient,
)
from connector.simulate.describe import SAVE_CHUNKS, EngineSettings, engine_facts, group_facts
from connector.simulate.figures import Figures
from connector.simulate.processes import make_rank_processes
from connector.simulate.rank import Loaded, RankSettings, Report, make_ranks
from connector.simulate.requests import Abort, BlockPool, Phase, Running, SaveUnderWay
from connector.simulate.workload import Arrival

BUSY_SECONDS = 0.001
IDLE_SECONDS = 0.02
SETTLE_SECONDS = 30.0
DRAIN_SECONDS = 10.0
MOST_ATTEMPTS = 3
FIELDS_SHOWN = 3


class Rank(Protocol):
    """A rank, in this process or another."""

    def start(self) -> None:
        """Connect, in the background."""

    def stop(self) -> None:
        """Say bye; bounded."""

    def store(self, job: SaveJob) -> None:
        """Compute pages and store them."""

    def load(self, job: LoadJob) -> None:
        """Load pages."""

    def poll(self) -> Report:
        """What is finished."""


class SimulatedEngine:
    """Runs on a thread of its own from :meth:`start` until :meth:`join`; ``figures`` may be read at any time."""

    def __init__(
        self, settings: EngineSettings, arrivals: Iterator[Arrival], stopping: threading.Event
    ) -> None:
        self.settings = settings
        self.figures = Figures()
        self._arrivals = arrivals
        self._stopping = stopping
        self._random = random.Random(settings.seed)  # noqa: S311  # which request is aborted is no secret
        self._pool = BlockPool(settings.blocks)
        self._running: dict[str, Running] = {}
        self._saves: dict[int, SaveUnderWay] = {}
        self._ready: deque[Running] = deque()
        self._next: Arrival | None = None
        self._admitted = 0
        self._job_ids = itertools.count(1)
        self._last_standing = ""
        ranks = [
            RankSettings(
                settings.geometry, rank, settings.blocks, settings.attention_backend, settings.options
            )
            for rank in range(settings.geometry.tensor)
        ]
        self._ranks: Sequence[Rank] = (
            make_rank_processes(ranks) if settings.rank_processes else make_ranks(ranks)
        )
        self._scheduler = SchedulerClient(
            settings.options,
            world_size=settings.geometry.tensor,
            facts=engine_facts(settings.geometry),
            groups=group_facts(settings.geometry),
        )
        self._thread = threading.Thread(target=self._run, name=f"engine-{settings.engine_id}", daemon=True)

    # --- from outside ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect and begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether there are requests left."""
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; ``False`` if it has not come."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def standing(self) -> str:
        """How it stands with the daemon, in a few words."""
        if self._last_standing:
            return self._last_standing
        settled = self._scheduler.settlement
        if settled is None:
            return self._scheduler.health.reason or self._scheduler.health.state.value
        text = f"serving namespace {settled.namespace}"
        for other in settled.others:
            fields = ", ".join(difference.field for difference in other.differences[:FIELDS_SHOWN])
            more = len(other.differences) - FIELDS_SHOWN
            text += f", refused namespace {other.namespace} (differs in {fields}"
            text += f" and {more} more fields)" if more > 0 else ")"
        return text

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        for rank in self._ranks:
            rank.start()
        self._scheduler.start()
        try:
            self._wait_settled()
            self._serve()
        finally:
            self._last_standing = self.standing
            for running in self._running.values():
                self._release(running)
            self._scheduler.stop()
            for rank in self._ranks:
                rank.stop()

    def _wait_settled(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self._scheduler.settlement and time.monotonic() < deadline and not self._stopping.is_set():
            for rank in self._ranks:
                rank.poll()
            time.sleep(IDLE_SECONDS)

    def _serve(self) -> None:
        began = time.monotonic()
        drain_until = math.inf
        while True:
            now = time.monotonic()
            if self._stopping.is_set():
                drain_until = min(drain_until, now + DRAIN_SECONDS)
            admitting = drain_until == math.inf
            more = self._admit((now - began) * self.settings.speed) if admitting else False
            self._step()
            idle = not self._running and not self._saves
            if (idle and not more and (not admitting or self._next is None)) or now >= drain_until:
                return
            # An engine whose next request is far away sleeps until about then.
            self._stopping.wait(IDLE_SECONDS) if idle and admitting else time.sleep(BUSY_SECONDS)

    def _admit(self, now: float) -> bool:
        """Take in what has arrived; whether anything is still to come."""
        settings = self.settings
        while len(self._running) < settings.concurrency:
            if self._next is None:
                if settings.most_requests and self._admitted >= settings.most_requests:
                    return False
                self._next = next(self._arrivals, None)
                self._admitted += 1
            if self._next is None or self._next.at_seconds > now:
                return self._next is not None
            arrival, self._next = self._next, None
            self._begin(arrival)
        return True

    def _begin(self, arrival: Arrival) -> None:
        self.figures.requests += 1
        chunk_tokens = self._scheduler.chunk_tokens
        if chunk_tokens is None:
            self.figures.misses["daemon_away"] += 1
            self.figures.finished += 1
            return
        hasher = ChunkHasher(chunk_tokens, PromptIdentity())
        keys = hasher.keys(arrival.prompt.data)
        running = Running(
            request_id=f"{self.settings.engine_id}/{self.figures.requests}",
            prompt_tokens=len(arrival.prompt),
            chunk_tokens=chunk_tokens,
            keys=keys,
            parents=[hasher.parent(chunk) for chunk in range(len(keys))],
            abort=self._draw_abort(),
        )
        self.figures.asked_tokens += running.prompt_tokens
        self._running[running.request_id] = running
        self._look_up(running)

    def _draw_abort(self) -> Abort:
        if self._random.random() >= self.settings.abort_share:
            return Abort.NEVER
        return self._random.choice((Abort.BEFORE_LOAD, Abort.DURING_LOAD))

    def _step(self) -> None:
        for running in list(self._running.values()):
            if running.phase is Phase.LOOKING_UP:
                self._poll_lookup(running)
            if running.phase is Phase.WAITING_FOR_BLOCKS:
                self._start_load(running)
            if running.phase is Phase.SAVING:
                self._continue_saving(running)
        for rank in self._ranks:
            report = rank.poll()
            for loaded in report.loaded:
                self._rank_loaded(loaded)
            for saved in report.saved:
                self._rank_saved(saved)

    def _end(self, running: Running, *, aborted: bool = False) -> None:
        running.phase = Phase.DONE
        self._release(running)
        del self._running[running.request_id]
        if aborted:
            self.figures.aborted += 1
        else:
            self.figures.finished += 1

    def _release(self, running: Running) -> None:
        if running.lease:
            self._scheduler.release(running.lease)
            running.lease = 0

    # --- lookup and load -------------------------------------------------------------------------------------------

    def _look_up(self, running: Running) -> None:
        running.phase = Phase.LOOKING_UP
        running.began_at = time.monotonic()
        running.attempts += 1
        running.pending = self._scheduler.lookup(
            running.request_id,
            running.keys,
            prompt_tokens=running.prompt_tokens,
            local_tokens=0,
            refused_chunks=sorted(running.refused),
        )

    def _poll_lookup(self, running: Running) -> None:
        assert running.pending is not None, "a lookup would never be answered"
        found = running.pending.poll()
        if found is None:
            return
        running.pending, running.found, running.lease = None, found, found.lease
        if found.settled:
            self.figures.took(self.figures.lookup_seconds, time.monotonic() - running.began_at)
        if found.reason is not None:
            self.figures.misses[found.reason.value] += 1
        elif not found.settled:
            self.figures.misses["no_answer"] += 1
        if running.abort is Abort.BEFORE_LOAD:
            self._end(running, aborted=True)
        elif found.hit_chunks and found.lease:
            running.phase = Phase.WAITING_FOR_BLOCKS
        else:
            self._compute(running, first_chunk=0)

    def _start_load(self, running: Running) -> None:
        found = running.found
        assert found is not None, "a load would not know what to load"
        counts = [self._blocks_of(group.group.kind, found.hit_chunks, running) for group in self._groups]
        blocks = self._pool.take(sum(counts))
        if blocks is None:
            if sum(counts) > self._pool.count:
                self._compute(running, first_chunk=0)  # longer than this engine's own cache
            return
        running.blocks = blocks
        running.phase = Phase.LOADING
        running.began_at = time.monotonic()
        running.ranks_loading = len(self._ranks)
        running.load_reasons = set()
        job = LoadJob(
            running.request_id,
            found.lease,
            found.hit_chunks,
            tuple(running.keys[: found.hit_chunks]),
            tuple(self._load_items(running, found, blocks)),
        )
        self.figures.loads += 1
        for rank in self._ranks:
            rank.load(job)
        if running.abort is Abort.DURING_LOAD and self._random.random() < 0.5:
            self._release(running)  # the ruder half of aborts: the hold ends while the copies run

    @property
    def _groups(self) -> tuple[Any, ...]:
        return self.settings.geometry.groups

    def _blocks_of(self, kind: GroupKind, chunks: int, running: Running) -> int:
        per_chunk = running.chunk_tokens // self.settings.geometry.block_tokens
        return chunks * per_chunk if kind is GroupKind.ATTENTION else 1

    def _load_items(self, running: Running, found: LookupResult, blocks: list[int]) -> Iterator[LoadItem]:
        at = iter(blocks)
        for each in self._groups:
            group = each.group
            if group.kind is GroupKind.ATTENTION:
                per_chunk = group.blocks_per_object(running.chunk_tokens)
                for chunk in range(found.hit_chunks):
                    yield LoadItem(group.index, chunk, tuple(itertools.islice(at, per_chunk)))
            else:
                yield LoadItem(group.index, found.hit_chunks - 1, (next(at),))

    def _rank_loaded(self, loaded: Loaded) -> None:
        running = self._running[loaded.result.request_id]
        self.figures.found_wrong(loaded.wrong)
        self.figures.bytes_loaded += loaded.result.bytes_loaded
        running.refused.update(loaded.result.failed_chunks)
        if not loaded.result.ok:
            running.load_reasons.add(loaded.result.reason)
        running.ranks_loading -= 1
        if running.ranks_loading:
            return
        self.figures.took(self.figures.load_seconds, time.monotonic() - running.began_at)
        self._pool.give_back(running.blocks)
        self._release(running)
        if running.abort is Abort.DURING_LOAD:
            self._end(running, aborted=True)
        elif running.load_reasons:
            self._load_failed(running)
        else:
            assert running.found is not None, "a hit would not be counted"
            self.figures.hit_tokens += running.found.hit_chunks * running.chunk_tokens
            self.figures.pages_compared += self._pages_of(running.found.hit_chunks, running)
            self._compute(running, first_chunk=running.found.hit_chunks)

    def _load_failed(self, running: Running) -> None:
        self.figures.loads_failed += 1
        for reason in running.load_reasons:
            self.figures.load_failures[reason.split(" in chunks")[0].split(": ")[0][:60]] += 1
        if running.refused and running.attempts < MOST_ATTEMPTS:
            self._look_up(running)
        else:
            self._compute(running, first_chunk=0)

    def _pages_of(self, chunks: int, running: Running) -> int:
        per_rank = sum(
            self._blocks_of(each.group.kind, chunks, running) * len(each.layers) for each in self._groups
        )
        return per_rank * len(self._ranks)

    # --- compute and save --------------------------------------------------------------------------------------------

    def _compute(self, running: Running, *, first_chunk: int) -> None:
        """Everything from ``first_chunk`` on is computed: attention of each chunk, states where they are worth it."""
        self._release(running)
        wished = {boundary - 1 for boundary in (running.found.snapshots if running.found else ())}
        wished.add(running.whole_chunks - 1)
        todo = [
            (chunk, each.group.index)
            for chunk in range(first_chunk, running.whole_chunks)
            for each in self._groups
            if each.group.kind is GroupKind.ATTENTION or chunk in wished
        ]
        running.phase = Phase.SAVING
        by_chunks = itertools.groupby(todo, key=lambda place: place[0] // SAVE_CHUNKS)
        running.to_save = deque(list(places) for _, places in by_chunks)

    def _continue_saving(self, running: Running) -> None:
        while running.to_save:
            per_object = [
                self._groups[g].group.blocks_per_object(running.chunk_tokens) for _, g in running.to_save[0]
            ]
            blocks = self._pool.take(sum(per_object))
            if blocks is None:
                if sum(per_object) > self._pool.count:
                    running.to_save.popleft()
                    continue
                return
            self._save(running, running.to_save.popleft(), per_object, blocks)
        if not running.jobs:
            self._end(running)

    def _save(
        self, running: Running, places: list[tuple[int, int]], per_object: list[int], blocks: list[int]
    ) -> None:
        at = iter(blocks)
        items = tuple(
            SaveItem(
                group, chunk, running.keys[chunk], running.parents[chunk], tuple(itertools.islice(at, count))
            )
            for (chunk, group), count in zip(places, per_object, strict=True)
        )
        job = SaveJob(next(self._job_ids), items)
        self._saves[job.job_id] = SaveUnderWay(running, items, blocks, len(self._ranks))
        running.jobs += 1
        for rank in self._ranks:
            rank.store(job)

    def _rank_saved(self, saved: SaveResult) -> None:
        self.figures.objects_stored += saved.stored
        self.figures.objects_skipped += saved.skipped
        self.figures.objects_refused += saved.failed
        self.figures.bytes_stored += saved.bytes_stored
        under_way = self._saves[saved.job_id]
        under_way.ranks_left -= 1
        if not under_way.ranks_left:
            del self._saves[saved.job_id]
            self._pool.give_back(under_way.blocks)
            under_way.running.jobs -= 1
