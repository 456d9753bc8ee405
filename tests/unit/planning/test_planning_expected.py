"""What was planned against what registers."""

from __future__ import annotations

import pytest

from appliance.errors import InvalidSettings
from appliance.geometry import GroupKind, ObjectGroup
from appliance.planning.expected import PlannedBlocks, deviation, registered_block_tokens
from appliance.settings import load_settings


@pytest.mark.parametrize(
    ("text", "model", "planned"),
    [
        ("", "a/b", 0),
        ("944", "a/b", 944),
        ("a/b=944", "a/b", 944),
        ("a/b=944", "c/d", 0),
        ("a/b=944, 16 ,c/d=1536", "c/d", 1536),
        ("a/b=944,16", "x/y", 16),
        ("/models/kimi/=944", "kimi", 944),
        ("org/kimi=944", "kimi", 944),
        ("org/kimi=944,other/kimi=16", "other/kimi", 16),
        ("a=b=7", "a=b", 7),
    ],
)
def test_a_model_finds_its_plan(text: str, model: str, planned: int):
    assert PlannedBlocks.of(text).for_model(model) == planned


@pytest.mark.parametrize("text", ["0", "-3", "a/b", "a/b=", "a/b=x", "a=1,b", "99999999999", "\u0664"])
def test_what_is_no_plan_is_named(text: str):
    with pytest.raises(ValueError, match="MODEL=944"):
        PlannedBlocks.of(text)
    with pytest.raises(InvalidSettings, match="planned_block_size"):
        load_settings({"planned_block_size": text})


def test_a_number_in_the_file_is_text_too():
    assert load_settings({"planned_block_size": 944}).planned_block_size == "944"


def test_only_another_number_deviates():
    assert deviation(0, 944) == deviation(944, 944) == ""
    told = deviation(944, 1024)
    assert "1024" in told
    assert "944" in told
    assert "plan again" in told


def test_n_is_the_smallest_block():
    groups = [
        ObjectGroup(index, f"g{index}", GroupKind.ATTENTION, tokens, 1, 1, context_shards=8)
        for index, tokens in enumerate((1536, 3072))
    ]
    assert registered_block_tokens(groups) == 1536
