"""docs/doctor.md has every finding, each is provoked by a test, and its commands are commands."""

from __future__ import annotations

import ast
import re
import shlex

from docs_reader import ROOT, first_words, rows, section, text_of
from typer.testing import CliRunner

from appliance.cli import app
from appliance.doctor.findings import Code, Severity
from appliance.doctor.run import ENGINE_LOOKS, HOST_LOOKS, RUNNING_LOOKS

TEXT = text_of("docs/doctor.md")


def provoked_codes() -> set[str]:
    """Codes that a test expects to be found: `provoked(…, Code.X, …)`, `found(…, Code.X)`, `… is Code.X`."""
    codes = set()
    for name in ("test_doctor_machine.py", "test_doctor_running.py"):
        for node in ast.walk(ast.parse((ROOT / "tests/integration" / name).read_text())):
            parts: list[ast.expr] = []
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("provoked", "found")
            ):
                parts = node.args
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is):
                parts = node.comparators
            codes |= {
                part.attr
                for part in parts
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "Code"
            }
    return codes


def test_every_finding_is_explained_once():
    assert first_words(section(TEXT, "## Findings")) == sorted(
        (code.value for code in Code),
        key=[row[0].strip("`") for row in rows(section(TEXT, "## Findings"))].index,
    )
    areas = {area for area, _ in (*HOST_LOOKS, *RUNNING_LOOKS, *ENGINE_LOOKS)} | {"vllm", "every area"}
    named = {area for row in rows(section(TEXT, "## Findings")) for area in row[1].split(", ")}
    assert named <= areas


def test_every_finding_is_provoked():
    assert {code.name for code in Code if code is not Code.OK} == provoked_codes()


def test_every_severity_is_explained():
    text = section(TEXT, "## Severities and exit status")
    assert first_words(text) == [severity.value for severity in Severity]


def test_every_command_shown_is_one():
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) == 4
    for words in commands:
        assert words[:2] == ["pagewarden", "doctor"]
        done = CliRunner().invoke(app, [*words[1:], "--port=1", "--http-port=0"])
        assert done.exit_code in (0, 1), done.output
        assert done.stdout
