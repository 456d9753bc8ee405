"""An engine without a model: vLLM's scheduler, the connector's two halves, and ranks that write what a model would.

A rank's pages are stamped with digests of the tokens they stand for. Before a step computes on a prefix, the stamps of
everything that the prefix needs are compared, whether it was computed here, found in vLLM's own cache or loaded.
"""

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from appliance.geometry import GroupKind, ObjectGroup
from connector.vllm import PagewardenConnector
from connector.vllm.groups import RankPlace
from connector.vllm.requests import Phase
from tests.e2e.scheduler.geometry import Geometry, connector_config, plain_config

PAGE_BYTES = 64
RUN_SECONDS = 40.0
SETTLE_SECONDS = 20.0


def sampled_after(tokens: int) -> int:
    """The token that the stand-in model gives after so many tokens."""
    return tokens % 1000


class Rank:
    """One worker: the connector's worker half over pages of 64 bytes, all cache groups overlaid as vLLM has them.

    While it is `silent` it copies and reports nothing, as a slow one does.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, place: RankPlace) -> None:
        self.kv_cache_config = kv_cache_config
        self.place = place
        widest = max(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
        self.pages = torch.zeros((kv_cache_config.num_blocks, widest, PAGE_BYTES), dtype=torch.uint8)
        self.bytes = self.pages.numpy()
        self.connector = PagewardenConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        caches = {
            name: self.pages[:, number]
            for group in kv_cache_config.kv_cache_groups
            for number, name in enumerate(group.layer_names)
        }
        with patch("connector.vllm.connector.place_of_this_worker", lambda: place):
            self.connector.register_kv_caches(caches)
        self.shards = self._shards()
        self.silent = False

    def _shards(self) -> dict[int, int]:
        """The shard of each group of which this rank holds layers."""
        side = self.connector._worker
        assert side is not None
        held = side._client._attach["groups"]
        names = [group.layer_names for group in self.kv_cache_config.kv_cache_groups]
        return {entry["index"]: entry["shard"] for entry in held if names[entry["index"]]}

    def stamp(self, group: int, prefix: bytes) -> np.ndarray[Any, Any]:
        """What this rank's pages of a group hold for a prefix: `[layers, bytes]`, different for every shard."""
        digest = hashlib.blake2b(
            prefix, digest_size=PAGE_BYTES, salt=bytes([group, self.shards[group]])
        ).digest()
        layers = len(self.kv_cache_config.kv_cache_groups[group].layer_names)
        numbers = np.arange(layers, dtype=np.uint8)[:, None]
        return np.frombuffer(digest, dtype=np.uint8)[None, :] ^ numbers

    def write(self, group: int, block: int, prefix: bytes) -> None:
        """Write a block as the model would."""
        if group in self.shards:
            stamp = self.stamp(group, prefix)
            self.bytes[block, : len(stamp)] = stamp

    def check(self, group: int, block: int, prefix: bytes, where: str) -> None:
        """The block holds what the model would have written."""
        if group in self.shards:
            stamp = self.stamp(group, prefix)
            assert block, f"{where}: group {group} has the null block"
            assert np.array_equal(self.bytes[block, : len(stamp)], stamp), (
                f"{where}: wrong bytes in group {group}, block {block} of rank {self.place}"
            )

    def step(self, output: Any, forward: Callable[[], None]) -> ModelRunnerOutput:
        """The connector's calls around one forward pass, in vLLM's order for asynchronous loads."""
        connector = self.connector
        connector.bind_connector_metadata(output.kv_connector_metadata)
        forward()
        connector.start_load_kv(None)
        connector.wait_for_save()
        told = KVConnectorOutput()
        if not self.silent:
            results = connector.get_transfer_results(output.finished_req_ids)
            told.finished_recving = results.finished_recving
            told.failed_recving = results.failed_recving
            told.kv_connector_stats = connector.get_kv_connector_stats()
            told.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=told)


