"""The cache groups that vLLM makes of a shape: which layers, how many shards, and how many bytes each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from appliance.errors import PlanRefused
from appliance.geometry import GroupKind, ObjectGroup, check_groups
from appliance.planning.request import PlanRequest
from appliance.planning.rules import Types
from appliance.planning.shape import Attention, Recurrent, Shape

_T = TypeVar("_T")

EVEN_GROUPS_FACTOR = 1.5
"""vLLM pads all groups to the largest where it has fewer than this many times the layers of the smallest."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One cache group. ``layer_bytes`` are those of one block (of one state) of one layer on one rank, unpadded."""

    group: ObjectGroup
    layers: tuple[int, ...]
    layer_bytes: int
    stage_layers: tuple[int, ...]

    def object_bytes(self, chunk_tokens: int) -> list[int]:
        """Bytes of each pipeline stage's objects of one chunk; a stage without layers of the group has none."""
        blocks = self.group.blocks_per_object(chunk_tokens)
        return [count * blocks * self.layer_bytes for count in self.stage_layers if count]

    def chunk_bytes(self, chunk_tokens: int, extent_bytes: int = 1) -> int:
        """Bytes that one chunk of this group takes in L1 over all shards, in whole extents."""
        per_stage = self.group.shards // len(self.stage_layers)
        rounded = (math.ceil(size / extent_bytes) * extent_bytes for size in self.object_bytes(chunk_tokens))
        return per_stage * sum(rounded)


def split_layers(buckets: Sequence[Sequence[_T]]) -> list[tuple[_T, ...]]:
    """The layers of each kind in groups of one size, as vLLM cuts them."""
    smallest, largest = min(map(len, buckets)), max(map(len, buckets))
    size = largest if largest < smallest * EVEN_GROUPS_FACTOR else smallest
    groups: list[tuple[_T, ...]] = []
    for bucket in buckets:
        count = math.ceil(len(bucket) / size)
        groups += [tuple(bucket[first::count]) for first in range(count)]
    return groups


def check_split(request: PlanRequest, shape: Shape) -> None:
    """Refuse parallel sizes over which vLLM cannot cut the model.

    Raises:
        PlanRefused: naming the size and what it must divide.
    """
    _divides(request.tp, shape.query_heads, "tp", "attention heads")
    if shape.recurrent is not None:
        _divides(request.tp, shape.recurrent.key_heads, "tp", "key heads of the recurrent layers")
        _divides(request.tp, shape.recurrent.value_heads, "tp", "value heads of the recurrent layers")
    for each in shape.attention:
        small, large = sorted((request.tp, each.kv_heads or 1))
        _divides(small, large, "tp", "KV heads, or a multiple of them")
        replicas = request.tp // each.shards(request.tp)
        if each.window_tokens and request.dcp > 1:
            raise PlanRefused(
                f"The option 'dcp' is {request.dcp}, but the model has sliding windows, which it cannot divide.",
                field="dcp",
            )
        if replicas % request.dcp:
            raise PlanRefused(
                f"The option 'dcp' is {request.dcp}; it must divide the {replicas} ranks that hold the same heads.",
                remedy="Choose a divisor of --tp / KV heads (latent attention: of --tp).",
                field="dcp",
            )
    if request.pp > shape.layers:
        raise PlanRefused(
            f"The option 'pp' is {request.pp}, more than the {shape.layers} layers.", field="pp"
        )


def _divides(part: int, whole: int, option: str, what: str) -> None:
    if whole % part:
        raise PlanRefused(
            f"The option '{option}' does not fit: {part} does not divide {whole} ({what}).",
            remedy="Choose a tensor-parallel size that divides the heads.",
            field=option,
        )


def cache_groups(request: PlanRequest, shape: Shape, types: Types, block_tokens: int) -> list[CacheGroup]:
    """The groups in vLLM's order: the kind of the first layer comes first.

    Raises:
        UnsupportedGeometry: if the daemon could not serve them.
    """
    kinds: list[Attention | Recurrent] = [*shape.attention, *([shape.recurrent] if shape.recurrent else [])]
    kinds.sort(key=lambda kind: kind.layers[0])
    cuts = split_layers([kind.layers for kind in kinds])
    groups = []
    for index, layers in enumerate(cuts):
        kind = next(each for each in kinds if layers[0] in each.layers)
        groups.append(_group(index, layers, kind, request, types, block_tokens, shape.layers))
    check_groups([each.group for each in groups])
    return groups


def _group(
    index: int,
    layers: tuple[int, ...],
    kind: Attention | Recurrent,
    request: PlanRequest,
    types: Types,
    block_tokens: int,
    total_layers: int,
) -> CacheGroup:
    if isinstance(kind, Recurrent):
        sort, window = GroupKind.RECURRENT, 0
        shards, context_shards = request.tp, 1
        layer_bytes = state_bytes(kind, request.tp, types)
    else:
        window = kind.window_tokens
        sort = GroupKind.SLIDING if window else GroupKind.ATTENTION
        context_shards = request.dcp
        shards = kind.shards(request.tp) * context_shards
        layer_bytes = block_tokens * kind.token_items(request.tp) * types.attention_bytes
    group = ObjectGroup(
        index=index,
        name=f"{sort.value}-{index}",
        kind=sort,
        block_tokens=block_tokens,
        shards=shards * request.pp,
        replicas=request.tp // shards,
        context_shards=context_shards,
        window_tokens=window,
    )
    return CacheGroup(group, layers, layer_bytes, _over_stages(layers, request.pp, total_layers))


def state_bytes(recurrent: Recurrent, tensor: int, types: Types) -> int:
    """Bytes of one layer's convolution window and state on one rank."""
    window = recurrent.convolution_items(tensor) * types.convolution_bytes
    return window + recurrent.state_items(tensor) * types.state_bytes


def _over_stages(layers: tuple[int, ...], pipeline: int, total_layers: int) -> tuple[int, ...]:
    """How many of ``layers`` each pipeline stage has: even parts, what is left over to the stages before the last."""
    sizes = [total_layers // pipeline] * pipeline
    for position in range(2, total_layers % pipeline + 2):
        sizes[-position] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(pipeline)]
    counts = [0] * pipeline
    for layer in layers:
        counts[next(stage for stage, end in enumerate(ends) if layer < end)] += 1
    return tuple(counts)
