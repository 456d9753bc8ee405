"""What a chunk weighs, from a model's published shape."""

from __future__ import annotations

import pytest

from appliance.errors import UnsupportedGeometry
from appliance.geometry import GroupKind
from appliance.replay.layouts import layout_of_ratio, layouts_of


def megabytes(units: int) -> int:
    return round(units * 1024 / 1e6)


def test_kimi_k3_at_tp_8():
    found = layouts_of("kimi-k3-tp8")
    assert (megabytes(found.once.attention_units), megabytes(found.once.state_units)) == (21, 449)
    assert found.padded.attention_units == 8 * found.once.attention_units
    assert megabytes(found.padded.state_units) == 488
    assert found.units_of_gb(500) == 500 * 10**9 // 1024


def test_kimi_linear_at_tp_2():
    found = layouts_of("kimi-linear-48b-tp2").once
    assert found.attention_units * 1024 == 7 * 1024 * 576 * 2
    assert megabytes(found.state_units) == 43


def test_a_model_without_states():
    found = layouts_of("llama-8b-tp2").once
    assert found.state_units == 0
    assert [group.kind for group in found.groups] == [GroupKind.ATTENTION]


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k3-tp0", "gpt-9-tp8", "kimi-k3-tp7", ""])
def test_unknown_geometries_are_refused(name):
    with pytest.raises(UnsupportedGeometry):
        layouts_of(name)


def test_ratios():
    layout = layout_of_ratio(5.7)
    assert layout.state_ratio == 5.7
    assert len(layout.groups) == len(layout.sizes) == 2
    assert layout_of_ratio(0).sizes == [layout.attention_units]
