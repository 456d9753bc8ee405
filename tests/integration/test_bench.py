"""The benchmarks run and give what they promise; their figures are of the machine and are not judged here."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from connector.bench import copy_ratios, lookup


def test_a_small_lookup_benchmark_gives_its_figures():
    figures = lookup.measure(objects=2000, rounds=20)
    assert figures["indexed"] >= 2000
    assert figures["indexed"] % (lookup.CHUNKS * 4) == 0
    for name in ("small_vs_echo", "long_prompt_ms", "long_prompt_vs_echo"):
        assert figures[name] > 0  # type: ignore[literal-required]
    assert figures["long_prompt_vs_echo"] > figures["small_vs_echo"]
    assert str(figures["indexed"]) in lookup.table(figures)


def test_the_copy_benchmark_gives_a_row_for_each_page_size_and_direction(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(copy_ratios, "ROUNDS", 1)
    monkeypatch.setattr(copy_ratios, "PAGE_BYTES", (65536, 1 << 20))
    monkeypatch.setattr(copy_ratios, "BASELINE_BYTES", 32 << 20)
    monkeypatch.setattr(copy_ratios, "OBJECT_BYTES", 16 << 20)
    done = CliRunner().invoke(app, ["bench", "copy", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)
    assert [(row["page_bytes"], row["direction"]) for row in rows] == [
        (65536, "store"),
        (65536, "load"),
        (1 << 20, "store"),
        (1 << 20, "load"),
    ]
    fields = {"page_bytes", "layers", "direction", "ratio_256mib", "ratio_256mib_checksum", "ratio_same_size"}
    assert all(set(row) == fields for row in rows)
    assert all(row["ratio_256mib"] > 0 and row["ratio_256mib_checksum"] > 0 for row in rows)
    text = CliRunner().invoke(app, ["bench", "copy"]).output
    assert "64 KiB" in text


def test_a_benchmark_that_does_not_exist_is_refused():
    done = CliRunner().invoke(app, ["bench", "speed"])
    assert done.exit_code == 2
    assert "speed" in done.output
