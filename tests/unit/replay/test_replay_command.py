"""`pagewarden bench trace`, run on the small trace."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.replay.replay import REPLAYED
from tests.support.small_trace import SMALL_TRACE


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "trace", str(SMALL_TRACE), *arguments])


def rows(*arguments: str) -> list[dict]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_every_policy_at_every_capacity_and_ratio():
    found = rows("--policy", "all", "--capacity", "0.05,0.2", "--state-ratio", "0,5.7")
    assert {(row["policy"], row["capacity"], row["state_ratio"]) for row in found} == {
        (policy, capacity, ratio) for policy in REPLAYED for capacity in (0.05, 0.2) for ratio in (0, 5.7)
    }
    assert len(found) == 4 * len(REPLAYED)
    assert {row["policy"] for row in found if row["default"]} == {"RETURNS"}
    assert {row["trace"] for row in found} == {"small_trace"}
    assert all(0 <= row["hit_rate"] <= row["no_limit_hit_rate"] < 1 for row in found)
    assert all(row["requests_per_second"] > 0 for row in found)


def test_a_geometry_in_gigabytes_compares_with_every_rank_padded():
    found = rows("--policy", "lru,simple", "--l1-gb", "20,60", "--geometry", "kimi-k3-tp8")
    assert [row["policy"] for row in found] == ["LRU-PADDED", "LRU", "SIMPLE"] * 2
    assert [row["l1_gb"] for row in found] == [20] * 3 + [60] * 3
    assert {row["geometry"] for row in found} == {"kimi-k3-tp8"}
    assert {row["state_ratio"] for row in found} == {21.163}
    shares = {row["l1_gb"]: row["capacity"] for row in found}
    assert shares[60] == pytest.approx(3 * shares[20], rel=1e-4)
    assert found[0]["hit_rate"] <= found[1]["hit_rate"]


def test_both_kinds_of_tables_when_both_are_asked_for():
    found = rows("--policy", "lru", "--capacity", "0.1", "--l1-gb", "20", "--geometry", "kimi-k3-tp8")
    assert [row["policy"] for row in found] == ["LRU", "LRU-PADDED", "LRU"]
    assert "l1_gb" not in found[0]


def test_halves():
    whole, first, second = (
        rows("--policy", "lru", "--capacity", "0.1", *more)[0]
        for more in ([], ["--half", "first"], ["--half", "second"])
    )
    assert (first["trace"], second["trace"]) == ("small_trace.first", "small_trace.second")
    assert len({whole["hit_rate"], first["hit_rate"], second["hit_rate"]}) == 3


def test_the_tables_name_the_default_and_the_limit():
    done = run("--policy", "returns,lru,reference", "--capacity", "0.1")
    assert done.exit_code == 0
    assert "RETURNS (default)" in done.output
    assert "reference (clairvoyant)" in done.output
    assert "small_trace: state : attention = 5.7" in done.output
    assert "Without a limit: 0.762" in done.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--policy", "arc"], "ARC"),
        (["--policy", ""], "--policy"),
        (["--capacity", "0"], "--capacity"),
        (["--capacity", "1.5"], "--capacity"),
        (["--capacity", "much"], "--capacity"),
        (["--state-ratio", "-1"], "--state-ratio"),
        (["--state-ratio", "nan"], "--state-ratio"),
        (["--l1-gb", "500"], "--geometry"),
        (["--geometry", "kimi-k3-tp8"], "--l1-gb"),
        (["--half", "third"], "third"),
    ],
)
def test_bad_options_are_named(arguments, named):
    done = run(*arguments)
    assert done.exit_code == 2
    assert named in done.output


def test_bad_input_ends_with_its_code(tmp_path):
    done = run("--l1-gb", "5", "--geometry", "gpt-9-tp8")
    assert done.exit_code == 1
    assert "unsupported_geometry" in done.output
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 1}\n')
    done = CliRunner().invoke(app, ["bench", "trace", str(bad)])
    assert done.exit_code == 1
    assert "invalid_trace" in done.output
    assert "Line 1" in done.output
    assert "Traceback" not in done.output
