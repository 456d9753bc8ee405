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


LATENT = attention(1, max_tp_shards=1)
CONFIGS = st.integers(0, 3).map(lambda exponent: 2**exponent)


def config(*groups: tuple[Any, bool]) -> Any:
    """What one worker is given: each group's spec, and whether the worker's stage has layers of it."""
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"] if held else [])
            for spec, held in groups
        ]
    )


def grouped_heads(tensor: int, kv_heads: int) -> Any:
    """Attention as vLLM describes it on one of `tensor` ranks."""
    return attention(max(1, kv_heads // tensor))


@given(tensor=CONFIGS, context=CONFIGS, kv_heads=CONFIGS, stages=st.integers(1, 4), data=st.data())
def test_every_shard_is_held_by_each_of_its_replicas_once(
    tensor: int, context: int, kv_heads: int, stages: int, data: st.DataObject
) -> None:
    """Over all ranks, for every kind of group, whichever stages have layers of it."""
    context = min(context, tensor)
    ranks = Ranks(tensor, stages, context, kv_heads)
    specs = [LATENT, state(), state(replicated=True)]
    if (
        tensor // min(tensor, kv_heads) % context == 0
    ):  # else the ranks that share tokens hold different heads
        specs.append(grouped_heads(tensor, kv_heads))
    layers = [data.draw(st.lists(st.booleans(), min_size=stages, max_size=stages).filter(any)) for _ in specs]
    named = [
        worker_groups(
            config(*((spec, held[stage]) for spec, held in zip(specs, layers, strict=True))),
            ranks,
            RankPlace(rank, stage, rank % context),
        )
        for stage in range(stages)
        for rank in range(tensor)
    ]
    for index, spec in enumerate(specs):
        divided = group_division(spec, ranks)
        assert divided.shards * divided.replicas == tensor
        places = [(groups[index].shard, groups[index].replica) for groups in named]
        assert sorted(places) == [
            (shard, replica)
            for shard in range(divided.shards * stages)
            for replica in range(divided.replicas)
        ]
        absent = {groups[index].shard for groups in named if not groups[index].held}
        assert absent == {
            stage * divided.shards + shard
            for stage in range(stages)
            if not layers[index][stage]
            for shard in range(divided.shards)
        }


@given(tensor=CONFIGS, context=CONFIGS, kv_heads=CONFIGS)
def test_replicas_hold_the_same_heads_and_tokens(tensor: int, context: int, kv_heads: int) -> None:
    """Against vLLM's own rule: rank r has head r * heads // ranks, and context rank r % context."""
    context = min(context, tensor)
    if tensor // min(tensor, kv_heads) % context:
        return
    ranks, spec = Ranks(tensor, 1, context, kv_heads), grouped_heads(tensor, kv_heads)
    bytes_of: dict[int, set[tuple[int, int]]] = {}
    for rank in range(tensor):
        (group,) = worker_groups(config((spec, True)), ranks, RankPlace(rank, 0, rank % context))
        first_head = rank * kv_heads // tensor
        bytes_of.setdefault(group.shard, set()).add((first_head, rank % context))
    assert all(len(held) == 1 for held in bytes_of.values())
    assert len({next(iter(held)) for held in bytes_of.values()}) == len(bytes_of)
