"""One simulated rank: pages in plain memory, the real worker client and copy engine, and every loaded byte compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from appliance.protocol.messages import WorkerGroup
from appliance.served_models import CacheGroup, Geometry
from connector.client import (
    ClientOptions,
    ClientState,
    LoadItem,
    LoadJob,
    LoadResult,
    SaveItem,
    SaveJob,
    SaveResult,
    WorkerClient,
)
from connector.simulate.content import WORD_BYTES, Content, Words
from connector.simulate.describe import layer_facts
from kernels import GroupPages, PageMap

WRONG_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What makes a rank; plain values, so that it can be made in another process."""

    geometry: Geometry
    rank: int
    blocks: int
    attention_backend: str
    options: ClientOptions


@dataclass(slots=True)
class Loaded:
    """A load's report and what its pages held that they should not; ``wrong`` is empty where every byte is right."""

    result: LoadResult
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What a rank finished since it was last asked."""

    joined: bool = False
    saved: list[SaveResult] = field(default_factory=list)
    loaded: list[Loaded] = field(default_factory=list)


class SimulatedRank:
    """A rank in this process. Its tensors are shared by the cache groups, as vLLM's are: a block belongs to one of them."""

    def __init__(self, settings: RankSettings) -> None:
        geometry = settings.geometry
        self._geometry = geometry
        self._rank = settings.rank
        self._content = Content(geometry.page_bytes)
        words = geometry.page_bytes // WORD_BYTES
        self._tensors = [np.zeros((settings.blocks, words), dtype=np.uint64) for _ in range(geometry.tensors)]
        self._loading: dict[str, LoadJob] = {}
        self._client = WorkerClient(
            settings.options,
            rank=settings.rank,
            world_size=geometry.tensor,
            groups=[self._worker_group(each) for each in geometry.groups],
            layers=layer_facts(geometry, settings.attention_backend),
            pages={each.group.index: self._pages(each, settings.blocks) for each in geometry.groups},
            replicas=[each.group.replicas for each in geometry.groups],
        )

    def _worker_group(self, group: CacheGroup) -> WorkerGroup:
        shard, replica = group.place(self._rank)
        return WorkerGroup(index=group.group.index, shard=shard, replica=replica)

    def _pages(self, group: CacheGroup, blocks: int) -> GroupPages:
        return GroupPages(
            tuple(
                PageMap(
                    int(self._tensors[number].ctypes.data),
                    1,
                    self._geometry.page_bytes,
                    ((0, group.run_bytes),),
                    blocks,
                )
                for number in range(len(group.layers))
            )
        )

    # --- what an engine asks of a rank ---------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, in the background."""
        self._client.start()

    def stop(self) -> None:
        """Say bye; bounded."""
        self._client.stop()

    def store(self, job: SaveJob) -> None:
        """Compute the job's pages and store them."""
        for item in job.items:
            for page, seed in self._pages_of(item, item.key):
                self._content.fill(page, seed)
        self._client.save(job)

    def load(self, job: LoadJob) -> None:
        """Load a job's pages over bytes that are surely wrong."""
        for item in job.items:
            for page, _ in self._pages_of(item, job.keys[item.chunk]):
                self._content.poison(page)
        self._loading[job.request_id] = job
        self._client.load(job)

    def poll(self) -> Report:
        """What is finished, every page of a good load compared."""
        report = Report(joined=self._client.health.state is ClientState.JOINED)
        report.saved = self._client.finished_saves()
        for result in self._client.finished_loads():
            job = self._loading.pop(result.request_id)
            report.loaded.append(Loaded(result, self._compare(job) if result.ok else []))
        return report

    def _compare(self, job: LoadJob) -> list[str]:
        wrong: list[str] = []
        for item in job.items:
            group = self._geometry.groups[item.group]
            for number, (page, seed) in enumerate(self._pages_of(item, job.keys[item.chunk])):
                at = self._content.first_difference(page, seed)
                if at >= 0 and len(wrong) < WRONG_SHOWN:
                    layer, block = divmod(number, len(item.block_ids))
                    wrong.append(
                        f"request {job.request_id}, rank {self._rank}, chunk {item.chunk} "
                        f"({job.keys[item.chunk].hex()[:16]}), group {group.group.name}, layer {group.layers[layer]}, "
                        f"block {item.block_ids[block]}: wrong from byte {at} of {page.nbytes}"
                    )
        return wrong

    def _pages_of(self, item: SaveItem | LoadItem, key: bytes) -> Iterator[tuple[Words, np.uint64]]:
        """The pages of an item, layer by layer, and what each must hold."""
        group = self._geometry.groups[item.group]
        shard, _ = group.place(self._rank)
        words = group.run_bytes // WORD_BYTES
        for layer in range(len(group.layers)):
            for position, block in enumerate(item.block_ids):
                seed = self._content.seed(key, item.group, shard, layer, position)
                yield self._tensors[layer][block, :words], seed


def make_ranks(settings: Sequence[RankSettings]) -> list[SimulatedRank]:
    """All ranks of an engine, in this process."""
    return [SimulatedRank(each) for each in settings]
