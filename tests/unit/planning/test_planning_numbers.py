"""The published numbers as a table, and the plan of each family against what vLLM makes of it."""

from __future__ import annotations

import math

import pytest
from planning_configs import NAMES, config, plan_of

from appliance.planning import PlanRequest, make_plan
from appliance.served_models import geometry_of

KIMI, K3, QWEN = "kimi-linear-48b", "kimi-k3", "qwen3-next-80b"


@pytest.mark.parametrize(
    ("model", "options", "block_size", "chunk_tokens", "budget"),
    [
        # The recipes' figures; their vLLM aligned to 16.
        (KIMI, {"tp": 2, "align": 16}, 944, 944, 1887),
        (KIMI, {"tp": 1, "align": 16}, 1888, 1888, 3775),
        (KIMI, {"tp": 2, "vllm": "0.26"}, 944, 944, 1887),
        (KIMI, {"tp": 1, "vllm": "0.26.0"}, 1888, 1888, 3775),
        (K3, {"tp": 8}, 768, 768, 1535),
        (K3, {"tp": 8, "align": 128}, 768, 768, 1535),
        (K3, {"tp": 8, "dcp": 8, "kv_cache_dtype": "fp8"}, 1536, 12288, 3071),
        (
            K3,
            {"tp": 8, "dcp": 8, "kv_cache_dtype": "fp8", "platform": "rocm", "chunk_size": 12288},
            1536,
            12288,
            3071,
        ),
        # vLLM 0.32.
        (KIMI, {"tp": 1}, 1920, 1920, 3839),
        (KIMI, {"tp": 2}, 1024, 1024, 2047),
        (KIMI, {"tp": 4}, 512, 512, 1023),
        (KIMI, {"tp": 8}, 256, 256, 511),
        (KIMI, {"tp": 2, "vllm": "0.27.1"}, 1024, 1024, 2047),
        (KIMI, {"tp": 2, "attention_backend": "flashmla", "vllm": "0.26"}, 960, 960, 1919),
        # A comment in vLLM's ROCm backend names 544 for Qwen3-Next.
        (QWEN, {"tp": 1}, 544, 544, 1087),
        (QWEN, {"tp": 2}, 544, 544, 1087),
        (QWEN, {"tp": 4}, 272, 272, 543),
        (QWEN, {"tp": 1, "platform": "rocm"}, 544, 544, 1087),
        (QWEN, {"tp": 1, "mamba_ssm_cache_dtype": "float32"}, 1056, 1056, 2111),
        (QWEN, {"tp": 1, "platform": "cpu"}, 1152, 1152, 2303),
        # Attention only.
        ("llama-3.1-8b", {"tp": 4}, 16, 256, 8192),
        ("llama-3.1-8b", {"platform": "cpu"}, 128, 256, 8192),
        ("qwen3-8b", {"tp": 2}, 16, 256, 8192),
        ("deepseek-v3", {"tp": 8}, 16, 256, 8192),
        ("deepseek-v3", {"tp": 8, "attention_backend": "FLASHMLA"}, 64, 256, 8192),
        ("deepseek-v3", {"tp": 8, "dcp": 8, "attention_backend": "CUTLASS_MLA"}, 128, 1024, 8192),
        ("gpt-oss-20b", {"tp": 1}, 16, 256, 8192),
    ],
)
def test_the_published_numbers(
    model: str, options: dict[str, object], block_size: int, chunk_tokens: int, budget: int
):
    plan = plan_of(model, **options)
    assert (plan.block_size, plan.chunk_tokens) == (block_size, chunk_tokens)
    assert plan.max_num_batched_tokens == plan.budgets.fine == budget


def test_the_sizes_that_the_recipes_give():
    plan = plan_of(KIMI, tp=2, align=16)
    per_rank = 32 // 2
    assert plan.attention_token_bytes == 1152
    assert plan.state_bytes == per_rank * 128 * 128 * 4 + 3 * 3 * per_rank * 128 * 2 == 1085440
    assert plan.page_bytes == 944 * 1152
    assert [group.layers for group in plan.groups] == [7, 7, 6, 7]
    attention = plan.groups[3]
    assert (attention.kind, attention.shards, attention.replicas) == ("attention", 1, 2)
    assert attention.bytes_per_1k_tokens == 7 * 1152 * 1024
    snapshot = plan.groups[0]
    assert (snapshot.kind, snapshot.shards, snapshot.replicas) == ("recurrent", 2, 1)
    assert snapshot.chunk_bytes == 2 * 7 * plan.state_bytes
    assert snapshot.bytes_per_1k_tokens == round(snapshot.chunk_bytes * 1024 / 944)


def test_the_hybrid_block_sizes_of_another_generation():
    """vLLM's ROCm backend names 784 and 1056 for Qwen3.5: the configuration itself asks for float32 states."""
    shape = {"model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"}
    small = make_plan(config(QWEN, **shape), PlanRequest())
    large = make_plan(
        config(QWEN, **shape, num_key_value_heads=4, num_attention_heads=24, linear_num_value_heads=48),
        PlanRequest(),
    )
    assert (small.block_size, large.block_size) == (1056, 784)


