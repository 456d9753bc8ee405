"""The metrics parse, add up, and are documented one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.integration._peer import (
    KIMI,
    NS_A,
    empty_status,
    engine,
    full_status,
    group,
    hostile_status,
    serving,
    wait_for,
)
from tests.integration._web import RunningWeb, running_web, settings_for

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
BASE_UNITS = re.compile(
    r"_(bytes|seconds|tokens|objects|chunks|rows|info|total)$|^pagewarden_(up|ready|gate_open|engines|refusals|leases|catalog_ok)$"
)


@pytest.fixture
def full() -> Iterator[RunningWeb]:
    with serving(full_status()) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        yield web


def samples_of(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def scraped(web: RunningWeb) -> list[Sample]:
    answer = web.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return samples_of(answer.text)


def documented() -> dict[str, tuple[str, set[str]]]:
    rows = re.findall(r"^\| `(pagewarden_\w+)` \| (\w+) \| ([^|]*)\|", DOCS.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == len({name for name, _, _ in rows}), "a metric is documented twice"
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_documented_metrics_are_exactly_those_exposed(full: RunningWeb) -> None:
    families = list(text_string_to_metric_families(full.client.get("/metrics").text))
    exposed = {
        sample.name: (family.type, set(sample.labels)) for family in families for sample in family.samples
    }
    assert exposed == documented()


def test_names_are_in_base_units_with_help_text(full: RunningWeb) -> None:
    for family in text_string_to_metric_families(full.client.get("/metrics").text):
        assert family.documentation
        for sample in family.samples:
            assert BASE_UNITS.search(sample.name), f"{sample.name} names no base unit"


def test_states_add_up_to_what_is_populated(full: RunningWeb) -> None:
    samples = scraped(full)
    states = sum(sample.value for sample in samples if sample.name == "pagewarden_l1_bytes")
    assert [s.value for s in samples if s.name == "pagewarden_l1_populated_bytes"] == [states]


def test_no_series_appears_twice_and_no_label_is_an_engine_or_a_request(full: RunningWeb) -> None:
    samples = scraped(full)
    series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples]
    assert len(series) == len(set(series))
    values = {value for sample in samples for value in sample.labels.values()}
    assert not [value for value in values if value.startswith(("vllm-", "chatcmpl-"))]


def test_groups_that_share_every_label_are_added() -> None:
    twin = group(NS_A, KIMI, 0, "kda", "recurrent", objects=2)
    status = empty_status(groups=[twin, {**twin, "namespace": NS_A[:12] + "f" * 20, "objects": 3}])
    with serving(status) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        found = [s.value for s in scraped(web) if s.name == "pagewarden_group_objects"]
    assert found == [5.0]


def test_hostile_names_are_escaped() -> None:
    with serving(hostile_status()) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        names = {sample.name for sample in scraped(web)}
    assert names <= documented().keys()


def test_openmetrics_is_spoken_where_asked_for(full: RunningWeb) -> None:
    answer = full.client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_totals_outlive_the_engines_that_made_them() -> None:
    status = empty_status(engines=[engine("a", hit_tokens=100), engine("b", hit_tokens=1_000)])
    with serving(status) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()

        def polled_again() -> None:
            seen = peer.requests.count("status")
            web.state.poller.snapshot()
            wait_for(lambda: peer.requests.count("status") > seen + 1, "another poll")

        def hit_tokens() -> list[float]:
            return [s.value for s in scraped(web) if s.name == "pagewarden_hit_tokens_total"]

        assert hit_tokens() == [0.0], "what was counted before this process began belongs to another one"
        peer.status = empty_status(engines=[engine("a", hit_tokens=130)])
        polled_again()
        assert hit_tokens() == [30.0]
        peer.status = empty_status(engines=[engine("c", hit_tokens=5)])
        polled_again()
        assert hit_tokens() == [35.0]
