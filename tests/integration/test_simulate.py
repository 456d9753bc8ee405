"""Simulated engines against a real daemon: hits, refusals, aborts, and wrong bytes that must not go unseen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from connector.simulate.command import simulate as command
from tests.support.daemon import DaemonProcess
from tests.support.waiting import eventually

SMALL = ("--scale=256", "--speed=50", "--cache-tokens=16384")

WRONG_WRITER = """
import struct, sys, typer
from connector.simulate.content import Content
right = Content.seed
Content.seed = staticmethod(lambda key, group, shard, layer, block: right(key, group, shard, layer + 1, block))
from connector.simulate.command import simulate
typer.run(simulate)
"""
"""An engine that computes other bytes than its fingerprint promises: what a mistaken fingerprint would do."""


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return make_daemon(l1_size_gb=0.05)


class Done(NamedTuple):
    """How a command in this process ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def here() -> Callable[..., Done]:
    """The command in this process."""
    app = typer.Typer()
    app.command()(command)

    def run(daemon: DaemonProcess, *flags: str) -> Done:
        done = CliRunner().invoke(app, [f"--port={daemon.port}", "--json", *SMALL, *flags])
        return Done(done.exit_code, done.stdout, done.stderr)

    return run


def simulate(
    daemon: DaemonProcess, *flags: str, program: tuple[str, ...] = ("-m", "connector.simulate")
) -> Any:
    return subprocess.run(
        [sys.executable, *program, f"--port={daemon.port}", "--json", *SMALL, *flags],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_two_engines_share_and_every_loaded_byte_is_right(daemon: DaemonProcess, here: Callable[..., Done]):
    done = here(daemon, "--model=kimi-linear-48b", "--tp=2", "--engines=2", "--requests=30")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["requests"] == told["finished"] == 60
    assert told["hit_rate"] > 0.2
    assert told["pages_compared"] > 100
    assert told["wrong_pages"] == 0
    status = daemon.status()
    assert (status.leases_total, status.l1.reserved_bytes, status.l1.limbo_bytes) == (0, 0, 0)
    assert status.counters["bytes_loaded"] == told["bytes_loaded"]
    assert status.counters["bytes_stored"] == told["bytes_stored"]


def test_a_rank_of_its_own_process_does_the_same(daemon: DaemonProcess):
    done = simulate(daemon, "--model=qwen3-next", "--tp=2", "--requests=12", "--processes")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["finished"] == 12
    assert told["pages_compared"] > 0
    assert told["wrong_pages"] == 0


def test_another_attention_backend_shares_nothing_and_is_told_why(
    daemon: DaemonProcess, here: Callable[..., Done]
):
    flags = ("--model=kimi-linear-48b", "--requests=8")
    assert here(daemon, *flags, "--engine-id=first").returncode == 0
    done = here(daemon, *flags, "--engine-id=second", "--attention-backend=OTHER_MLA", "--requests=3")
    told = json.loads(done.stdout)
    assert told["misses"].get("refused_fingerprint"), told["misses"]
    assert "differs in layers.model.layers.11.backend" in told["engines"]["second"]["standing"]
    [refusal] = daemon.status().refusals
    assert {each.field for each in refusal.differences} == {
        f"layers.model.layers.{layer}.backend" for layer in (3, 7, 11, 15, 19, 23, 26)
    }


def test_aborts_leave_nothing_behind(daemon: DaemonProcess, here: Callable[..., Done]):
    done = here(daemon, "--model=llama-8b", "--tp=2", "--requests=60", "--abort-share=0.6")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["aborted"] > 10
    assert told["wrong_pages"] == 0
    eventually(lambda: daemon.status().leases_total == 0, "no lease is left")
    assert daemon.status().l1.leased_bytes == 0


def test_bytes_that_are_not_what_they_should_be_are_fatal(daemon: DaemonProcess):
    flags = ("--model=kimi-linear-48b", "--requests=10")
    assert simulate(daemon, *flags, program=("-c", WRONG_WRITER)).returncode == 0
    done = simulate(daemon, *flags)
    assert done.returncode == 3
    assert "wrong bytes: " in done.stderr
    assert "wrong from byte 0" in done.stderr
    assert json.loads(done.stdout)["wrong_pages"] > 0


def test_a_trace_is_read_and_engines_take_turns(
    daemon: DaemonProcess, here: Callable[..., Done], tmp_path: Path
):
    rows = [
        {"timestamp": 5000 * n, "input_length": 3000, "hash_ids": [0, 1, 2, 3, 4, n + 9]} for n in range(8)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = f"--trace={tmp_path / 'trace.jsonl'}"
    done = here(daemon, trace, "--model=llama-8b", "--engines=2", "--engine-id=e", "--speed=10")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["requests"] == 8
    assert [told["engines"][each]["requests"] for each in ("e-0", "e-1")] == [4, 4]
    assert told["hit_tokens"] >= 2560


def test_requests_go_on_without_the_daemon(
    daemon: DaemonProcess, here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("connector.simulate.engine.SETTLE_SECONDS", 0.5)
    daemon.kill()
    done = here(daemon, "--model=llama-8b", "--requests=5")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["finished"], told["hit_tokens"]) == (5, 0)
    assert told["misses"] == {"daemon_away": 5}


def test_a_rank_process_that_dies_costs_hits_and_not_the_engine(daemon: DaemonProcess):
    engine = subprocess.Popen(
        [
            *(sys.executable, "-m", "connector.simulate", f"--port={daemon.port}", "--json", *SMALL),
            *("--tp=2", "--processes", "--seconds=8"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: daemon.status().counters.get("objects_loaded", 0) > 0, "something is loaded")
        tasks = Path(f"/proc/{engine.pid}/task").glob("*/children")  # a child is its starting thread's
        children = [each for task in tasks for each in task.read_text().split()]
        ranks = [
            int(each) for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()
        ]
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        eventually(lambda: daemon.status().counters.get("sessions_ended_died"), "its death is seen")
        out, err = engine.communicate(timeout=60)
    finally:
        engine.kill()
        engine.communicate()
    assert engine.returncode == 0, err
    told = json.loads(out)
    assert told["misses"].get("daemon_away") or told["misses"].get("registering"), told["misses"]
    assert told["wrong_pages"] == 0


def test_a_signal_ends_it_in_order(daemon: DaemonProcess):
    engine = subprocess.Popen(
        [sys.executable, "-m", "connector.simulate", f"--port={daemon.port}", "--json", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: daemon.status().counters.get("objects_loaded", 0) > 0, "something is loaded")
        os.kill(engine.pid, signal.SIGTERM)
        out, err = engine.communicate(timeout=40)
    finally:
        engine.kill()
        engine.communicate()
    assert engine.returncode == 0, err
    assert json.loads(out)["wrong_pages"] == 0
    assert daemon.status().counters.get("sessions_ended_bye") == 2


@pytest.mark.parametrize("flags", [("--model=gpt-2",), ("--tp=3",), ("--trace=/nowhere",)])
def test_what_cannot_be_simulated_is_said_in_a_sentence(
    daemon: DaemonProcess, here: Callable[..., Done], flags: tuple[str, ...]
):
    done = here(daemon, *flags)
    assert done.returncode == 2
    assert done.stderr.startswith("pagewarden: ")