@pytest.mark.parametrize(("state", "block_size"), [("auto", 640), ("bfloat16", 384)])
def test_the_checkpoint_that_the_end_to_end_tests_run(state: str, block_size: int):
    """tests/e2e runs this Qwen3-Next on vLLM 0.32 for a CPU and sees 640."""
    tiny = {
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    request = PlanRequest(platform="cpu", mamba_ssm_cache_dtype=state)
    plan = make_plan(config(QWEN, **tiny), request)
    assert plan.block_size == block_size
    if state == "auto":
        assert (plan.state_bytes, plan.page_bytes) == (268288, 327680)


@pytest.mark.parametrize(
    ("name", "simulated"),
    [(KIMI, "kimi-linear-48b"), (K3, "kimi-k3"), ("llama-3.1-8b", "llama-8b")],
)
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_a_simulated_engine_has_the_planned_geometry(name: str, simulated: str, tensor: int):
    plan, geometry = plan_of(name, tp=tensor), geometry_of(simulated, tensor)
    assert plan.block_size == geometry.block_tokens
    assert plan.page_bytes == geometry.page_bytes
    planned = [
        (group.kind, group.layers, group.shards, group.replicas, group.stored_page_bytes)
        for group in plan.groups
    ]
    assert planned == [
        (
            each.group.kind.value,
            len(each.layers),
            each.group.shards,
            each.group.replicas,
            each.run_bytes if each.group.kind == "recurrent" else geometry.page_bytes,
        )
        for each in geometry.groups
    ]


def test_windows_are_a_group_of_their_own():
    plan = plan_of("gpt-oss-20b")
    assert [(group.kind, group.layers, group.window_tokens) for group in plan.groups] == [
        ("sliding", 12, 128),
        ("attention", 12, 0),
    ]
    everywhere = make_plan(config("llama-3.1-8b", model_type="mistral", sliding_window=4096), PlanRequest())
    assert [(group.kind, group.layers) for group in everywhere.groups] == [("sliding", 32)]
    later = config("qwen3-8b", use_sliding_window=True, sliding_window=4096, max_window_layers=12)
    assert [(group.kind, group.layers) for group in make_plan(later, PlanRequest()).groups] == [
        ("attention", 12),
        ("sliding", 12),
        ("sliding", 12),
    ]


def test_pipeline_stages_hold_their_own_shards():
    plan = plan_of(KIMI, tp=2, pp=2)
    one = plan_of(KIMI, tp=2)
    assert plan.block_size == one.block_size
    assert [group.shards for group in plan.groups] == [2 * group.shards for group in one.groups]
    assert [group.chunk_bytes for group in plan.groups] == [group.chunk_bytes for group in one.groups]


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "gpt-oss-20b"]
)  # its windows cannot be cut
def test_context_ranks_divide_what_they_divide(name: str):
    tensor = 16 if name in ("llama-3.1-8b", "qwen3-8b") else 8
    one, many = plan_of(name, tp=tensor), plan_of(name, tp=tensor, dcp=2)
    for before, after in zip(one.groups, many.groups, strict=True):
        factor = 2 if after.kind == "attention" else 1
        assert after.unit_tokens == before.unit_tokens * factor
        assert after.shards == before.shards * factor
        if factor == 2:
            assert after.bytes_per_1k_tokens == pytest.approx(before.bytes_per_1k_tokens, rel=1e-6)


def test_the_regime_chooses_the_budget_of_the_command():
    fine, fast = plan_of(KIMI, tp=2), plan_of(KIMI, tp=2, regime="throughput")
    assert fine.max_num_batched_tokens == 2 * 1024 - 1
    assert fast.max_num_batched_tokens >= 2 * 1024
    assert f"--max-num-batched-tokens {fine.max_num_batched_tokens} " in fine.commands.vllm
    assert f"--max-num-batched-tokens {fast.max_num_batched_tokens} " in fast.commands.vllm


def test_l1_holds_the_users_below_the_watermark():
    plan = plan_of(KIMI, tp=2, users=100, context=100_000, snapshots=3)
    chunks = 100_000 // plan.chunk_tokens
    exact = sum(group.chunk_bytes * (3 if group.kind == "recurrent" else chunks) for group in plan.groups)
    assert plan.l1.chunks_per_user == chunks
    assert exact <= plan.l1.bytes_per_user <= 1.05 * exact
    assert plan.l1.size_gb == math.ceil(100 * plan.l1.bytes_per_user / 0.95 / (1 << 30))
    assert plan_of(KIMI, tp=2, users=200, context=100_000, snapshots=3).l1.size_gb > 1.9 * plan.l1.size_gb


def test_small_objects_get_small_extents():
    tiny = config(
        "llama-3.1-8b", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    plan = make_plan(tiny, PlanRequest(chunk_size=16))
    assert plan.l1.extent_kib == 16
    assert "--extent-kib 16" in plan.commands.server
    assert plan_of("llama-3.1-8b").l1.extent_kib == 256
