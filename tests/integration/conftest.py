"""Daemons for integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonProcess


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons with the settings given and ends them after the test."""
    daemons: list[DaemonProcess] = []

    def make(*, start: bool = True, **settings: Any) -> DaemonProcess:
        directory = tmp_path / f"daemon-{len(daemons)}"
        directory.mkdir()
        daemon = DaemonProcess(directory, chunk_size=32, **settings)
        daemons.append(daemon)
        return daemon.start() if start else daemon

    yield make
    for daemon in daemons:
        daemon.close()
