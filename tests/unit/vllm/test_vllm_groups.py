"""Shards and replicas over ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import UnsupportedGeometry
from connector.vllm.groups import RankPlace, Ranks, group_division, worker_groups


def attention(heads_per_rank: int, **attributes: Any) -> Any:
    spec = {"num_kv_heads": heads_per_rank, "max_tp_shards": None, "dcp_sharded": True, **attributes}
    return SimpleNamespace(**spec)


def state(*, replicated: bool = False) -> Any:
    return SimpleNamespace(tp_replicated=replicated, dcp_sharded=False)


def division(spec: Any, tensor: int, kv_heads: int, context: int = 1) -> tuple[int, int, int]:
    divided = group_division(spec, Ranks(tensor, 1, context, kv_heads))
    return divided.tensor_shards, divided.context_shards, divided.replicas


def test_a_latent_cache_is_replicated_over_tensor_ranks_and_sharded_over_context_ranks() -> None:
    latent = attention(1, max_tp_shards=1)
    assert division(latent, 8, 1) == (1, 1, 8)
    assert division(latent, 8, 1, context=8) == (1, 8, 1)
    assert division(latent, 8, 1, context=4) == (1, 4, 2)


def test_grouped_heads_are_replicated_where_there_are_fewer_heads_than_ranks() -> None:
    assert division(attention(1), 8, 2) == (2, 1, 4)
    assert division(attention(1), 8, 2, context=2) == (2, 2, 2)
    assert division(attention(2), 4, 8) == (4, 1, 1)


def test_a_layer_whose_heads_do_not_add_up_counts_as_sharded() -> None:
    assert division(attention(4), 8, 2) == (8, 1, 1)


def test_states_are_sharded_unless_they_say_otherwise() -> None:
    assert division(state(), 8, 1, context=8) == (8, 1, 1)
    assert division(state(replicated=True), 8, 1) == (1, 1, 8)


def test_a_group_of_unequal_layers_takes_the_finest_division() -> None:
    mixed = SimpleNamespace(
        dcp_sharded=True, kv_cache_specs={"a": attention(1, max_tp_shards=1), "b": attention(2)}
    )
    assert division(mixed, 4, 8) == (4, 1, 1)


def test_context_ranks_that_hold_different_heads_are_refused() -> None:
    with pytest.raises(UnsupportedGeometry):
        division(attention(2), 4, 8, context=2)


@given(
    heads=st.integers(0, 2),
    copies=st.integers(0, 2),
    context=st.integers(0, 2),
    stages=st.integers(1, 3),
)
def test_every_shard_is_held_by_each_of_its_replicas_once(
    heads: int, copies: int, context: int, stages: int
) -> None:
    tensor, kv_heads = 2 ** (heads + copies), 2**heads
    context_ranks = 2 ** min(context, copies)
    ranks = Ranks(tensor, stages, context_ranks, kv_heads)
    spec = attention(1)
    config: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    held = [
        worker_groups(config, ranks, RankPlace(rank, stage, rank % context_ranks))[0]
        for stage in range(stages)
        for rank in range(tensor)
    ]
    divided = group_division(spec, ranks)
    everyone = {
        (shard, replica) for shard in range(divided.shards * stages) for replica in range(divided.replicas)
    }
    assert sorted((entry.shard, entry.replica) for entry in held) == sorted(everyone)
