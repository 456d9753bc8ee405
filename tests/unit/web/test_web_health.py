"""The health sentences: what is wrong comes first, and what is fine is not made a warning."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.protocol.status import DaemonStatus
from tests.integration._peer import (
    GIB,
    degraded_status,
    empty_status,
    engine,
    full_status,
    l1,
    lease_end,
    populating_status,
)
from web.health import Health, Level, health_of
from web.poller import Snapshot


def health(document: dict[str, Any], **changes: Any) -> Health:
    snapshot = Snapshot(status=DaemonStatus.model_validate(document), age_seconds=0.3, polls=3, **changes)
    return health_of(snapshot, endpoint="127.0.0.1:6555", now_unix=1_800_000_000.0)


def test_an_idle_daemon_is_ready_and_nothing_else() -> None:
    found = health(empty_status())
    assert found.headline.text == "Ready. L1 of 64.0 GiB is empty and serves no engine yet."
    assert found.findings == ()
    assert found.level is Level.OK


def test_the_worst_comes_first() -> None:
    levels = [finding.level for finding in health(degraded_status()).findings]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] is Level.PROBLEM


def test_populating_is_no_trouble() -> None:
    found = health(populating_status())
    assert found.level is Level.INFO
    assert "Populating L1" in found.headline.text


def test_a_daemon_that_stops_answering_is_a_problem_with_its_time() -> None:
    found = health(full_status(), failing_seconds=35.0, error_code="daemon_unreachable")
    assert found.headline.level is Level.PROBLEM
    assert "07:59:25 UTC, for 35 s" in found.headline.text


def test_another_failure_than_silence_is_named() -> None:
    found = health(
        full_status(), failing_seconds=35.0, error_code="invalid_field", error="The field is wrong."
    )
    assert "The field is wrong." in found.headline.text


@pytest.mark.parametrize(
    ("snapshot", "text", "level"),
    [
        (Snapshot(), "Asking the daemon at 127.0.0.1:6555", Level.INFO),
        (
            Snapshot(polls=2, failing_seconds=4.0, error_code="daemon_unreachable", error="no answer"),
            "No daemon has answered at 127.0.0.1:6555",
            Level.PROBLEM,
        ),
        (
            Snapshot(polls=2, failing_seconds=4.0, error_code="unsupported_version", error="Version 2."),
            "gives no status that can be read: Version 2.",
            Level.PROBLEM,
        ),
    ],
)
def test_before_the_first_status(snapshot: Snapshot, text: str, level: Level) -> None:
    found = health_of(snapshot, endpoint="127.0.0.1:6555", now_unix=0.0)
    assert text in found.headline.text
    assert found.headline.level is level


def test_released_leases_are_no_warning_and_expired_ones_are() -> None:
    fine = health(empty_status(lease_end_causes={"released": 9}, lease_ends=[lease_end(1, "released")]))
    bad = health(empty_status(lease_end_causes={"released": 9, "expired": 2}))
    assert fine.level is Level.OK
    assert [finding.text for finding in bad.findings] == [
        "2 leases since start were not released by their engine: 2 expired."
    ]


def test_a_refusal_that_costs_nothing_is_a_note_and_one_that_costs_hits_a_warning() -> None:
    status = full_status()
    costly = next(f for f in health(status).findings if f.anchor == "refusals")
    status["refusals"][0]["lookups"] = 0
    free = next(f for f in health(status).findings if f.anchor == "refusals")
    assert (costly.level, free.level) == (Level.WARNING, Level.INFO)
    assert "4,120 lookups would have hit" in costly.text


def test_a_pair_that_refuses_each_other_counts_once() -> None:
    status = full_status()
    there = status["refusals"][0]
    back = {**there, "namespace": there["other_namespace"], "other_namespace": there["namespace"]}
    status["refusals"].append(back)
    text = next(f.text for f in health(status).findings if f.anchor == "refusals")
    assert text.startswith("1 pair of fingerprints")


def test_memory_that_is_all_held_is_a_warning() -> None:
    held = l1(occupied_bytes=60 * GIB, leased_bytes=58 * GIB, free_bytes=4 * GIB)
    texts = [f.text for f in health(empty_status(l1=held)).findings if f.level is Level.WARNING]
    assert any("is held and cannot be evicted" in text for text in texts)


@pytest.mark.parametrize(
    ("state", "level"),
    [("ready", None), ("registering", Level.INFO), ("suspect", Level.WARNING), ("refused", Level.WARNING)],
)
def test_engine_states(state: str, level: Level | None) -> None:
    quiet = {"asked_tokens": 0, "hit_tokens": 0}
    found = health(empty_status(engines=[engine("a", state=state, reason="Because.", **quiet)])).findings
    assert [finding.level for finding in found] == ([] if level is None else [level])


def test_an_engine_that_is_not_as_planned_is_a_warning() -> None:
    deviating = engine("e", planned_block_size=944, deviation="The engine registered with 1024.")
    as_planned = engine("f", planned_block_size=1024)
    found = [
        each
        for each in health(empty_status(engines=[deviating, as_planned])).findings
        if "planned" in each.text
    ]
    assert [(each.level, each.text) for each in found] == [
        (Level.WARNING, "Engine e registered with another block size than the planned 944.")
    ]
