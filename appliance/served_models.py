"""The geometry of served models: layers, bytes per token and per state, cache groups and block size as vLLM makes them.

Heads, widths and layer counts are those of the published model configurations; the block size is vLLM 0.32's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.errors import UnsupportedGeometry
from appliance.geometry import GroupKind, ObjectGroup
from appliance.planning import groups as planned_groups
from appliance.planning import rules

ITEM_BYTES = 2
"""bfloat16: keys, values, latents and convolution states."""

STATE_ITEM_BYTES = 4
"""float32: recurrent states, as vLLM keeps them by default."""

PAGE_ALIGNMENT_BYTES = 64
MLA_ALIGNMENT_TOKENS = 128
ALIGNMENT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention layers; ``kv_heads`` is 0 where they keep one latent of ``width`` items a token, the same on every rank."""

    layers: int
    kv_heads: int
    width: int

    def token_bytes(self, tensor: int) -> int:
        """Bytes of one token in one layer on one rank."""
        if not self.kv_heads:
            return self.width * ITEM_BYTES
        return 2 * max(1, self.kv_heads // tensor) * self.width * ITEM_BYTES

    def shards(self, tensor: int) -> int:
        """Different parts of a token's bytes over the ranks."""
        return min(tensor, self.kv_heads) if self.kv_heads else 1


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Linear-attention layers with a convolution and a recurrent state, sharded over heads."""

    layers: int
    key_heads: int
    value_heads: int
    head_width: int
    convolution: int = 4

    def state_bytes(self, tensor: int) -> int:
        """Bytes of one layer's state on one rank."""
        channels = (2 * self.key_heads + self.value_heads) * self.head_width // tensor
        window = (self.convolution - 1) * channels * ITEM_BYTES
        return window + self.value_heads // tensor * self.head_width**2 * STATE_ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its name on the command line; every fourth layer and the last is an attention layer of a hybrid."""

    name: str
    title: str
    attention: Attention
    recurrent: Recurrent | None
    backend: str

    @property
    def alignment_tokens(self) -> int:
        """What vLLM 0.32 aligns the block size to."""
        latent_hybrid = self.recurrent is not None and not self.attention.kv_heads
        return MLA_ALIGNMENT_TOKENS if latent_hybrid else ALIGNMENT_TOKENS


MODELS = {
    model.name: model
    for model in (
        Model(
            "kimi-linear-48b",
            "moonshotai/Kimi-Linear-48B-A3B-Instruct",
            Attention(layers=7, kv_heads=0, width=512 + 64),
            Recurrent(layers=20, key_heads=32, value_heads=32, head_width=128),
            "FLASHMLA",
        ),
        Model(
            "kimi-k3",
            "moonshotai/Kimi-K3",
            Attention(layers=24, kv_heads=0, width=512 + 64),
            Recurrent(layers=69, key_heads=96, value_heads=96, head_width=128),
            "FLASHMLA",
        ),
        Model(
            "qwen3-next",
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            Attention(layers=12, kv_heads=2, width=256),
            Recurrent(layers=36, key_heads=16, value_heads=32, head_width=128),
            "FLASH_ATTN",
        ),
        Model(
            "llama-8b",
            "meta-llama/Llama-3.1-8B-Instruct",
            Attention(layers=32, kv_heads=8, width=128),
            None,
            "FLASH_ATTN",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One cache group: layer i of every group lies in tensor i. ``run_bytes`` of each page hold its bytes."""

    group: ObjectGroup
    layers: tuple[str, ...]
    run_bytes: int

    def place(self, rank: int) -> tuple[int, int]:
        """The shard that a rank holds, and which of the shard's replicas it is."""
        return divmod(rank, self.group.replicas)


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model on ``tensor`` ranks. ``page_bytes`` is one block in one tensor; all groups share tensors and blocks."""

    model: Model
    tensor: int
    scale: int
    block_tokens: int
    page_bytes: int
    groups: tuple[CacheGroup, ...]

    @property
    def tensors(self) -> int:
        """Cache tensors of one rank."""
        return max(len(group.layers) for group in self.groups)


def block_tokens_of(model: Model, tensor: int, alignment_tokens: int = 0) -> int:
    """The unified block size N in tokens: a block of attention holds at least the bytes of a state.

    ``alignment_tokens`` of 0 is that of vLLM 0.32.
    """
    alignment = rules.Alignment(alignment_tokens or model.alignment_tokens, 1, "as asked")
    state = 0 if model.recurrent is None else model.recurrent.state_bytes(tensor)
    return rules.block_tokens(state, model.attention.token_bytes(tensor), alignment)


def split_layers(attention: Sequence[str], recurrent: Sequence[str]) -> list[tuple[str, ...]]:
    """Layers in groups of one size, recurrent ones first: their layer comes first in a hybrid."""
    return planned_groups.split_layers([bucket for bucket in (recurrent, attention) if bucket])


def geometry_of(name: str, tensor: int, *, scale: int = 1, alignment_tokens: int = 0) -> Geometry:
    """A model's geometry with its page bytes divided by ``scale``.

    Raises:
        UnsupportedGeometry: if there is no such model, or its heads cannot be split over ``tensor`` ranks.
    """
    if name not in MODELS:
        raise UnsupportedGeometry(f"There is no model '{name}'.", remedy=f"Use {', '.join(sorted(MODELS))}.")
    model = MODELS[name]
    _check_split(model, tensor)
    block_tokens = block_tokens_of(model, tensor, alignment_tokens)
    page_bytes = _scaled(block_tokens * model.attention.token_bytes(tensor), scale)
    every_fourth = [f"model.layers.{layer}" for layer in _attention_positions(model)]
    total = model.attention.layers + (model.recurrent.layers if model.recurrent else 0)
    others = [name for layer in range(total) if (name := f"model.layers.{layer}") not in set(every_fourth)]
    groups = []
    for index, layers in enumerate(split_layers(every_fourth, others)):
        is_state = layers[0] in others
        shards = tensor if is_state else model.attention.shards(tensor)
        group = ObjectGroup(
            index=index,
            name=f"{'state' if is_state else 'attention'}.{index}",
            kind=GroupKind.RECURRENT if is_state else GroupKind.ATTENTION,
            block_tokens=block_tokens,
            shards=shards,
            replicas=tensor // shards,
        )
        run_bytes = page_bytes
        if is_state and model.recurrent is not None:
            run_bytes = min(page_bytes, _scaled(model.recurrent.state_bytes(tensor), scale))
        groups.append(CacheGroup(group, layers, run_bytes))
    return Geometry(model, tensor, scale, block_tokens, page_bytes, tuple(groups))


def _check_split(model: Model, tensor: int) -> None:
    fits = tensor >= 1
    if fits and model.recurrent is not None:
        fits = model.recurrent.key_heads % tensor == 0
    if fits and model.attention.kv_heads:
        kv_heads = model.attention.kv_heads
        fits = max(kv_heads, tensor) % min(kv_heads, tensor) == 0
    if not fits:
        raise UnsupportedGeometry(f"The heads of {model.title} cannot be split over {tensor} ranks.")


def _attention_positions(model: Model) -> list[int]:
    if model.recurrent is None:
        return list(range(model.attention.layers))
    total = model.attention.layers + model.recurrent.layers
    return sorted({*range(3, total, 4), total - 1})


def _scaled(size_bytes: int, scale: int) -> int:
    """A page's bytes on a small machine: at least one cache line, whole cache lines unless it is the real size."""
    if scale == 1:
        return size_bytes
    return max(1, round(size_bytes / scale / PAGE_ALIGNMENT_BYTES)) * PAGE_ALIGNMENT_BYTES
