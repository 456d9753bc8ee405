"""A small engine for tests: real clients, real copies, pages in numpy buffers instead of a model's tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from appliance.geometry import GroupKind, ObjectGroup
from appliance.hashing import ChunkHasher, PromptIdentity
from appliance.protocol.messages import GroupFacts, LookupResult, WorkerGroup
from connector.client import (
    ClientOptions,
    ClientState,
    LoadItem,
    LoadJob,
    LoadResult,
    SaveItem,
    SaveJob,
    SaveResult,
    SchedulerClient,
    WorkerClient,
)
from kernels import CHECKSUM_ALGORITHM, STREAM_LAYOUT, Backend, GroupPages, PageMap, reference_backend
from tests.support.waiting import eventually

BLOCK_TOKENS = 16
BLOCKS = 64


@dataclass(frozen=True)
class Shape:
    """The cache groups of a test engine; `page_bytes` per block and layer, two layers a group."""

    groups: tuple[ObjectGroup, ...]
    page_bytes: tuple[int, ...]


HYBRID = Shape(
    groups=(
        ObjectGroup(0, "mla", GroupKind.ATTENTION, BLOCK_TOKENS, shards=1, replicas=1),
        ObjectGroup(1, "kda", GroupKind.RECURRENT, BLOCK_TOKENS, shards=1, replicas=1),
    ),
    page_bytes=(1024, 3000),
)


def sharded(world_size: int) -> Shape:
    """A hybrid over `world_size` ranks: attention replicated, state sharded."""
    return Shape(
        groups=(
            ObjectGroup(0, "mla", GroupKind.ATTENTION, BLOCK_TOKENS, shards=1, replicas=world_size),
            ObjectGroup(1, "kda", GroupKind.RECURRENT, BLOCK_TOKENS, shards=world_size, replicas=1),
        ),
        page_bytes=(1024, 3000),
    )


def facts(**changes: Any) -> dict[str, Any]:
    """A complete engine-wide fingerprint; `changes` by section, e.g. `cache={"dtype": "fp8"}`."""
    base: dict[str, Any] = {
        "model": {
            "name": "tests/tiny",
            "architecture": "Tiny",
            "weights": "w1",
            "dtype": "bfloat16",
            "config": {"layers": 2},
        },
        "cache": {"dtype": "auto", "layout": "NHD"},
        "engine": {"name": "tests", "version": "1", "platform": "cpu"},
        "parallel": {"tensor": 1, "pipeline": 1, "decode_context": 1},
        "draft": "none",
        "pages": {"layout": STREAM_LAYOUT, "checksum": CHECKSUM_ALGORITHM},
    }
    for section, values in changes.items():
        base[section] = {**base[section], **values} if isinstance(values, dict) else values
    return base


class Rank:
    """One worker: its buffers and its client."""

    def __init__(
        self, port: int, engine_id: str, shape: Shape, rank: int, world_size: int, **options: Any
    ) -> None:
        backend: Backend = options.pop("backend", None) or reference_backend()
        segments = options.pop("segments", None)
        address_of = options.pop("address_of", lambda layer: int(layer.ctypes.data))
        layer_facts: dict[str, Any] = options.pop("layer_facts", {})
        self.shape = shape
        self.rank = rank
        self.buffers = [
            [np.zeros((BLOCKS, size), dtype=np.uint8) for _ in range(2)] for size in shape.page_bytes
        ]
        pages = {
            group.index: GroupPages(
                tuple(
                    PageMap(address_of(layer), 1, size, ((0, size),), BLOCKS)
                    for layer in self.buffers[group.index]
                )
            )
            for group, size in zip(shape.groups, shape.page_bytes, strict=True)
        }
        self.client = WorkerClient(
            ClientOptions(port=port, engine_id=engine_id, **options),
            rank=rank,
            world_size=world_size,
            groups=[self._place(group) for group in shape.groups],
            layers={
                f"layer.{group.index}.{layer}": {
                    "backend": "TEST",
                    "kernel_block_tokens": BLOCK_TOKENS,
                    "dtype": "uint8",
                    "shape": [BLOCK_TOKENS, size],
                    "strides": [size, 1],
                    "page_bytes": size,
                    **layer_facts,
                }
                for group, size in zip(shape.groups, shape.page_bytes, strict=True)
                for layer in range(2)
            },
            pages=pages,
            replicas=[group.replicas for group in shape.groups],
            backend=backend,
            segments=segments,
        )
        self.saved: dict[int, SaveResult] = {}
        self.loaded: dict[str, LoadResult] = {}

    def _place(self, group: ObjectGroup) -> WorkerGroup:
        shard = self.rank if group.shards > 1 else 0
        replica = self.rank if group.replicas > 1 else 0
        return WorkerGroup(index=group.index, shard=shard, replica=replica)

    def fill(self, group: int, block: int, seed: int) -> None:
        """Give a block's pages content that depends on the seed and the rank's shard."""
        shard = self.rank if self.shape.groups[group].shards > 1 else 0
        for number, layer in enumerate(self.buffers[group]):
            layer[block] = np.random.default_rng((seed, shard, group, number)).integers(
                0, 256, layer.shape[1], dtype=np.uint8
            )

    def content(self, group: int, block: int) -> bytes:
        """A block's pages."""
        return b"".join(layer[block].tobytes() for layer in self.buffers[group])

    def poll(self) -> None:
        """Collect results."""
        self.saved.update({result.job_id: result for result in self.client.finished_saves()})
        for result in self.client.finished_loads():
            assert result.request_id not in self.loaded, "a load was reported twice"
            self.loaded[result.request_id] = result


