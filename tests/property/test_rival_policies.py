"""The rivals under random lives of objects: nothing is lost from sight, and nothing that must stay goes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from appliance.l1.eviction import POLICIES, make_policy
from appliance.l1.keys_only import KeysOnlyCache
from appliance.lookup import presence_of
from appliance.replay.layouts import layout_of_ratio
from tests.property.test_core_store_machine import ReturnsMachine


def machine_of(policy: str):
    """The machine of the default policy, with another one."""
    case = type(f"{policy}Machine", (ReturnsMachine,), {"policy": policy}).TestCase
    case.settings = settings(
        max_examples=40,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    return case


TestSimpleRule = machine_of("SIMPLE")
TestMarconi = machine_of("MARCONI")
TestSegmentLength = machine_of("SEGLEN")


def check_nodes(nodes) -> None:
    """The columns against what a walk over the index finds."""
    index = nodes.index
    present = index.present.array.reshape(-1, index.group_count) != 0
    attends, has_state = present[:, index.attention].any(axis=1), present[:, index.others].any(axis=1)
    found = set()
    for row in index.rows():
        continued = sum(bool(attends[child]) for child in index.children(row))
        if attends[row]:
            assert nodes.continued.view[row] == continued
        if has_state[row] or (attends[row] and not continued):
            found.add(row)
        if has_state[row]:
            before = index.parent_of(row)
            while before >= 0 and not has_state[before]:
                before = index.parent_of(before)
            depth = index.chunk_index.view
            assert nodes.gain.view[row] == depth[row] - (depth[before] if before >= 0 else -1)
    assert set(nodes.rows.tolist()) == found
    assert len(nodes) == len(found)


TREES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=1, max_size=40)


def keys_of(path: list[int]) -> list[bytes]:
    """A chunk's key says the whole path to it, as a hash chain does."""
    return [bytes([1, *path[: end + 1]]).ljust(32, b"\0") for end in range(len(path))]


@pytest.mark.parametrize("policy", POLICIES)
@given(TREES, st.sampled_from([0.0, 1.0, 5.7]), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_a_cache_of_keys_keeps_its_size_and_hits_only_what_it_holds(policy, paths, ratio, chunks):
    layout = layout_of_ratio(ratio)
    clock = iter(range(1 << 30))
    cache = KeysOnlyCache(
        make_policy(policy, lambda: float(next(clock))),
        layout.groups,
        512,
        capacity_extents=chunks * layout.chunk_units,
        entry_extents=layout.sizes,
    )
    index = cache.index
    seen: set[bytes] = set()
    for number, path in enumerate(paths):
        keys = keys_of(path)
        hit = cache.serve(keys, float(number))
        assert set(keys[:hit]) <= seen, "a hit on what no prompt has computed"
        seen.update(keys)
        held = int(index.extents.array.sum())
        assert held == cache.used_extents <= chunks * layout.chunk_units
        present = np.flatnonzero(index.present.array)
        assert cache.policy.covers(index, present).all(), "an entry that would stay for ever"
        for space in getattr(cache.policy, "_spaces", []):
            if policy in ("MARCONI", "SEGLEN"):
                check_nodes(space.nodes)
        if len(path) <= chunks:
            rows = index.rows_of(keys)
            assert presence_of(index, rows)[-1].all(), "the prompt's own end was not stored"
    drained = 0
    while index.present.array.any():
        before = cache.used_extents
        cache._make_room(chunks * layout.chunk_units - before + 1)
        drained += before - cache.used_extents
        assert cache.used_extents < before, "what nobody holds must come up as a candidate"
