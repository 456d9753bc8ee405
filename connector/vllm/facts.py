"""The engine's part of the fingerprint: everything vLLM knows that changes page bytes.

The scheduler side describes the engine and its cache groups, each worker its layers. Numbers of blocks, sizes of
allocations and offsets are left out: they say where a page lies, never what it means.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.protocol.messages import GroupFacts
from connector.vllm.weights import weights_identity
from kernels.checksum import CHECKSUM_ALGORITHM
from kernels.pages import STREAM_LAYOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from appliance.geometry import ObjectGroup
    from connector.vllm.options import ConnectorOptions

UNSTABLE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Keys of a model's configuration that differ between hosts and versions without changing what it computes."""


def canonical(value: Any) -> Any:
    """`value` in the types a fingerprint may hold; what has no such form becomes its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {
            str(key): canonical(inner) for key, inner in sorted(value.items(), key=lambda item: str(item[0]))
        }
    if isinstance(value, (list, tuple)):
        return [canonical(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(inner) for inner in value)
    return str(value)


def engine_facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: ConnectorOptions
) -> dict[str, Any]:
    """The engine-wide record, without the groups and the layers."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    return {
        "model": {
            "name": model_name(str(model.model)),
            "revision": canonical(model.revision),
            "code_revision": canonical(model.code_revision),
            "architecture": str(model.architecture),
            "quantization": canonical(model.quantization),
            "dtype": str(model.dtype),
            "weights": weights_identity(vllm_config, options.weights_version),
            "load_format": str(vllm_config.load_config.load_format),
            "config": _model_config(model.hf_config),
        },
        "cache": _cache_facts(vllm_config, kv_cache_config),
        "engine": {
            "name": "vllm",
            "version": str(vllm.__version__),
            "torch": str(torch.__version__),
            "model_runner": "v2" if vllm_config.use_v2_model_runner else "v1",
            "platform": str(current_platform.device_name or current_platform.device_type),
            "machine": platform.machine(),
            "fp8_dtype": str(current_platform.fp8_dtype()),
        },
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "context_interleave": parallel.cp_kv_cache_interleave_size,
            "expert": bool(parallel.enable_expert_parallel),
        },
        "draft": "none",
        "pages": {"layout": STREAM_LAYOUT, "checksum": CHECKSUM_ALGORITHM},
    }


def model_name(model: str) -> str:
    """The name under which namespaces are compared: a path's last part, so that another mount point is no other model."""
    return Path(model).resolve().name if Path(model).exists() else model


def _model_config(hf_config: Any) -> dict[str, Any]:
    """The model's configuration after overrides (rope scaling among them)."""
    values = {key: value for key, value in hf_config.to_dict().items() if key not in UNSTABLE_CONFIG_KEYS}
    return dict(canonical(values))


def _cache_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    from vllm import envs

    cache = vllm_config.cache_config
    return {
        "dtype": str(cache.cache_dtype),
        "mamba_cache_dtype": str(cache.mamba_cache_dtype),
        "mamba_ssm_cache_dtype": str(cache.mamba_ssm_cache_dtype),
        "mamba_cache_mode": str(cache.mamba_cache_mode),
        "conv_state_layout": canonical(getattr(envs, "VLLM_SSM_CONV_STATE_LAYOUT", None)),
        "layout": str(kv_cache_config.kv_cache_layout),
        "calculate_scales": bool(getattr(cache, "calculate_kv_scales", False)),
    }


def group_facts(kv_cache_config: KVCacheConfig, groups: Sequence[ObjectGroup]) -> list[GroupFacts]:
    """Each cache group with what its pages are."""
    described = []
    for group, vllm_group in zip(groups, kv_cache_config.kv_cache_groups, strict=True):
        spec = vllm_group.kv_cache_spec
        described.append(
            GroupFacts(
                index=group.index,
                name=group.name,
                kind=group.kind,
                block_tokens=group.block_tokens,
                shards=group.shards,
                replicas=group.replicas,
                context_shards=group.context_shards,
                window_tokens=group.window_tokens,
                facts={
                    "kind": group.kind.value,
                    "block_tokens": group.block_tokens,
                    "page_bytes": int(spec.page_size_bytes),
                    "spec": repr(spec),
                    "layers": sorted(vllm_group.layer_names),
                    "shards": group.shards,
                    "context_shards": group.context_shards,
                    "window_tokens": group.window_tokens,
                },
            )
        )
    return described
