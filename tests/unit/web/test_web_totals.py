"""Counters made of engines that come and go never fall and never jump."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from appliance.protocol.status import DaemonStatus
from tests.integration._peer import NS_A, NS_B, empty_status, engine
from web.totals import COUNTER_NAMES, EngineCounters, EngineTotals


def look(totals: EngineTotals, *engines: dict[str, Any]) -> dict[str, EngineCounters]:
    status = DaemonStatus.model_validate(empty_status(engines=list(engines)))
    return dict(totals.update(status).by_namespace)


def counting(engine_id: str, value: int, namespace: str = NS_A) -> dict[str, Any]:
    return engine(engine_id, namespace=namespace, **dict.fromkeys(COUNTER_NAMES, value))


def test_what_was_counted_before_the_first_look_is_left_out_and_later_engines_count_whole() -> None:
    totals = EngineTotals()
    assert look(totals, counting("a", 100))[NS_A] == EngineCounters()
    found = look(totals, counting("a", 110), counting("b", 7), counting("c", 3, NS_B))
    assert found[NS_A].lookups == 17
    assert found[NS_B].bytes_stored == 3


def test_an_engine_that_begins_again_counts_from_zero() -> None:
    totals = EngineTotals()
    look(totals)
    look(totals, counting("a", 100))
    assert look(totals, counting("a", 4))[NS_A].loads == 104


def test_an_engine_that_leaves_keeps_what_it_did() -> None:
    totals = EngineTotals()
    look(totals)
    look(totals, counting("a", 100))
    assert look(totals)[NS_A].hit_tokens == 100
    assert look(totals, counting("a", 100))[NS_A].hit_tokens == 200, "it left and came back with new counts"


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1000)), max_size=12))
def test_totals_never_fall(looks: list[dict[str, int]]) -> None:
    totals, last = EngineTotals(), 0
    for engines in looks:
        found = look(totals, *(counting(name, value) for name, value in engines.items()))
        now = found.get(NS_A, EngineCounters()).asked_tokens
        assert now >= last
        last = now