class Engine:
    """A scheduler and its ranks.

    `saved` and `hits` record what the connector ordered, by request id, `figures` what it told vLLM.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        directory: Path,
        transfer: dict[str, Any],
        geometry: Geometry,
        *,
        blocks: int = 400,
        **settings: Any,
    ) -> None:
        self.geometry = geometry
        name = f"{geometry.name}-{next(self._numbers)}"
        self.config = plain_config(directory, geometry, **settings)
        self.config.kv_transfer_config = connector_config(name, transfer)
        self.config.cache_config.num_gpu_blocks_override = blocks
        stages = [geometry.stage_layers(stage) for stage in range(geometry.pipeline)]
        specs = [stages[rank // geometry.tensor] for rank in range(geometry.tensor * geometry.pipeline)]
        configs = get_kv_cache_configs(self.config, specs, [1 << 50] * len(specs))
        whole = generate_scheduler_kv_cache_config(configs)
        self.config.cache_config.num_gpu_blocks = whole.num_blocks
        self.block_size, hash_size = resolve_kv_cache_block_sizes(whole, self.config)
        alignment = resolve_cache_hit_alignment_tokens(whole, self.config, self.block_size, hash_size)
        for each in (*configs, whole):
            each.hash_block_size, each.cache_hit_alignment_tokens = hash_size, alignment
        self.ranks = [Rank(self.config, each, self._place(number)) for number, each in enumerate(configs)]
        scheduler_class = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler: Scheduler = scheduler_class(
            self.config,
            whole,
            StructuredOutputManager(self.config),
            self.block_size,
            hash_size,
            log_stats=True,
        )
        self.connector: PagewardenConnector = self.scheduler.connector
        self._side = self.connector._side
        self.groups: tuple[ObjectGroup, ...] = self._side._groups
        self._aggregator = KVOutputAggregator.from_connector(self.connector, len(self.ranks))
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_size, hash_function)
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self._pool.get_num_free_blocks()
        self._seen: dict[str, int] = {}
        self.saved: dict[str, set[tuple[int, int]]] = {}
        self.hits: dict[str, int] = {}
        self.chunk_ends: dict[str, list[int]] = {}
        self._under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.preempted: list[str] = []
        self.figures: list[dict[str, int]] = []
        self._keys: dict[bytes, str] = {}

    def _place(self, rank: int) -> RankPlace:
        tensor = rank % self.geometry.tensor
        return RankPlace(tensor, rank // self.geometry.tensor, tensor % self.geometry.decode_context)

    # --- requests -----------------------------------------------------------------------------------------------

    def add(self, name: str, prompt: Iterable[int], *, max_tokens: int = 2, **request: Any) -> Request:
        """Queue a request."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=None)
        added = Request(name, list(prompt), sampling, None, block_hasher=self._hasher, **request)
        self.scheduler.add_request(added)
        return added

    def abort(self, name: str) -> None:
        """End a request as a client that went away would."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def forget_local_cache(self) -> None:
        """Empty vLLM's own prefix cache, as in an engine that was started anew."""
        assert self.scheduler.reset_prefix_cache(), "a block is still held"
        self._seen.clear()

    # --- steps --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until the daemon serves this engine, as the first request would."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._side._client.chunk_tokens is None:
            assert time.monotonic() < deadline, f"not settled: {self._side._client.health}"
            time.sleep(0.01)

    def run(self) -> None:
        """Step until nothing is left to do, saves included."""
        deadline = time.monotonic() + RUN_SECONDS
        while self.scheduler.has_requests() or self._under_way:
            if self.scheduler.has_requests():
                self.step()
            else:
                self._take_in(*self._under_way.popleft())
            assert time.monotonic() < deadline, f"still busy: {self.describe()}"

    def step(self) -> None:
        """One step of vLLM's engine loop."""
        output = self.scheduler.schedule()
        self.preempted += output.preempted_req_ids or ()
        for name in output.preempted_req_ids or ():
            self._seen.pop(name, None)
        orders = output.kv_connector_metadata.orders
        for job in orders.loads:
            self.hits[job.request_id] = job.hit_chunks * self.geometry.chunk_tokens
        self._record_saves(orders.saves)
        work = [self._work(name, count) for name, count in output.num_scheduled_tokens.items()]
        outputs = [rank.step(output, lambda rank=rank: self._forward(rank, work)) for rank in self.ranks]
        result = self._aggregator.aggregate(outputs)
        assert result is not None
        for number, (name, _, _, end, _) in enumerate(work):
            result.req_ids.append(name)
            result.req_id_to_index[name] = number
            request = self.scheduler.requests[name]
            result.sampled_token_ids.append([] if request.is_prefill_chunk else [sampled_after(end)])
        if not output.total_num_scheduled_tokens:
            time.sleep(0.001)  # as vLLM's engine loop does
        self._under_way.append((output, result))
        # With asynchronous scheduling the results of a step are taken in when the next has been scheduled.
        if len(self._under_way) > self.config.scheduler_config.async_scheduling:
            self._take_in(*self._under_way.popleft())

    def _take_in(self, output: Any, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.figures.append(outputs.scheduler_stats.kv_connector_stats)

    def _record_saves(self, orders: Iterable[Any]) -> None:
        for order in orders:
            for item in order.items:
                for tracked in self._side._requests.values():
                    if tracked.hasher is not None and item.key in tracked.hasher._keys:
                        self._keys[item.key] = tracked.request_id
                name = self._keys.get(item.key, "?")
                self.saved.setdefault(name, set()).add((item.group, item.chunk))

    def _work(self, name: str, count: int) -> tuple[str, int, list[int], int, tuple[list[int], ...]]:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        self.chunk_ends.setdefault(name, []).append(end)
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        known = list(request.all_token_ids)
        # Of a token that was sampled in a step whose results are not taken in yet only the rank knows.
        known += [sampled_after(place) for place in range(len(known), end)]
        return name, end - count, known, end, tables

    def _forward(
        self, rank: Rank, work: list[tuple[str, int, list[int], int, tuple[list[int], ...]]]
    ) -> None:
        for name, start, tokens, end, tables in work:
            array = np.asarray(tokens, dtype=np.uint32)
            for group in self.groups:
                self._check_group(rank, group, name, start, array, tables[group.index])
            for group in self.groups:
                self._write_group(rank, group, start, end, array, tables[group.index])
        if rank is self.ranks[-1]:
            self._seen.update({name: end for name, _, _, end, _ in work})

    def _check_group(
        self, rank: Rank, group: ObjectGroup, name: str, start: int, tokens: Any, table: list[int]
    ) -> None:
        """Everything that computing from `start` on reads."""
        unit, where = group.unit_tokens, f"{name} at {start}"
        if not start:
            return
        if group.kind is GroupKind.RECURRENT:
            rank.check(group.index, table[(start - 1) // unit], tokens[:start].tobytes(), where)
            return
        first = 0
        if group.kind is GroupKind.SLIDING:
            first = max(0, start - group.window_tokens + 1) // unit
        elif self._seen.get(name) == start:
            first = start // unit  # checked by an earlier step
        for block in range(first, start // unit):
            rank.check(group.index, table[block], tokens[: (block + 1) * unit].tobytes(), where)

    def _write_group(
        self, rank: Rank, group: ObjectGroup, start: int, end: int, tokens: Any, table: list[int]
    ) -> None:
        unit = group.unit_tokens
        if group.kind is GroupKind.RECURRENT:
            rank.write(group.index, table[(end - 1) // unit], tokens[:end].tobytes())
            return
        for block in range(start // unit, end // unit):
            rank.write(group.index, table[block], tokens[: (block + 1) * unit].tobytes())

    # --- what is held -------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """What the connector and the pool hold now."""
        ledger = self._side._ledger
        phases = {name: tracked.phase.name for name, tracked in self._side._requests.items()}
        return (
            f"requests {phases}, saves {len(ledger._saves)}, pinned {ledger._pinned}, leases "
            f"{self._side._client._held}, free blocks {self._pool.get_num_free_blocks()} of {self.free_at_start}"
        )

    def assert_nothing_held(self) -> None:
        """No request, lease, pin or block is held once the engine is idle."""
        ledger = self._side._ledger
        clean = not (
            self._side._requests
            or self._side._client._held
            or self._side._loads
            or ledger._saves
            or ledger._pinned
        )
        assert clean, self.describe()
        assert self._pool.get_num_free_blocks() == self.free_at_start, self.describe()
        assert self._side.counters.unexpected_events == 0

    def phase_of(self, name: str) -> Phase | None:
        """Where the connector has a request, None if it does not know it."""
        tracked = self._side._requests.get(name)
        return tracked.phase if tracked is not None else None

    def states_of(self, name: str) -> set[int]:
        """The boundaries, in tokens, whose states a request handed to saves, the same in every recurrent group."""
        by_group = {
            group.index: {
                (chunk + 1) * self.geometry.chunk_tokens
                for each, chunk in self.saved.get(name, ())
                if each == group.index
            }
            for group in self.groups
            if group.kind is GroupKind.RECURRENT
        }
        boundaries = list(by_group.values())
        assert all(each == boundaries[0] for each in boundaries), by_group
        return boundaries[0]

    def stop(self) -> None:
        """Say bye, the ranks first."""
        for rank in self.ranks:
            rank.connector.shutdown()
        self.connector.shutdown()
        self.scheduler.shutdown()
