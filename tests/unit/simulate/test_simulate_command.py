"""Commands of other packages come into `pagewarden` as entry points; one that cannot be loaded harms nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_entry_points_become_commands(tmp_path: Path):
    described = tmp_path / "extra-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1\n")
    (described / "entry_points.txt").write_text(
        "[pagewarden.commands]\n"
        "measure-it = connector.bench.command:copy\n"
        "broken-one = no_such_package.command:run\n"
        "[pagewarden.bench]\n"
        "measure-more = connector.bench.command:lookup\n"
    )

    def help_of(*group: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "appliance.cli", *group, "--help"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    top, bench = help_of(), help_of("bench")
    assert "measure-it" in top
    assert "broken-one" not in top
    assert "server" in top
    assert "measure-more" in bench
    assert "trace" in bench
    assert "measure-more" not in top


def test_the_daemons_command_imports_neither_connector_nor_numpy_code_of_it():
    program = (
        "import sys, appliance.cli; "
        "print([m for m in sys.modules if m.startswith(('connector.client', 'connector.vllm', 'kernels'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
