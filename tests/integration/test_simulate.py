"""Simulated engines against a real daemon: hits, refusals, aborts, and wrong bytes that must not go unseen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.daemon import DaemonProcess, eventually

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


def test_two_engines_share_and_every_loaded_byte_is_right(daemon: DaemonProcess):
    done = simulate(daemon, "--model=kimi-linear-48b", "--tp=2", "--engines=2", "--requests=30")
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


def test_another_attention_backend_shares_nothing_and_is_told_why(daemon: DaemonProcess):
    flags = ("--model=kimi-linear-48b", "--requests=8")
    assert simulate(daemon, *flags, "--engine-id=first").returncode == 0
    done = simulate(daemon, *flags, "--engine-id=second", "--attention-backend=OTHER_MLA", "--requests=3")
    told = json.loads(done.stdout)
    assert told["misses"].get("refused_fingerprint"), told["misses"]
    [refusal] = daemon.status().refusals
    assert {each.field for each in refusal.differences} == {
        f"layers.model.layers.{layer}.backend" for layer in (3, 7, 11, 15, 19, 23, 26)
    }


def test_aborts_leave_nothing_behind(daemon: DaemonProcess):
    done = simulate(daemon, "--model=llama-8b", "--tp=2", "--requests=60", "--abort-share=0.6")
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
def test_what_cannot_be_simulated_is_said_in_a_sentence(daemon: DaemonProcess, flags: tuple[str, ...]):
    done = simulate(daemon, *flags)
    assert done.returncode == 2
    assert done.stderr.startswith("pagewarden: ")
