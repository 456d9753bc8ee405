"""Fixtures of the end-to-end tests: checkpoints made once a session, a daemon of its own for each module."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.families import FAMILIES, Reference, make_reference
from tests.e2e.processes import VLLM_ENVIRONMENT, VLLM_PYTHON, Daemon, running

collect_ignore = ["scheduler"]
"""Runs in the vLLM environment, through test_scheduler.py; this one cannot import it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the vLLM environment and minutes, not seconds."""
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(420))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints `qwen3_next`, `lfm2` and `llama`."""
    assert VLLM_PYTHON.exists(), f"no vLLM environment at {VLLM_PYTHON}: run `make e2e-setup`"
    target = tmp_path_factory.mktemp("checkpoints")
    maker = Path(__file__).with_name("checkpoints.py")
    made = subprocess.run(
        [VLLM_PYTHON, maker, target], env=VLLM_ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return target


class References(dict[str, Reference]):
    """References by family, each made when it is first asked for."""

    def __init__(self, checkpoints: Path, directory: Path) -> None:
        super().__init__()
        self._checkpoints = checkpoints
        self._directory = directory

    def __missing__(self, name: str) -> Reference:
        self[name] = make_reference(FAMILIES[name], self._checkpoints, self._directory)
        return self[name]


@pytest.fixture(scope="session")
def references(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """What engines without a connector answer."""
    return References(checkpoints, tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that lives as long as the module's tests."""
    with running(Daemon(tmp_path_factory.mktemp("daemon"))) as started:
        yield started
