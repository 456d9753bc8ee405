"""The dashboard as a child process: a slow page can never stall the data path."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import structlog

from appliance.settings import Settings

_log = structlog.get_logger(__name__)

STOP_SECONDS = 5.0
FIRST_RESTART_SECONDS = 1.0
LONGEST_RESTART_SECONDS = 60.0


class WebChild:
    """Starts ``pagewarden web`` beside the daemon, and again when it dies, at growing intervals."""

    def __init__(self, settings: Settings, daemon_port: int) -> None:
        self._command = [
            sys.executable,
            "-m",
            "appliance.cli",
            "web",
            f"--host={_reachable(settings.host)}",
            f"--port={daemon_port}",
            f"--http-host={settings.http_host}",
            f"--http-port={settings.http_port}",
            f"--catalog={settings.catalog}",
            f"--run-dir={settings.run_dir}",
            f"--http-names={settings.http_names}",
            *(["--read-only"] if settings.read_only else []),
            f"--log-format={settings.log_format}",
            f"--parent-pid={os.getpid()}",
        ]
        self._restart_seconds = FIRST_RESTART_SECONDS
        self._restart_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command)
        _log.info("dashboard started", pid=self._process.pid)

    def watch(self) -> None:
        """Start it again if it has died; called every second."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            _log.error(
                "the dashboard died", status=self._process.returncode, again_in_seconds=self._restart_seconds
            )
            self._process = None
            self._restart_at = now + self._restart_seconds
            self._restart_seconds = min(LONGEST_RESTART_SECONDS, 2 * self._restart_seconds)
        elif self._process is None and now >= self._restart_at:
            self._start()

    def stop(self) -> None:
        """Ask it to end and wait, bounded."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _reachable(host: str) -> str:
    """The address under which a child reaches a daemon that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # compared, not bound
