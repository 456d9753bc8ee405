"""docs/planning.md runs: its commands, the output it shows, its table of numbers, its list of models."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from docs_reader import ROOT, first_words, rows, section, text_of
from typer.testing import CliRunner

from appliance.cli import app
from appliance.planning import AUTHORITY, Plan, PlanRequest, make_plan
from appliance.planning.families import FAMILIES
from appliance.planning.source import parse_config
from appliance.settings import load_settings

TEXT = text_of("docs/planning.md")
CONFIGS = ROOT / "tests/unit/planning/configs"
NAMES = {
    "Kimi-Linear-48B": "kimi-linear-48b",
    "Kimi K3": "kimi-k3",
    "Qwen3-Next-80B": "qwen3-next-80b",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds the model of the page."""
    snapshot = tmp_path / "models--moonshotai--Kimi-Linear-48B-A3B-Instruct/snapshots/0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((CONFIGS / "kimi-linear-48b.json").read_bytes())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line.partition("|")[0]) for block in blocks for line in block.splitlines()]


def test_every_command_runs(hub: Path):
    file = hub / "models--moonshotai--Kimi-Linear-48B-A3B-Instruct/snapshots/0/config.json"
    for command in commands():
        words = [str(file) if word == "FILE" else word for word in command]
        assert words[0] == "pagewarden"
        if words[1] == "server":
            flags = dict(zip(words[2::2], words[3::2], strict=True))
            load_settings({flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()})
        else:
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, result.output


def test_the_output_shown_is_the_output(hub: Path):
    shown = re.findall(r"^```text\n(.*?)^```$", section(TEXT, "## A plan"), flags=re.MULTILINE | re.DOTALL)[0]
    result = CliRunner().invoke(app, commands()[0][1:])
    assert result.stdout.startswith(shown)


def test_the_numbers_of_the_table_are_those_of_the_plan():
    found = rows(section(TEXT, "## Where N comes from"))
    assert len(found) >= 9
    for model, tensor, context, cache, rule, *numbers in found:
        config = parse_config((CONFIGS / f"{NAMES[model]}.json").read_text(), model)
        request = PlanRequest(
            tp=int(tensor),
            dcp=int(context),
            kv_cache_dtype="auto" if cache == "bfloat16" else cache,
            vllm="0.26" if "before" in rule else "0.32",
        )
        plan = make_plan(config, request)
        assert [plan.block_size, plan.chunk_tokens, plan.budgets.fine] == [int(each) for each in numbers]
        assert plan.alignment_tokens == int(rule.split(",")[0])


def test_every_family_is_listed():
    listed = {name for row in rows(section(TEXT, "## Models")) for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == set(FAMILIES)


def test_every_field_named_is_one_of_the_plan():
    named = {name for row in rows(section(TEXT, "## The numbers")) for name in re.findall(r"`(\w+)`", row[0])}
    assert named <= set(Plan.model_fields)
    assert named | {
        "model",
        "model_type",
        "vllm",
        "tp",
        "pp",
        "dcp",
        "ep",
        "attention_backend",
        "authority",
    } == (set(Plan.model_fields) - {"budgets"})


def test_the_authority_is_named_first():
    line = "Setting attention block size to N tokens"
    assert line in AUTHORITY
    assert TEXT.index(line) < TEXT.index("## A plan")
    assert first_words(section(TEXT, "## Token budgets")) == ["fine", "throughput"]
