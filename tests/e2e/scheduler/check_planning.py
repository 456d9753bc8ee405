"""`pagewarden plan` against vLLM's own code: state shapes and types, the groups it cuts, the alignment of each backend."""

import json
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec

from appliance.planning import Plan, PlanRequest, make_plan
from appliance.planning.families import shape_of
from appliance.planning.rules import BACKENDS
from appliance.planning.shape import Shape, StateForm
from tests.e2e.scheduler.geometry import kimi_k3, plain_config

CONFIGS = Path(__file__).parents[2] / "unit/planning/configs"
HYBRIDS = ("kimi-linear-48b", "kimi-k3", "qwen3-next-80b")
TENSORS = (1, 2, 4, 8)

MODULES = {
    "FLASH_ATTN": ("flash_attn", "FlashAttentionBackend"),
    "FLASHINFER": ("flashinfer", "FlashInferBackend"),
    "TRITON_ATTN": ("triton_attn", "TritonAttentionBackend"),
    "FLEX_ATTENTION": ("flex_attention", "FlexAttentionBackend"),
    "ROCM_ATTN": ("rocm_attn", "RocmAttentionBackend"),
    "ROCM_AITER_FA": ("rocm_aiter_fa", "AiterFlashAttentionBackend"),
    "ROCM_AITER_UNIFIED_ATTN": ("rocm_aiter_unified_attn", "RocmAiterUnifiedAttentionBackend"),
    "CPU_ATTN": ("cpu_attn", "CPUAttentionBackend"),
    "FLASH_ATTN_MLA": ("mla.flashattn_mla", "FlashAttnMLABackend"),
    "FLASHMLA": ("mla.flashmla", "FlashMLABackend"),
    "FLASHINFER_MLA": ("mla.flashinfer_mla", "FlashInferMLABackend"),
    "TOKENSPEED_MLA": ("mla.tokenspeed_mla", "TokenspeedMLABackend"),
    "CUTLASS_MLA": ("mla.cutlass_mla", "CutlassMLABackend"),
    "TRITON_MLA": ("mla.triton_mla", "TritonMLABackend"),
    "ROCM_AITER_MLA": ("mla.rocm_aiter_mla", "AiterMLABackend"),
}
"""Where vLLM has each backend."""

OF_A_DEVICE = frozenset({"FLASHINFER", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA"})
"""Backends whose modules cannot be imported without a CUDA device and its libraries."""


def planned(name: str, tensor: int) -> tuple[Shape, Plan]:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return shape_of(config), make_plan(config, PlanRequest(tp=tensor))


def state_spec(shape: Shape, tensor: int) -> MambaSpec:
    """The state of one layer as vLLM computes it."""
    recurrent = shape.recurrent
    assert recurrent is not None
    if recurrent.form is StateForm.KDA:
        shapes = MambaStateShapeCalculator.kda_state_shape(
            tensor,
            recurrent.value_heads,
            recurrent.value_width,
            conv_kernel_size=recurrent.convolution,
        )
        dtypes = MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto", "auto")
    else:
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            tensor,
            recurrent.key_heads,
            recurrent.value_heads,
            recurrent.key_width,
            recurrent.value_width,
            recurrent.convolution,
        )
        dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto", "auto")
    return MambaSpec(block_size=1, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_are_as_large_as_vllm_makes_them(name: str, tensor: int) -> None:
    shape, plan = planned(name, tensor)
    spec = state_spec(shape, tensor)
    sizes = (prod(each) * dtype.itemsize for each, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    assert plan.state_bytes == spec.page_size_bytes == sum(sizes)


def layer_specs(shape: Shape, plan: Plan, tensor: int) -> dict[str, KVCacheSpec]:
    """Every layer in model order, with the pages that the plan says."""
    attention = shape.attention[0]
    common = {"block_size": plan.block_size, "dtype": torch.bfloat16}
    page: FullAttentionSpec = (
        MLAAttentionSpec(num_kv_heads=1, head_size=attention.width, **common)
        if attention.latent
        else FullAttentionSpec(
            num_kv_heads=max(1, attention.kv_heads // tensor), head_size=attention.width, **common
        )
    )
    assert page.page_size_bytes == plan.page_bytes
    state = replace(
        state_spec(shape, tensor), block_size=plan.block_size, page_size_padded=page.page_size_bytes
    )
    return {
        f"model.layers.{layer}": page if layer in attention.layers else state for layer in range(shape.layers)
    }


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_groups_are_those_that_vllm_cuts(name: str, tensor: int, tmp_path: Path) -> None:
    shape, plan = planned(name, tensor)
    cut = get_kv_cache_groups(plain_config(tmp_path, kimi_k3()), layer_specs(shape, plan, tensor))
    assert [len(group.layer_names) for group in cut] == [group.layers for group in plan.groups]
    assert [isinstance(group.kv_cache_spec, MambaSpec) for group in cut] == [
        group.kind == "recurrent" for group in plan.groups
    ]


@pytest.mark.parametrize("name", sorted(BACKENDS.keys() - OF_A_DEVICE))
def test_a_backend_has_the_blocks_that_are_known_here(name: str) -> None:
    module, attribute = MODULES[name]
    backend: type[AttentionBackend] = getattr(
        import_module(f"vllm.v1.attention.backends.{module}"), attribute
    )
    sizes = [
        each.base if isinstance(each, MultipleOf) else each
        for each in backend.get_supported_kernel_block_sizes()
    ]
    known = BACKENDS[name]
    assert min(sizes) == known.kernel_tokens
    assert backend.is_mla() is known.latent
    if name != "CPU_ATTN":  # the platform chooses 128 there, whatever the backend prefers
        assert backend.get_preferred_block_size(16) == known.preferred_tokens
