"""Fixtures of the checks: one daemon for all of them, engines that are stopped at the end."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import Daemon, running
from tests.e2e.scheduler.engine import Engine
from tests.e2e.scheduler.geometry import Geometry

StartEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for every check: each geometry has its own namespace, each check its own tokens."""
    with running(Daemon(tmp_path_factory.mktemp("daemon"))) as started:
        yield started


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the configurations that vLLM reads."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def start_engine(daemon: Daemon, models: Path) -> Iterator[StartEngine]:
    """Starts engines on the daemon."""
    with contextlib.ExitStack() as stack:

        def start(geometry: Geometry, **settings: Any) -> Engine:
            engine = Engine(models, daemon.connector(), geometry, **settings)
            stack.callback(engine.stop)
            return engine

        yield start
