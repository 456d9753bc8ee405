"""The class that vLLM loads. It only chooses a side and passes calls on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connector.client import ClientOptions, SchedulerClient, WorkerClient
from connector.client.device import copies_for
from connector.vllm.facts import engine_facts, group_facts
from connector.vllm.groups import Ranks, object_groups, place_of_this_worker, worker_groups
from connector.vllm.metadata import StepMetadata, WorkerReport
from connector.vllm.options import ConnectorOptions
from connector.vllm.pages import group_pages, layer_facts
from connector.vllm.scheduler import SchedulerSide
from connector.vllm.stats import FigureMetrics, Figures
from connector.vllm.support import check_supported
from connector.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from connector.vllm.orders import StepOrders

logger = logging.getLogger("vllm.pagewarden")


class PagewardenConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads computed prompt prefixes from the appliance and stores new ones there, without making vLLM wait."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config)
        self._options = ConnectorOptions.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._ranks = Ranks.of(vllm_config)
        self._groups = object_groups(kv_cache_config, self._ranks)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler()

    def _client_options(self) -> ClientOptions:
        return ClientOptions(
            host=self._options.host,
            port=self._options.port,
            engine_id=str(self._kv_transfer_config.engine_id),
            arena_dir=self._options.arena_dir,
            transport=self._options.transport,
            lookup_timeout_seconds=self._options.lookup_timeout_seconds,
            load_timeout_seconds=self._options.load_timeout_seconds,
            save_timeout_seconds=self._options.save_timeout_seconds,
        )

    def _make_scheduler(self) -> SchedulerSide:
        config = self._vllm_config
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            # vLLM reads the policy once, right after this constructor.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            logger.info(
                "Pagewarden set kv_load_failure_policy to 'recompute': a failed load is computed again"
            )
        client = SchedulerClient(
            self._client_options(),
            world_size=self._ranks.world,
            facts=engine_facts(config, self._kv_cache_config, self._options),
            groups=group_facts(self._kv_cache_config, self._groups),
            require_namespace=self._options.require_namespace,
            max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        )
        client.start()
        return SchedulerSide(client, self._groups, self._options, self._ranks.world)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:  # noqa: ARG003
        """On a GPU, all layers of a block side by side, so that a chunk's pages are few and long pieces."""
        return "BLHNC" if current_platform.is_cuda_alike() else None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache that loses a save costs a later miss, nothing else."""
        return False

    # --- worker ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe this worker's pages to the daemon and map the arena."""
        place = place_of_this_worker()
        copies = copies_for(cache.device for cache in kv_caches.values())
        held = worker_groups(self._kv_cache_config, self._ranks, place)
        client = WorkerClient(
            self._client_options(),
            rank=place.pipeline * self._ranks.tensor + place.tensor,
            world_size=self._ranks.world,
            groups=held,
            layers=layer_facts(self._vllm_config, self._kv_cache_config, kv_caches, place.pipeline),
            pages=group_pages(self._kv_cache_config, kv_caches),
            replicas=[group.replicas for group in self._groups],
            backend=copies.backend,
            segments=copies,
        )
        client.start()
        self._worker = WorkerSide(client, copies.mark, [group.index for group in held if group.held])

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata), "another connector's orders would be ignored here"
        return metadata.orders

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin this step's loads; they end between steps."""
        if self._worker is not None:
            self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no request runs before its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to do per layer: a step's saves begin when it has run."""

    def wait_for_save(self) -> None:
        """Begin this step's saves; their blocks stay pinned until they are reported, so nothing waits here."""
        if self._worker is not None:
            self._worker.start_saves(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Loads that ended, each once, failed or not."""
        if self._worker is None:
            return KVConnectorTransferResults()
        finished, failed = self._worker.finished_loads()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Saves that ended, for the scheduler's half."""
        report = self._worker.take_report() if self._worker is not None else None
        return WorkerReport(report) if report is not None else None

    # --- scheduler ------------------------------------------------------------------------------------------------

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM calls scheduler methods on the scheduler's connector only"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool whose blocks saves pin."""
        self._side.bind_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the local hit; (None, False) while the daemon has not answered."""
        return self._side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Begin the promised load with the next step, or give its lease back."""
        self._side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """What the workers load and save in this step."""
        return StepMetadata(self._side.step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers finished."""
        envelope = connector_output.kv_connector_worker_meta
        report = envelope.report if isinstance(envelope, WorkerReport) else None
        self._side.worker_news(
            report, connector_output.finished_recving or (), connector_output.failed_recving or ()
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for a model with one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save what is left. Pins keep the blocks, so vLLM may free its own hold at once."""
        self._side.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must keep stepping so that saves are reported."""
        return self._scheduler is not None and self._scheduler.saves_pending

    def has_pending_block_frees(self) -> bool:
        """Whether waiting gives blocks back, so that nobody need be preempted for them."""
        return self._scheduler is not None and self._scheduler.saves_pending

    def reset_cache(self) -> bool:
        """Stop sharing what was stored before; see `SchedulerSide.forget_stored`."""
        self._side.forget_stored()
        logger.warning("Pagewarden: the engine's cache was reset; from now on it shares with no other engine")
        return True

    # --- figures --------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Figures | None:
        """What this half has counted since the last call."""
        side = self._worker or self._scheduler
        counted = side.tally.take() if side is not None else {}
        return Figures(counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Figures:
        """Figures as they travelled between processes."""
        return Figures(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FigureMetrics:
        """Counters of the figures on vLLM's own metrics page."""
        return FigureMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End both halves, whichever this is; bounded."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.stop()
            self._scheduler = None
