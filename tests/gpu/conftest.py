"""Tests of the Triton kernels on a machine without a GPU. They need torch and Triton, which the test environment has not.

`make e2e` runs them (`tests/e2e/test_gpu_path.py`): pytest and everything else come from the test environment, torch and
Triton from the vLLM environment, whose packages are looked for last.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from tests.e2e.processes import VLLM_PYTHON

if importlib.util.find_spec("triton") is None:
    found = subprocess.run(
        [VLLM_PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    sys.path.append(found.stdout.strip())
