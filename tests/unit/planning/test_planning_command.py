"""`pagewarden plan` as it is typed: files, directories, the hub cache, JSON, text and exit statuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from planning_configs import CONFIGS, NAMES, config
from typer.testing import CliRunner

from appliance.cli import app
from appliance.planning import AUTHORITY

runner = CliRunner()
KIMI = str(CONFIGS / "kimi-linear-48b.json")


def run(*arguments: str) -> str:
    result = runner.invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    result = runner.invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert not result.stdout
    return result.stderr


def test_the_json_of_the_recipe():
    plan = json.loads(run("--config", KIMI, "--tp", "2", "--align", "16", "--json"))
    assert plan["block_size"] == plan["chunk_tokens"] == 944
    assert plan["max_num_batched_tokens"] == 1887
    assert [group["kind"] for group in plan["groups"]] == ["recurrent"] * 3 + ["attention"]
    assert "startup log" in plan["authority"]


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_has_its_text_and_commands_that_a_shell_reads(name: str):
    arguments = ["--config", str(CONFIGS / f"{name}.json"), "--model", "org/a model"]
    text, plan = run(*arguments), json.loads(run(*arguments, "--json"))
    assert AUTHORITY in text
    assert f"{plan['block_size']:,} tokens" in text
    server, vllm = (shlex.split(plan["commands"][name]) for name in ("server", "vllm"))
    assert server[:2] == ["pagewarden", "server"]
    assert server[server.index("--planned-block-size") + 1] == f"org/a model={plan['block_size']}"
    assert "org/a model" in vllm
    assert json.loads(vllm[-1])["kv_connector"] == "PagewardenConnector"
    assert plan["commands"]["server"] in text
    assert plan["commands"]["vllm"] in text


def test_every_option_reaches_the_command_of_the_engine():
    plan = json.loads(
        run(
            *("--config", str(CONFIGS / "qwen3-next-80b.json"), "--model", "Qwen/Qwen3-Next", "--json"),
            *("--tp", "4", "--pp", "2", "--dcp", "2", "--ep", "--dtype", "float16"),
            *("--kv-cache-dtype", "fp8", "--attention-backend", "flashinfer"),
            *(
                "--mamba-cache-dtype",
                "float16",
                "--mamba-ssm-cache-dtype",
                "float32",
                "--regime",
                "throughput",
            ),
            *("--chunk-size", "1000"),
        )
    )
    words = shlex.split(plan["commands"]["vllm"])
    for flag, value in {
        "--tensor-parallel-size": "4",
        "--pipeline-parallel-size": "2",
        "--decode-context-parallel-size": "2",
        "--dtype": "float16",
        "--kv-cache-dtype": "fp8",
        "--attention-backend": "FLASHINFER",
        "--mamba-cache-mode": "align",
        "--mamba-cache-dtype": "float16",
        "--mamba-ssm-cache-dtype": "float32",
        "--max-num-batched-tokens": str(plan["budgets"]["throughput"]),
    }.items():
        assert words[words.index(flag) + 1] == value
    assert {"--enable-expert-parallel", "--enable-prefix-caching"} <= set(words)
    assert "--chunk-size 1000" in plan["commands"]["server"]
    assert plan["chunk_tokens"] >= 1000


def test_the_server_command_is_one_that_the_server_takes():
    from appliance.settings import load_settings

    words = shlex.split(json.loads(run("--config", KIMI, "--json"))["commands"]["server"])[2:]
    flags = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    settings = load_settings(flags)
    assert settings.planned_block_size == "1920"
    assert settings.l1_init_size_gb == settings.l1_size_gb


def test_k3_gets_what_its_recipe_needs_beside_the_cache():
    command = json.loads(run("--config", str(CONFIGS / "kimi-k3.json"), "--tp", "8", "--json"))["commands"][
        "vllm"
    ]
    assert command.startswith("VLLM_ENABLE_K3_LATENT_MOE_TAIL_FUSION=1 vllm serve MODEL --trust-remote-code ")
    assert "--no-enable-flashinfer-autotune" in command


# --- where the configuration is found ---------------------------------------------------------------------------------


def write(folder: Path, name: str = "kimi-linear-48b", **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name, **changes)))
    return folder


def test_a_directory_is_a_model(tmp_path: Path):
    plan = json.loads(run("--config", str(write(tmp_path / "model")), "--json"))
    assert plan["model"] == str(tmp_path / "model")


def test_a_file_may_name_its_model(tmp_path: Path):
    folder = write(tmp_path, _name_or_path="org/kimi")
    assert json.loads(run("--config", str(folder / "config.json"), "--json"))["model"] == "org/kimi"


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", ""])
def test_a_name_is_looked_up_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str):
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    hub = tmp_path / {"HF_HUB_CACHE": "cache", "HF_HOME": "cache/hub", "": ".cache/huggingface/hub"}[variable]
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    folder = hub / "models--org--kimi"
    write(folder / "snapshots" / "old", num_attention_heads=64)
    write(folder / "snapshots" / "new")
    assert "does not divide 32" in refused("--config", "org/kimi", "--tp", "64")  # the newest one
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("old\n")
    assert json.loads(run("--config", "org/kimi", "--json"))["model"] == "org/kimi"
    assert "key heads" in refused("--config", "org/kimi", "--tp", "64")  # the one that main points to
    assert "no model of that name" in refused("--config", "org/other")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a JSON list"),
        ("\udcff", "not UTF-8"),
        (" " * (5 << 20), "larger than"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, told: str):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert told in refused("--config", str(path))


def test_an_empty_directory_is_refused(tmp_path: Path):
    told = refused("--config", str(tmp_path))
    assert "model_config_unreadable" in told
    assert "No such file" in told


def test_a_refusal_is_one_line_with_its_code(tmp_path: Path):
    write(tmp_path, model_type="mamba2")
    told = refused("--config", str(tmp_path))
    assert told.startswith("pagewarden: unsupported_model: ")
    assert told.count("\n") == 1
    assert "plan_refused" in refused("--config", KIMI, "--tp", "0")
