"""The checks on vLLM's own `Scheduler`, all in one process: see the package `tests.e2e.scheduler`."""

import subprocess
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.processes import VLLM_ENVIRONMENT, VLLM_PYTHON

PACKAGE = Path(__file__).parent / "scheduler"
CHECKS = sorted(path.stem for path in PACKAGE.glob("check_*.py"))

Outcomes = dict[str, list[str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """For each file of checks, what each of its checks had to say: nothing if it passed."""
    assert VLLM_PYTHON.exists(), f"no vLLM environment at {VLLM_PYTHON}: run `make e2e-setup`"
    report = tmp_path_factory.mktemp("scheduler") / "report.xml"
    ran = subprocess.run(
        [VLLM_PYTHON, PACKAGE / "run_checks.py", "-q", "--timeout", "120", f"--junitxml={report}"],
        env=VLLM_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert ran.returncode in (0, 1), f"{ran.stdout[-12000:]}\n{ran.stderr[-4000:]}"
    found: Outcomes = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        troubles = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        text = "\n".join(f"{case.get('name')}: {trouble.text}" for trouble in troubles)
        found[case.get("classname", "").rpartition(".")[2]].append(text)
    return found


@pytest.mark.parametrize("checks", CHECKS)
def test_scheduler_side(outcomes: Outcomes, checks: str) -> None:
    assert outcomes[checks], "no check ran"
    assert not any(outcomes[checks]), "\n".join(filter(None, outcomes[checks]))
