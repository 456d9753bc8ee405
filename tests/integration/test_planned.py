"""A plan, a daemon started with it, and simulated engines that register as planned and otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from appliance.cli import app
from appliance.planning import Plan
from appliance.protocol.status import EngineStatus
from tests.support.daemon import DaemonProcess
from tests.support.waiting import eventually

CONFIG = Path(__file__).parents[1] / "unit/planning/configs/kimi-linear-48b.json"
MODEL = "moonshotai/Kimi-Linear-48B-A3B-Instruct"


def plan(*flags: str) -> Plan:
    result = CliRunner().invoke(app, ["plan", f"--config={CONFIG}", f"--model={MODEL}", "--json", *flags])
    return Plan.model_validate_json(result.stdout)


def simulated(daemon: DaemonProcess, name: str, *flags: str) -> EngineStatus:
    """The record of an engine that has registered."""
    seen: list[EngineStatus] = []
    command = [
        "-m",
        "connector.simulate",
        f"--port={daemon.port}",
        f"--engine-id={name}",
        "--tp=2",
        "--scale=256",
    ]
    engine = subprocess.Popen([sys.executable, *command, *flags], stdout=subprocess.DEVNULL)
    try:
        eventually(
            lambda: (
                seen.extend(
                    each
                    for each in daemon.status().engines
                    if each.engine_id == name and each.state == "ready"
                )
                or bool(seen)
            ),
            "the engine's registration",
        )
    finally:
        engine.kill()
        engine.wait(30)
    return seen[-1]


def test_the_daemon_points_out_who_is_not_as_planned(make_daemon: Callable[..., DaemonProcess]):
    made = plan("--tp=2", "--align=16")
    words = dict(zip(made.commands.server.split()[2::2], made.commands.server.split()[3::2], strict=True))
    daemon = make_daemon(l1_size_gb=0.05, planned_block_size=words["--planned-block-size"])

    as_planned = simulated(daemon, "as-planned", "--align=16")
    assert as_planned.block_tokens == [made.block_size] * len(made.groups)
    assert as_planned.chunk_tokens == made.chunk_tokens
    assert (as_planned.planned_block_size, as_planned.deviation) == (944, "")

    otherwise = simulated(daemon, "otherwise")
    assert otherwise.planned_block_size == 944
    assert "1024" in otherwise.deviation
    assert otherwise.deviation in otherwise.notices
    lines = [
        json.loads(line) for line in daemon.log.read_text().splitlines() if "not the planned one" in line
    ]
    assert {line["engine"] for line in lines} == {"otherwise"}
    assert {line["planned"] for line in lines} == {944}
