"""The fingerprint: complete or refused, canonical, and compared field by field."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from appliance.errors import PartialFingerprint, RanksDisagree
from appliance.fingerprint import (
    REQUIRED_FIELDS,
    REQUIRED_GROUP_FIELDS,
    REQUIRED_LAYER_FIELDS,
    Fingerprint,
    assemble,
    canonical_text,
    differences,
    flatten,
    merge_layers,
)

LAYER = {
    "backend": "FLASH",
    "kernel_block_tokens": 16,
    "dtype": "bfloat16",
    "shape": [2, 16, 8],
    "strides": [128, 8, 1],
    "page_bytes": 512,
}
GROUP = {"kind": "attention", "block_tokens": 16, "page_bytes": 4096, "spec": {"heads": 8}}
FACTS: dict[str, Any] = {
    "model": {"name": "m", "architecture": "A", "weights": "w", "dtype": "bf16", "config": {"layers": 2}},
    "cache": {"dtype": "auto", "layout": "NHD"},
    "engine": {"name": "vllm", "version": "1", "platform": "cpu"},
    "parallel": {"tensor": 1, "pipeline": 1, "decode_context": 1},
    "draft": "none",
    "pages": {"layout": 1, "checksum": "mix64"},
}


def make(
    facts: dict[str, Any] = FACTS, groups: Any = (GROUP,), layers: Any = None, chunk: int = 256
) -> Fingerprint:
    return assemble(facts, groups, {"layers.0": LAYER} if layers is None else layers, chunk)


def without(tree: dict[str, Any], path: str, value: Any = ...) -> dict[str, Any]:
    """``tree`` without ``path``, or with another value there."""
    found = copy.deepcopy(tree)
    *parents, last = path.split(".")
    at = found
    for name in parents:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return found


def test_pinned():
    """A changed canonical form would separate every engine from its own bytes."""
    made = make()
    assert made.namespace == hashlib.sha256(made.canonical.encode()).hexdigest()[:32]
    assert made.namespace == "23984e8aa76b7913cd46f35b420f5240"
    assert made.model == "m"
    assert made.fields()["layers.layers.0.shape"] == [2, 16, 8]


@pytest.mark.parametrize("empty", [..., None, "", [], {}])
@pytest.mark.parametrize("path", REQUIRED_FIELDS)
def test_every_required_field_is_required(path, empty):
    with pytest.raises(PartialFingerprint) as caught:
        make(without(FACTS, path, empty))
    assert caught.value.details["field"] == path
    assert f"'{path}'" in caught.value.message


@pytest.mark.parametrize("empty", [..., None, ""])
@pytest.mark.parametrize("name", REQUIRED_GROUP_FIELDS)
def test_every_field_of_a_group_is_required(name, empty):
    with pytest.raises(PartialFingerprint) as caught:
        make(groups=[GROUP, without(GROUP, name, empty)])
    assert caught.value.details["field"] == f"groups[1].{name}"


@pytest.mark.parametrize("name", REQUIRED_LAYER_FIELDS)
def test_every_field_of_a_layer_is_required(name):
    with pytest.raises(PartialFingerprint) as caught:
        make(layers={"a": LAYER, "b": without(LAYER, name)})
    assert caught.value.details["field"] == f"layers.b.{name}"


@pytest.mark.parametrize("changes", [{"groups": []}, {"layers": {}}, {"facts": {}}])
def test_an_empty_fingerprint_is_refused(changes):
    with pytest.raises(PartialFingerprint):
        make(**changes)


@pytest.mark.parametrize("value", [0, -1, "4096", 4096.0, True])
def test_page_bytes_of_a_group_count_bytes(value):
    with pytest.raises(PartialFingerprint) as caught:
        make(groups=[{**GROUP, "page_bytes": value}])
    assert caught.value.details["field"] == "groups[0].page_bytes"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_equal_nothing_are_refused(value):
    with pytest.raises(PartialFingerprint, match=r"cache\.scale\[1\]"):
        make(without(FACTS, "cache.scale", [1.0, value]))


@pytest.mark.parametrize("value", [b"bytes", {1: 2}, {1, 2}, object()])
def test_values_without_canonical_form_are_refused(value):
    with pytest.raises(PartialFingerprint, match=r"cache\.extra"):
        make(without(FACTS, "cache.extra", value))


def test_zero_and_false_are_values():
    assert make(without(FACTS, "parallel.tensor", 0)).record["parallel"]["tensor"] == 0
    assert make(without(FACTS, "draft", value=False)).record["draft"] is False


SCALARS = (
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2, width=16) | st.text("ab", max_size=2)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
RECORDS = st.dictionaries(st.text("xyz", min_size=1, max_size=2), TREES, max_size=4)


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(list(value))}
    if isinstance(value, list):
        return tuple(shuffled(inner) for inner in value)
    return value


@given(RECORDS)
@settings(max_examples=150, deadline=None)
def test_canonical_text_does_not_depend_on_order_or_sequence_type(record):
    assert canonical_text(record) == canonical_text(shuffled(record))
    assert json.loads(canonical_text(record)) == record
    assert differences(record, shuffled(record)) == []


@given(RECORDS, RECORDS)
@settings(max_examples=200, deadline=None)
def test_records_differ_if_and_only_if_a_field_differs(ours, theirs):
    found = differences(ours, theirs)
    assert (canonical_text(ours) == canonical_text(theirs)) == (found == [])
    assert [entry.field for entry in found] == sorted(entry.field for entry in found)
    left, right = dict(flatten(ours)), dict(flatten(theirs))
    for entry in found:
        assert entry.ours == left.get(entry.field)
        assert entry.theirs == right.get(entry.field)


@pytest.mark.parametrize(
    "ours, theirs", [(1, 1.0), (1, True), (0.0, -0.0), ([1], [1.0]), ({}, []), (None, "")]
)
def test_values_that_python_calls_equal_are_told_apart(ours, theirs):
    [found] = differences({"a": ours}, {"a": theirs})
    assert found.field == "a"
    assert (
        make(without(FACTS, "cache.x", ours)).namespace != make(without(FACTS, "cache.x", theirs)).namespace
    )


@pytest.mark.parametrize(
    "path, value", [("cache.dtype", "fp8"), ("model.weights", "v2"), ("parallel.tensor", 2)]
)
def test_a_difference_names_its_field_and_both_values(path, value):
    ours, theirs = make(), make(without(FACTS, path, value))
    assert ours.namespace != theirs.namespace
    [found] = differences(ours.record, theirs.record)
    assert (found.field, found.ours, found.theirs) == (path, ours.fields()[path], value)


def test_differences_reach_into_groups_layers_and_chunk_size():
    theirs = make(
        groups=[{**GROUP, "page_bytes": 8192}],
        layers={"layers.0": {**LAYER, "strides": [1, 8, 128]}},
        chunk=512,
    )
    fields = [entry.field for entry in differences(make().record, theirs.record)]
    assert fields == ["chunk_tokens", "groups[0].page_bytes", "layers.layers.0.strides"]


def test_an_absent_field_is_told_from_null():
    [found] = differences({"a": None, "b": 1}, {"b": 1})
    assert (found.field, found.ours, found.theirs) == ("a", None, None)


def test_layers_of_all_ranks_become_one_map():
    other = {**LAYER, "dtype": "float32"}
    merged = merge_layers({0: {"a": LAYER}, 1: {"a": LAYER, "b": other}, 2: {"c": LAYER}})
    assert merged == {"a": LAYER, "b": other, "c": LAYER}


def test_ranks_that_describe_a_layer_differently_are_named():
    with pytest.raises(RanksDisagree, match="Ranks 0 and 3") as caught:
        merge_layers({3: {"a": {**LAYER, "backend": "OTHER", "dtype": "f32"}}, 0: {"a": LAYER}})
    assert caught.value.details == {"layer": "a", "fields": ["backend", "dtype"]}
