"""A real daemon process for tests, on free ports, with an arena and a catalog of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from appliance.credentials import issue_token
from appliance.errors import DaemonUnreachable
from appliance.protocol.accounts import TokenInfo
from appliance.protocol.client import RequestClient, endpoint_of
from appliance.protocol.status import DaemonStatus
from appliance.run_dir import read_secret, secret_path
from tests.support.waiting import eventually

START_SECONDS = 30.0
SHM = Path("/dev/shm")
ADMIN_PASSWORD = "the tests' first admin"


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DaemonProcess:
    """`pagewarden server` as a child; `directory` takes its log and catalog."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.arena_dir = Path(tempfile.mkdtemp(prefix="pagewarden-test-", dir=SHM))
        self.port = free_port()
        self.settings = {
            "host": "127.0.0.1",
            "port": self.port,
            "l1_size_gb": 16 / 1024,
            "extent_kib": 4,
            "arena_dir": self.arena_dir,
            "catalog": directory / "catalog.db",
            "heartbeat_seconds": 0.1,
            "death_grace_seconds": 0.2,
            "drain_seconds": 3.0,
            "no_web": True,
            "engine_inflight_share": 1.0,
            "log_format": "json",
            "run_dir": directory / "run",
            **settings,
        }
        self.log = directory / "daemon.log"
        self.program = ["-m", "appliance.cli"]
        self.process: subprocess.Popen[bytes] | None = None

    def arguments(self) -> list[str]:
        """The command line of the settings."""
        arguments = []
        for name, value in self.settings.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                arguments.append(flag)
            elif value is not False and value is not None:
                arguments.append(f"{flag}={value}")
        return arguments

    def start(self, *, ready: bool = True) -> DaemonProcess:
        """Start it; with `ready`, wait until it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, "server", *self.arguments()],
                stdout=log,
                stderr=log,
                env={"PAGEWARDEN_ADMIN_PASSWORD": ADMIN_PASSWORD, **os.environ},
            )
        if ready:
            self.wait_ready()
        return self

    def wait_ready(self) -> DaemonStatus:
        """Wait until every gate is open."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"the daemon ended:\n{self.log.read_text()[-4000:]}"
            try:
                status = self.status()
            except DaemonUnreachable:
                continue
            if status.ready:
                return status
            time.sleep(0.02)
        raise AssertionError(f"the daemon was not ready in time:\n{self.log.read_text()[-4000:]}")

    def client(self, timeout_seconds: float = 2.0) -> RequestClient:
        """A plain admin client."""
        return RequestClient(
            endpoint_of("127.0.0.1", self.port),
            client_name="tests",
            timeout_seconds=timeout_seconds,
            admin_secret=lambda: read_secret(self.secret_path),
        )

    @property
    def secret_path(self) -> Path:
        """The file of its admin secret."""
        return secret_path(self.directory / "run", self.port)

    def reach(self) -> list[str]:
        """The flags with which a command finds it and is let in."""
        return [f"--port={self.port}", f"--run-dir={self.directory / 'run'}"]

    def api_token(self, role: str = "admin", *scopes: str) -> str:
        """A new API token of the first admin."""
        issued = issue_token()
        values = {
            "token_id": issued.public_id,
            "name": f"tests-{role}",
            "owner": "admin",
            "role": role,
            "scopes": list(scopes),
            "secret_hash": issued.secret_hash,
        }
        with self.client(10.0) as client:
            client.call("add_token", values, TokenInfo)
        return issued.text

    def web_headers(self, role: str = "admin") -> dict[str, str]:
        """What a client of the dashboard sends to be let in."""
        return {"Authorization": f"Bearer {self.api_token(role)}"}

    def status(self) -> DaemonStatus:
        """The status document of this moment."""
        with self.client(10.0) as client:
            return client.call("status", {}, DaemonStatus)

    def signal(self, number: signal.Signals) -> None:
        """Send the daemon a signal."""
        assert self.process is not None
        os.kill(self.process.pid, number)
        if number is signal.SIGSTOP:
            eventually(self._all_stopped, "every thread of the daemon has stopped")

    def _all_stopped(self) -> bool:
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T" for task in tasks)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM, and wait for the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)

    def close(self) -> None:
        """End it and remove its arena."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.arena_dir, ignore_errors=True)
