"""vLLM's KV cache groups as the appliance's object groups: kind, window, shards and replicas over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedGeometry
from appliance.geometry import GroupKind, ObjectGroup, check_groups
from appliance.protocol.messages import WorkerGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_KINDS = {
    "full_attention": GroupKind.ATTENTION,
    "mla_attention": GroupKind.ATTENTION,
    "sink_full_attention": GroupKind.ATTENTION,
    "sliding_window": GroupKind.SLIDING,
    "sliding_window_mla": GroupKind.SLIDING,
    "mamba": GroupKind.RECURRENT,
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """Sizes of the parallel groups that divide cache bytes, and the model's KV heads over all of them."""

    tensor: int
    pipeline: int
    decode_context: int
    kv_heads: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Ranks:
        """The sizes an engine was started with."""
        parallel = vllm_config.parallel_config
        return cls(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            decode_context=parallel.decode_context_parallel_size,
            kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
        )

    @property
    def world(self) -> int:
        """Workers of the engine."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class Division:
    """How the ranks of one pipeline stage divide a group: `shards` distinct parts, each held by `replicas` ranks."""

    tensor_shards: int
    context_shards: int
    replicas: int

    @property
    def shards(self) -> int:
        """Distinct parts in one pipeline stage."""
        return self.tensor_shards * self.context_shards


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a worker stands in each parallel group."""

    tensor: int
    pipeline: int
    decode_context: int


def layer_specs(spec: KVCacheSpec) -> list[Any]:
    """The specs of a group's layers: several where the group wraps layers of different widths."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, dict) else [spec]


def group_kind(index: int, spec: KVCacheSpec) -> GroupKind:
    """Which objects of the group a hit needs.

    Raises:
        UnsupportedGeometry: for a kind of cache whose reuse rules are not known here.
    """
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    name = get_kv_cache_spec_kind(spec).value
    kind = _KINDS.get(name)
    if kind is None:
        raise UnsupportedGeometry(
            f"KV cache group {index} is of the kind '{name}', which is not served.",
            remedy="Start vLLM without this connector for this model.",
        )
    if kind is GroupKind.RECURRENT:
        modes = {layer.mamba_cache_mode for layer in layer_specs(spec)}
        if modes != {"align"}:
            raise UnsupportedGeometry(
                f"KV cache group {index} keeps recurrent states in mode {', '.join(sorted(modes))}; "
                "only the states of mode 'align' stand at block boundaries.",
                remedy="Start vLLM with --mamba-cache-mode align and prefix caching.",
            )
    return kind


def group_division(spec: KVCacheSpec, ranks: Ranks) -> Division:
    """How the tensor-parallel ranks of one stage divide the bytes of a group.

    Layers of one group may divide differently (replicated beside sharded ones): the finest division then holds for
    all of them, which stores a replicated layer more than once and never mixes bytes of different shards.
    """
    tensor_shards = max(_tensor_shards(layer, ranks) for layer in layer_specs(spec))
    copies = ranks.tensor // tensor_shards
    context_shards = ranks.decode_context if spec.dcp_sharded else 1
    if copies % context_shards:
        raise UnsupportedGeometry(
            f"Decode context parallelism of {context_shards} does not divide the {copies} ranks that hold the same "
            "heads.",
            remedy="Choose --decode-context-parallel-size so that it divides tensor-parallel size / KV heads.",
        )
    return Division(tensor_shards, context_shards, copies // context_shards)


def _tensor_shards(layer: Any, ranks: Ranks) -> int:
    """Distinct parts of one layer. Where that is not certain, every rank counts as a part of its own."""
    if hasattr(layer, "tp_replicated"):
        return 1 if layer.tp_replicated else ranks.tensor
    limit = getattr(layer, "max_tp_shards", None)
    if limit is None and layer.num_kv_heads == max(1, ranks.kv_heads // ranks.tensor):
        limit = ranks.kv_heads
    shards = min(ranks.tensor, limit or ranks.tensor)
    return int(shards) if ranks.tensor % shards == 0 else ranks.tensor


def object_groups(kv_cache_config: KVCacheConfig, ranks: Ranks) -> list[ObjectGroup]:
    """Every cache group in vLLM's order.

    Raises:
        UnsupportedGeometry: naming the group that cannot be served.
    """
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if not spec.prefix_cacheable or not group.enable_kv_transfer:
            raise UnsupportedGeometry(
                f"KV cache group {index} ({type(spec).__name__}) cannot be restored from a prefix cache.",
                remedy="Start vLLM without this connector for this model.",
            )
        kind = group_kind(index, spec)
        division = group_division(spec, ranks)
        groups.append(
            ObjectGroup(
                index=index,
                name=f"{kind.value}-{index}",
                kind=kind,
                block_tokens=spec.block_size,
                shards=division.shards * ranks.pipeline,
                replicas=division.replicas,
                context_shards=division.context_shards,
                window_tokens=_window_tokens(spec) if kind is GroupKind.SLIDING else 0,
            )
        )
    check_groups(groups)
    return groups


def _window_tokens(spec: KVCacheSpec) -> int:
    return max(int(layer.sliding_window) for layer in layer_specs(spec))


def worker_groups(kv_cache_config: KVCacheConfig, ranks: Ranks, place: RankPlace) -> list[WorkerGroup]:
    """Which shard of each group this rank holds, and which of its replicas it is.

    Numbers are given out over all stages alike; a stage without a layer of a group says that it holds none of it.
    """
    held = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        division = group_division(group.kv_cache_spec, ranks)
        copies = division.context_shards * division.replicas
        tensor_shard, copy = divmod(place.tensor, copies)
        # Context ranks are neighbours within the tensor group, so replicas lie context_shards apart.
        context_shard, replica = copy % division.context_shards, copy // division.context_shards
        assert division.context_shards == 1 or context_shard == place.decode_context, (
            "a shard named after another context rank would be loaded into the wrong token positions"
        )
        shard = (
            place.pipeline * division.tensor_shards + tensor_shard
        ) * division.context_shards + context_shard
        held.append(WorkerGroup(index=index, shard=shard, replica=replica, held=bool(group.layer_names)))
    return held


def place_of_this_worker() -> RankPlace:
    """This worker's rank in each parallel group; only workers know it."""
    from vllm.distributed.parallel_state import get_dcp_group, get_pp_group, get_tp_group

    return RankPlace(
        tensor=get_tp_group().rank_in_group,
        pipeline=get_pp_group().rank_in_group,
        decode_context=get_dcp_group().rank_in_group,
    )
