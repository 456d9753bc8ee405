"""The rules of N, groups and extents against what they promise, over sizes that no model has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.planning.groups import split_layers
from appliance.planning.plan import make_plan
from appliance.planning.request import PlanRequest
from appliance.planning.rules import Alignment, block_tokens


@given(
    state=st.integers(0, 1 << 24),
    token=st.integers(1, 1 << 14),
    align=st.integers(1, 512),
    kernel=st.sampled_from([1, 16, 32, 64, 128]),
)
def test_n_is_the_smallest_block_that_holds_a_state(state: int, token: int, align: int, kernel: int):
    n = block_tokens(state, token, Alignment(align, kernel, ""))
    assert n % kernel == 0
    assert n * token >= state
    assert n >= align
    unrounded = [tokens for tokens in range(n - kernel + 1, n + 1) if tokens >= align and tokens % align == 0]
    assert any(tokens == align or (tokens - align) * token < state for tokens in unrounded)


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=90, unique=True), min_size=1, max_size=3))
def test_no_layer_is_lost_and_groups_are_even(buckets: list[list[int]]):
    groups = split_layers(buckets)
    assert sorted(layer for group in groups for layer in group) == sorted(
        layer for bucket in buckets for layer in bucket
    )
    smallest, largest = min(map(len, buckets)), max(map(len, buckets))
    assert max(map(len, groups)) <= (largest if largest < 1.5 * smallest else smallest)


@given(
    layers=st.integers(2, 60),
    every=st.integers(2, 8),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.integers(1, 4),
    context=st.integers(1, 1 << 20),
    chunk=st.integers(1, 1 << 14),
)
def test_a_hybrid_of_any_size_adds_up(
    layers: int, every: int, tensor: int, pipeline: int, context: int, chunk: int
):
    if layers < max(every, pipeline):
        return
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": layers,
        "full_attention_interval": every,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    plan = make_plan(config, PlanRequest(tp=tensor, pp=pipeline, context=context, chunk_size=chunk, users=1))
    assert sum(group.layers for group in plan.groups) == layers
    assert plan.page_bytes >= plan.state_bytes
    assert plan.chunk_tokens % plan.block_size == 0
    assert plan.chunk_tokens - plan.block_size < max(chunk, plan.block_size)
    states = [group for group in plan.groups if group.kind == "recurrent"]
    assert sum(group.chunk_bytes for group in states) == (
        sum(group.layers for group in states) * tensor * plan.state_bytes
    )
    exact = sum(
        group.chunk_bytes
        * (min(4, plan.l1.chunks_per_user) if group.kind == "recurrent" else plan.l1.chunks_per_user)
        for group in plan.groups
    )
    assert plan.l1.bytes_per_user >= exact