@dataclass
class Engine:
    """A scheduler and its ranks in this process."""

    port: int
    engine_id: str = "engine-a"
    shape: Shape = HYBRID
    world_size: int = 1
    facts: dict[str, Any] = field(default_factory=facts)
    rank_options: dict[str, Any] = field(default_factory=dict)
    require_namespace: str = ""
    lookup_timeout_seconds: float = 5.0
    ranks: list[Rank] = field(init=False)
    scheduler: SchedulerClient = field(init=False)
    _next_job: int = 1

    def __post_init__(self) -> None:
        self.ranks = [
            Rank(self.port, self.engine_id, self.shape, rank, self.world_size, **self.rank_options)
            for rank in range(self.world_size)
        ]
        groups = [
            GroupFacts(
                index=group.index,
                name=group.name,
                kind=group.kind,
                block_tokens=group.block_tokens,
                shards=group.shards,
                replicas=group.replicas,
                facts={"page_bytes": size, "spec": f"{group.kind}:{size}"},
            )
            for group, size in zip(self.shape.groups, self.shape.page_bytes, strict=True)
        ]
        self.scheduler = SchedulerClient(
            ClientOptions(
                port=self.port, engine_id=self.engine_id, lookup_timeout_seconds=self.lookup_timeout_seconds
            ),
            world_size=self.world_size,
            facts=self.facts,
            groups=groups,
            require_namespace=self.require_namespace,
        )

    def start(self, *, settled: bool = True) -> Engine:
        """Connect; with `settled`, wait for the namespace."""
        for rank in self.ranks:
            rank.client.start()
        self.scheduler.start()
        if settled:
            self.wait_settled()
        return self

    def wait_settled(self) -> None:
        """Wait for the namespace, and until every rank that runs here has heard of it: before that it stores nothing."""
        eventually(lambda: self.scheduler.chunk_tokens, f"{self.engine_id} settled: {self.scheduler.health}")
        for rank in self.ranks:
            if rank.client.health.state is ClientState.IDLE:
                continue
            eventually(lambda: rank.client.link.usable, f"{self.engine_id} settled: {rank.client.health}")  # noqa: B023

    def stop(self) -> None:
        """Say bye."""
        self.scheduler.stop()
        for rank in self.ranks:
            rank.client.stop()

    @property
    def chunk_tokens(self) -> int:
        """The negotiated chunk size."""
        chunk_tokens = self.scheduler.chunk_tokens
        assert chunk_tokens is not None
        return chunk_tokens

    def keys(self, tokens: list[int], salt: str = "") -> tuple[list[bytes], list[bytes]]:
        """Keys of a prompt's whole chunks, and their parents."""
        hasher = ChunkHasher(self.chunk_tokens, PromptIdentity(salt=salt))
        keys = hasher.keys(tokens)
        return keys, [hasher.parent(chunk) for chunk in range(len(keys))]

    def lookup(
        self, request: str, tokens: list[int], *, local_tokens: int = 0, salt: str = ""
    ) -> LookupResult:
        """Ask, and wait for the answer."""
        keys, _ = self.keys(tokens, salt)
        pending = self.scheduler.lookup(request, keys, prompt_tokens=len(tokens), local_tokens=local_tokens)
        found: list[LookupResult] = []

        def answered() -> bool:
            result = pending.poll()
            if result is not None:
                found.append(result)
            return result is not None

        eventually(answered, "a lookup's answer")
        return found[0]

    def save_items(
        self, tokens: list[int], seed: int, states: list[int] | None = None, salt: str = ""
    ) -> tuple[SaveItem, ...]:
        """Fill blocks for a prompt's chunks and give the items to store: attention all, states at `states`."""
        keys, parents = self.keys(tokens, salt)
        per_chunk = self.chunk_tokens // BLOCK_TOKENS
        wanted_states = [len(keys) - 1] if states is None else states
        items = []
        for chunk, (key, parent) in enumerate(zip(keys, parents, strict=True)):
            blocks = tuple(range(chunk * per_chunk, (chunk + 1) * per_chunk))
            for rank in self.ranks:
                for block in blocks:
                    rank.fill(0, block, seed * 1000 + block)
                if chunk in wanted_states:
                    rank.fill(1, chunk, seed * 1000 + chunk)
            items.append(SaveItem(0, chunk, key, parent, blocks))
            if chunk in wanted_states:
                items.append(SaveItem(1, chunk, key, parent, (chunk,)))
        return tuple(items)

    def save(
        self, tokens: list[int], seed: int, states: list[int] | None = None, salt: str = ""
    ) -> list[SaveResult]:
        """Store a prompt on every rank and wait for the results."""
        job = SaveJob(self._next_job, self.save_items(tokens, seed, states, salt))
        self._next_job += 1
        for rank in self.ranks:
            rank.client.save(job)
        self._collect(lambda rank: job.job_id in rank.saved, "a save's result")
        return [rank.saved[job.job_id] for rank in self.ranks]

    def load_job(self, request: str, tokens: list[int], found: LookupResult, salt: str = "") -> LoadJob:
        """Load everything of a hit into other blocks: block b comes to BLOCKS // 2 + b."""
        keys, _ = self.keys(tokens, salt)
        per_chunk = self.chunk_tokens // BLOCK_TOKENS
        shift = BLOCKS // 2
        items = [
            LoadItem(0, chunk, tuple(range(shift + chunk * per_chunk, shift + (chunk + 1) * per_chunk)))
            for chunk in range(found.hit_chunks)
        ]
        items.append(LoadItem(1, found.hit_chunks - 1, (shift + found.hit_chunks - 1,)))
        return LoadJob(request, found.lease, found.hit_chunks, tuple(keys[: found.hit_chunks]), tuple(items))

    def load(self, request: str, tokens: list[int], found: LookupResult, salt: str = "") -> list[LoadResult]:
        """Load a hit on every rank and wait for the results."""
        job = self.load_job(request, tokens, found, salt)
        for rank in self.ranks:
            rank.client.load(job)
        self._collect(lambda rank: request in rank.loaded, "a load's result")
        return [rank.loaded[request] for rank in self.ranks]

    def _collect(self, done: Any, what: str) -> None:
        def all_done() -> bool:
            for rank in self.ranks:
                rank.poll()
            return all(done(rank) for rank in self.ranks)

        eventually(all_done, what)

    def check_loaded(self, hit_chunks: int, seed: int) -> None:
        """The bytes that a load of a prompt stored with `seed` must have brought."""
        per_chunk = self.chunk_tokens // BLOCK_TOKENS
        for rank in self.ranks:
            expected = Rank.__new__(Rank)
            expected.shape, expected.rank = rank.shape, rank.rank
            expected.buffers = [
                [np.zeros((BLOCKS, size), dtype=np.uint8) for _ in range(2)] for size in rank.shape.page_bytes
            ]
            for block in range(hit_chunks * per_chunk):
                expected.fill(0, block, seed * 1000 + block)
                assert rank.content(0, BLOCKS // 2 + block) == expected.content(0, block), (
                    f"block {block} is wrong"
                )
            state = hit_chunks - 1
            expected.fill(1, state, seed * 1000 + state)
            assert rank.content(1, BLOCKS // 2 + state) == expected.content(1, state), "the state is wrong"
