"""The worker's cache tensors as page maps, and the facts about each layer that only a worker knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedGeometry
from connector.vllm.groups import layer_specs
from kernels.pages import GroupPages, PageMap

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

LayerCaches = Mapping[str, "torch.Tensor"]


def page_map(name: str, cache: torch.Tensor, num_blocks: int) -> PageMap:
    """One layer's pages. vLLM's cache views count kernel blocks in dimension 0.

    Raises:
        UnsupportedGeometry: if the tensor is no whole number of manager blocks.
    """
    kernel_blocks = int(cache.shape[0])
    if kernel_blocks % num_blocks:
        raise UnsupportedGeometry(
            f"The cache of layer '{name}' has {kernel_blocks} kernel blocks for {num_blocks} blocks.",
            remedy="Start vLLM without this connector for this model.",
        )
    return PageMap.from_tensor(
        base_address=cache.data_ptr(),
        shape=tuple(cache.shape),
        strides=tuple(cache.stride()),
        item_bytes=cache.element_size(),
        block_dimension=0,
        kernel_blocks_per_block=kernel_blocks // num_blocks,
    )


def group_pages(kv_cache_config: KVCacheConfig, caches: LayerCaches) -> dict[int, GroupPages]:
    """The page maps of every cache group of which this worker holds layers."""
    num_blocks = kv_cache_config.num_blocks
    pages = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        layers = {
            name: page_map(name, caches[name], num_blocks) for name in group.layer_names if name in caches
        }
        if layers:
            pages[index] = GroupPages.from_layers(layers)
    return pages


def layer_facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, caches: LayerCaches, stage: int
) -> dict[str, dict[str, Any]]:
    """What each layer's pages are, by layer name: backend, kernel block, type, and the page's inner layout.

    `stage` is this worker's pipeline stage: which layers lie together in a shard follows from it.
    """
    modules = vllm_config.compilation_config.static_forward_context
    num_blocks = kv_cache_config.num_blocks
    described = {}
    for group in kv_cache_config.kv_cache_groups:
        specs = layer_specs(group.kv_cache_spec)
        by_name = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for name in group.layer_names:
            if name in caches:
                spec = by_name.get(name, specs[0])
                facts = _one_layer(modules.get(name), spec, caches[name], num_blocks)
                described[name] = {**facts, "stage": stage}
    return described


def _one_layer(module: Any, spec: Any, cache: torch.Tensor, num_blocks: int) -> dict[str, Any]:
    kernel_blocks_per_block = int(cache.shape[0]) // num_blocks
    item_bytes = cache.element_size()
    facts: dict[str, Any] = {
        "backend": module.get_attn_backend().get_name() if module is not None else "",
        "kernel_block_tokens": int(spec.block_size) // kernel_blocks_per_block,
        "dtype": str(cache.dtype),
        "shape": [int(size) for size in cache.shape[1:]],
        # A stride that spans blocks depends on how many blocks fit; the layout's name says the same without it.
        "strides": [
            int(stride) * item_bytes if stride < cache.stride(0) else "spans blocks"
            for stride in cache.stride()[1:]
        ],
        "page_bytes": int(spec.page_size_bytes),
        "spec": repr(spec),
    }
    if "fp8" in str(cache.dtype) or "float8" in str(cache.dtype):
        facts["scales"] = {
            name: float(getattr(module, name))
            for name in ("_k_scale_float", "_v_scale_float")
            if getattr(module, name, None) is not None
        }
    return facts
