"""The web process itself: how it starts, stops, and ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from appliance.errors import PortInUse
from tests.integration._peer import empty_status, serving, wait_for
from web.main import WebSettings, run

ROOT = Path(__file__).parents[2]

CHILD = """
import sys
from web.main import WebSettings, run
run(WebSettings(daemon_port=int(sys.argv[1]), http_port=0, log_format="json", parent_pid=int(sys.argv[2]) or None))
"""

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1], str(os.getpid())], stderr=sys.stderr)
print(child.pid, flush=True)
sys.stdin.read()
os._exit(1)
"""


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    """Where the web process says that it listens; its log is JSON, one event a line."""
    assert process.stderr is not None
    for line in process.stderr:
        event = json.loads(line)
        if event["event"] == "dashboard listens":
            return f"http://{event['host']}:{event['port']}"
    raise AssertionError("the process ended before it listened")


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_cleanly_when_told(number: signal.Signals) -> None:
    with serving(empty_status()) as peer, started(CHILD, str(peer.port), "0") as process:
        url = address_of(process)
        wait_for(lambda: answers(url), "an answer")
        process.send_signal(number)
        assert process.wait(timeout=30) == 0


def test_ends_with_its_parent() -> None:
    with serving(empty_status()) as peer, started(PARENT, str(peer.port), CHILD) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            url = address_of(parent)
            wait_for(lambda: answers(url), "an answer")
            parent.kill()
            parent.wait(timeout=10)
            wait_for(lambda: not answers(url), "the end of the orphan")
            wait_for(lambda: state_of(child) == "Z", "the orphan's exit")
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def test_port_in_use_is_said_with_its_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}.*--http-port"):
            run(WebSettings(http_port=port))


def test_a_process_whose_parent_is_already_gone_stops() -> None:
    """A parent may die between starting its child and the child's first look."""
    grandparent = os.getppid()
    with serving(empty_status()) as peer, started(CHILD, str(peer.port), str(grandparent)) as process:
        assert process.wait(timeout=30) == 0
