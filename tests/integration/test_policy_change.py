"""The eviction policy changed under a running daemon: from a shell, over a restart, and with objects in the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.engine import Engine
from tests.support.waiting import eventually

PROMPT = list(range(5000, 5000 + 32 * 4 + 5))


def policy(daemon: DaemonProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "appliance.cli", "policy", *arguments, *daemon.reach()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_it_is_changed_from_a_shell_and_outlives_a_restart(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    changed = policy(daemon, "lru")
    assert (changed.returncode, changed.stdout) == (0, "RETURNS before, LRU now.\n"), changed.stderr
    assert daemon.status().l1.policy == "LRU"
    found = engine.lookup("a", PROMPT)
    assert found.hit_chunks > 0, "what was in the cache is taken over"
    engine.stop()
    daemon.stop()
    daemon.start()
    assert daemon.status().l1.policy == "LRU"
    back = policy(daemon, "--configured", "--json")
    assert json.loads(back.stdout) == {"before": "LRU", "after": "RETURNS", "changed": False}


def test_what_it_prints(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    nothing = policy(daemon)
    assert "Nothing was stored yet" in nothing.stdout
    engine = Engine(daemon.port).start()
    for request in ("a", "b"):
        engine.lookup(request, PROMPT)
        engine.save(PROMPT, seed=1)
    eventually(
        lambda: {shadow.prompts for shadow in daemon.status().retention.policies} == {2},
        "both prompts in every shadow",
    )
    told = policy(daemon)
    assert "RETURNS" in told.stdout
    assert "evicts, default" in told.stdout
    assert "kda" in told.stdout
    document = json.loads(policy(daemon, "--json").stdout)
    assert document["share"] == 1.0
    engine.stop()


@pytest.mark.parametrize("name", ["ARC", "reference"])
def test_a_policy_that_is_none_is_refused(make_daemon: Callable[..., DaemonProcess], name: str) -> None:
    daemon = make_daemon()
    refused = policy(daemon, name)
    assert refused.returncode == 1
    assert "invalid_field" in refused.stderr
    assert name in refused.stderr
    assert daemon.status().l1.policy == "RETURNS"
