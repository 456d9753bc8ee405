"""Models as vLLM's own cache specs: the layers that a model would report, without the model."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

LATENT = 512 + 64
MAX_MODEL_TOKENS = 65_536

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 768,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": MAX_MODEL_TOKENS,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Geometry:
    """A model's cache on one engine: its layers by name in model order, and the ranks that divide them.

    `block_tokens` is N, `chunk_tokens` what a daemon that asks for 256 negotiates.
    """

    name: str
    layers: tuple[tuple[str, KVCacheSpec], ...]
    block_tokens: int
    chunk_tokens: int
    tensor: int = 1
    pipeline: int = 1
    decode_context: int = 1
    kv_heads: int = 8

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep a recurrent state."""
        return any(isinstance(spec, MambaSpec) for _, spec in self.layers)

    def stage_layers(self, stage: int) -> dict[str, KVCacheSpec]:
        """The layers of one pipeline stage: even parts in order, as vLLM cuts a model."""
        size = -(-len(self.layers) // self.pipeline)
        return dict(self.layers[stage * size : (stage + 1) * size])


def block_size(state_bytes: int, attention_bytes: int) -> int:
    """N as vLLM 0.32 aligns an MLA hybrid: the fewest blocks of 128 tokens whose latents fill a state's page."""
    return 128 * -(-state_bytes // (128 * attention_bytes))


def kimi(
    name: str,
    *,
    states: int,
    latents: int,
    heads: int,
    tensor: int,
    decode_context: int = 1,
    fp8: bool = False,
) -> Geometry:
    """Kimi Delta Attention beside Multi-head Latent Attention, in the order three to one."""
    per_rank = heads // tensor
    shapes = ((3, 3 * per_rank * 128), (per_rank, 128, 128))
    dtypes = (torch.bfloat16, torch.float32)
    latent_dtype = torch.uint8 if fp8 else torch.bfloat16
    state = MambaSpec(block_size=1, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
    tokens = block_size(state.page_size_bytes, LATENT * latent_dtype.itemsize)
    latent = MLAAttentionSpec(
        block_size=tokens,
        num_kv_heads=1,
        head_size=LATENT,
        dtype=latent_dtype,
        cache_dtype_str="fp8" if fp8 else "auto",
        max_tp_shards=1,
    )
    state = replace(state, block_size=tokens, page_size_padded=latent.page_size_bytes)
    layers: list[tuple[str, KVCacheSpec]] = []
    total = states + latents
    for number in range(total):
        wants_latent = (number + 1) * latents // total > number * latents // total
        layers.append((f"model.layers.{number}", latent if wants_latent else state))
    return Geometry(
        name=name,
        layers=tuple(layers),
        block_tokens=tokens,
        chunk_tokens=tokens * decode_context,
        tensor=tensor,
        decode_context=decode_context,
        kv_heads=heads,
    )


def kimi_linear(tensor: int) -> Geometry:
    """Kimi-Linear-48B: 20 KDA and 7 MLA layers, 32 heads of 128."""
    return kimi(f"kimi-linear-tp{tensor}", states=20, latents=7, heads=32, tensor=tensor)


def kimi_k3(*, decode_context: int = 1) -> Geometry:
    """Kimi K3 over 8 ranks: 69 KDA and 24 MLA layers, 96 heads of 128; with fp8 latents where they are divided."""
    name = "kimi-k3-tp8" if decode_context == 1 else f"kimi-k3-tp8-dcp{decode_context}"
    return kimi(
        name, states=69, latents=24, heads=96, tensor=8, decode_context=decode_context, fp8=decode_context > 1
    )


def windowed(window_tokens: int, *, block_tokens: int = 64, chunk_tokens: int = 256) -> Geometry:
    """Gemma-like: layers with a sliding window beside layers with full attention, in the order one to one."""
    size = {"block_size": block_tokens, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
    full, sliding = FullAttentionSpec(**size), SlidingWindowSpec(**size, sliding_window=window_tokens)
    layers = tuple((f"model.layers.{number}", full if number % 2 else sliding) for number in range(4))
    return Geometry(f"windowed-{window_tokens}", layers, block_tokens, chunk_tokens)


class StandInLayer:
    """A layer as far as the connector asks: the name of its backend."""

    def get_attn_backend(self) -> "StandInLayer":
        """The backend is the layer itself."""
        return self

    def get_name(self) -> str:
        """The backend's name."""
        return "STAND_IN"


@cache
def _model_config(directory: Path, tokens: int) -> ModelConfig:
    return ModelConfig(model=str(directory), skip_tokenizer_init=True, max_model_len=tokens)


def plain_config(
    directory: Path, geometry: Geometry, *, model_tokens: int = MAX_MODEL_TOKENS, **scheduler: Any
) -> VllmConfig:
    """vLLM's configuration of an engine with the geometry's ranks.

    It is made for one rank, since vLLM counts the machine's devices, and then told of the others.
    """
    model = directory / geometry.name
    if not model.exists():
        model.mkdir()
        heads = {"num_attention_heads": geometry.kv_heads, "num_key_value_heads": geometry.kv_heads}
        (model / "config.json").write_text(json.dumps({**LLAMA, **heads}))
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        **scheduler,
    }
    overlapped = settings.pop("async_scheduling", False)
    config = VllmConfig(
        model_config=_model_config(model, model_tokens),
        parallel_config=ParallelConfig(),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=model_tokens, is_encoder_decoder=False, async_scheduling=False, **settings
        ),
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(load_format="dummy"),
    )
    config.scheduler_config.async_scheduling = overlapped  # which vLLM turns off on a CPU
    config.parallel_config.tensor_parallel_size = geometry.tensor
    config.parallel_config.pipeline_parallel_size = geometry.pipeline
    config.parallel_config.decode_context_parallel_size = geometry.decode_context
    config.cache_config.mamba_cache_mode = "align" if geometry.hybrid else "none"
    config.cache_config.block_size = geometry.block_tokens
    config.cache_config.kv_cache_layout = "LBNHC"
    config.compilation_config.static_forward_context.update(
        {name: StandInLayer() for name, _ in geometry.layers}
    )
    return config


def connector_config(engine_id: str, transfer: dict[str, Any]) -> KVTransferConfig:
    """vLLM's `kv_transfer_config` under an engine id of its own."""
    return KVTransferConfig(**transfer, engine_id=engine_id)
