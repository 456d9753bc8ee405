"""Geometry against the published figures, pages against what they must hold, prompts against a trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import UnsupportedGeometry
from appliance.geometry import check_groups
from appliance.served_models import MODELS, geometry_of, split_layers
from connector.simulate.content import Content
from connector.simulate.figures import Figures
from connector.simulate.requests import BlockPool
from connector.simulate.workload import Conversations, read_trace, trace_tokens


@pytest.mark.parametrize(
    ("model", "tensor", "align", "block_tokens"),
    [
        ("kimi-linear-48b", 1, 16, 1888),
        ("kimi-linear-48b", 2, 16, 944),
        ("kimi-linear-48b", 1, 0, 1920),
        ("kimi-linear-48b", 2, 0, 1024),
        ("kimi-linear-48b", 4, 0, 512),
        ("kimi-linear-48b", 8, 0, 256),
        ("kimi-k3", 8, 0, 768),
        ("llama-8b", 4, 0, 16),
    ],
)
def test_the_unified_block_size_is_the_published_one(model: str, tensor: int, align: int, block_tokens: int):
    assert geometry_of(model, tensor, alignment_tokens=align).block_tokens == block_tokens


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("kimi-linear-48b", [7, 7, 6, 7]),
        ("kimi-k3", [23, 23, 23, 24]),
        ("qwen3-next", [12, 12, 12, 12]),
        ("llama-8b", [32]),
    ],
)
def test_layers_are_grouped_as_vllm_groups_them(model: str, layers: list[int]):
    geometry = geometry_of(model, 2)
    assert [len(each.layers) for each in geometry.groups] == layers
    names = [name for each in geometry.groups for name in each.layers]
    assert len(set(names)) == len(names) == sum(layers)
    assert geometry.tensors == max(layers)


def test_a_bucket_that_is_little_larger_is_not_split():
    assert [len(group) for group in split_layers(list("abcdefghijklm"), list("nopqrstuvwxy"))] == [12, 13]


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [1, 64])
def test_a_geometry_can_be_served_and_its_states_fit_a_block(model: str, tensor: int, scale: int):
    geometry = geometry_of(model, tensor, scale=scale)
    check_groups([each.group for each in geometry.groups])
    for each in geometry.groups:
        assert each.group.shards * each.group.replicas == tensor
        assert each.run_bytes <= geometry.page_bytes
        assert each.run_bytes % 8 == 0
        places = {each.place(rank) for rank in range(tensor)}
        assert places == set(itertools.product(range(each.group.shards), range(each.group.replicas)))


def test_ratios_stay_when_pages_are_scaled():
    real, small = (geometry_of("kimi-linear-48b", 2, scale=scale) for scale in (1, 64))
    for large, little in zip(real.groups, small.groups, strict=True):
        assert little.run_bytes * 64 == pytest.approx(large.run_bytes, rel=0.01)
    assert small.block_tokens == real.block_tokens


@pytest.mark.parametrize(("model", "tensor"), [("gpt-2", 1), ("kimi-linear-48b", 3), ("llama-8b", 0)])
def test_what_cannot_be_split_is_refused(model: str, tensor: int):
    with pytest.raises(UnsupportedGeometry):
        geometry_of(model, tensor)


# --- pages --------------------------------------------------------------------------------------------------------


def test_a_page_is_right_only_where_it_belongs():
    content = Content(4096)
    page = np.zeros(512, dtype=np.uint64)
    places = [(b"k" * 32, 0, 0, 0, 0), (b"j" * 32, 0, 0, 0, 0)]
    places += [(b"k" * 32, *(int(n == at) for n in range(4))) for at in range(4)]
    seeds = [content.seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    for seed in seeds:
        content.fill(page, seed)
        assert [content.first_difference(page, other) for other in seeds].count(-1) == 1


@pytest.mark.parametrize("byte", [0, 7, 8, 2000, 4095])
def test_one_wrong_bit_is_found_where_it_is(byte: int):
    content = Content(4096)
    seed = content.seed(b"k" * 32, 1, 2, 3, 4)
    page = np.zeros(512, dtype=np.uint64)
    content.fill(page, seed)
    page.view(np.uint8)[byte] ^= 1
    assert content.first_difference(page, seed) == byte // 8 * 8


def test_a_poisoned_page_is_wrong_whatever_it_held():
    content = Content(4096)
    seed = content.seed(b"k" * 32, 0, 0, 0, 0)
    page = np.zeros(512, dtype=np.uint64)
    content.fill(page, seed)
    content.poison(page)
    assert content.first_difference(page, seed) == 0


# --- prompts ------------------------------------------------------------------------------------------------------


def test_equal_ids_of_a_trace_are_equal_tokens_and_no_others():
    one, other = trace_tokens([0, 1, 2], 1300), trace_tokens([0, 1, 3], 1536)
    assert len(one) == 1300
    assert np.array_equal(one[:1024], other[:1024])
    assert not np.intersect1d(one[1024:], other[1024:]).size


def test_a_trace_is_dealt_out_to_its_engines(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * n, "input_length": 600, "hash_ids": [n, 9]} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dealt = [list(read_trace(path, engine=e, engines=2, most_tokens=550)) for e in range(2)]
    assert [[arrival.at_seconds for arrival in mine] for mine in dealt] == [[0.0, 2.0, 4.0], [1.0, 3.0]]
    assert {len(arrival.prompt) for mine in dealt for arrival in mine} == {550}
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1 is no request"):
        list(read_trace(path, engine=0, engines=1, most_tokens=10))


def test_conversations_grow_share_their_system_prompts_and_are_the_same_for_every_engine():
    conversations = Conversations(256, 100_000, 10.0)
    turns = [conversations.prompt(5, turn) for turn in range(1, 4)]
    for shorter, longer in itertools.pairwise(turns):
        assert len(longer) > len(shorter)
        assert np.array_equal(longer[: len(shorter)], shorter)
    same_system, other_system = conversations.prompt(9, 1), conversations.prompt(6, 1)
    assert np.array_equal(same_system[:256], turns[0][:256])
    assert not np.array_equal(other_system[:256], turns[0][:256])
    again = Conversations(256, 100_000, 10.0).prompt(5, 3)
    assert np.array_equal(again, turns[2])
    arrivals = list(itertools.islice(conversations.arrivals(1), 50))
    assert all(a.at_seconds < b.at_seconds for a, b in itertools.pairwise(arrivals))


# --- what an engine is made of --------------------------------------------------------------------------------------


def test_a_block_is_handed_out_once():
    pool = BlockPool(4)
    first = pool.take(3)
    assert first is not None
    assert pool.take(2) is None
    pool.give_back(first)
    assert sorted(pool.take(4) or []) == [0, 1, 2, 3]


def test_figures_add_up():
    parts = [Figures(requests=2, hit_tokens=50, asked_tokens=100), Figures(requests=1, asked_tokens=100)]
    parts[0].misses["evicted"] += 1
    parts[1].misses["evicted"] += 2
    parts[0].found_wrong(["here"])
    total = Figures.total(parts).summary()
    assert (total["requests"], total["hit_rate"], total["misses"]) == (3, 0.25, {"evicted": 3})
    assert (total["wrong_pages"], total["wrong"]) == (1, ["here"])
    assert "wrong pages     1" in Figures.total(parts).text()
