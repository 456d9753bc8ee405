"""The GPU path as far as a machine without a GPU can go. The tests are in tests/gpu, in a process of their own each:
whether Triton interprets or compiles is settled when a kernel is imported."""

import os
import subprocess
import sys

import pytest

from tests.e2e.processes import REPOSITORY, VLLM_PYTHON

SECONDS = 300


def run(arguments: list[str], **changes: str) -> str:
    """Run a command at the repository's root and give what it printed; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        arguments,
        cwd=REPOSITORY,
        env={**environment, **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def pytest_in(directory: str, **changes: str) -> str:
    """Run a directory of tests."""
    return run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/gpu/{directory}"], **changes
    )


def test_interpreted_kernels_equal_the_reference_and_serve_the_data_path() -> None:
    assert " passed" in pytest_in("interpreted", TRITON_INTERPRET="1")


def test_kernels_compile_for_devices_that_are_not_here() -> None:
    assert " passed" in pytest_in("compiled")


@pytest.mark.parametrize("arguments", [["--dry-run"]], ids=["dry-run"])
def test_the_device_check_runs_without_a_device(arguments: list[str]) -> None:
    output = run([str(VLLM_PYTHON), "scripts/device_check.py", *arguments, "--daemon-python", sys.executable])
    assert "all checks passed" in output


def test_the_device_check_says_that_there_is_no_device() -> None:
    done = subprocess.run(
        [VLLM_PYTHON, "scripts/device_check.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no CUDA or HIP device" in done.stderr
