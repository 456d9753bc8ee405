"""The kernels compiled ahead of time for devices that are not here: 128-bit accesses are in the output."""

from __future__ import annotations

import re

import pytest

from kernels.triton_aot import TARGETS, compile_for, main


def test_the_targets():
    assert [target.name for target in TARGETS] == ["sm_90", "sm_100", "gfx950"]


@pytest.mark.parametrize("checksummed", [True, False], ids=["checksummed", "plain"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_128_bit_loads_and_stores(target, checksummed):
    made = compile_for(target, checksummed=checksummed)
    assert made.complaints == []
    assert made.count(target.wide_load) >= 2, "less than two loads in flight for each thread"
    assert made.count(target.wide_store) >= 2
    assert made.count(target.atomic) == (1 if checksummed else 0), (
        "one sum for each row, none without checksum"
    )
    assert target.name in made.text, "compiled for something else"


@pytest.mark.parametrize("target", TARGETS[:2], ids=lambda target: target.name)
def test_nothing_spills_to_local_memory(target):
    for checksummed in (True, False):
        text = compile_for(target, checksummed=checksummed).text
        assert not re.search(r"\b(ld|st)\.local", text)


def test_the_module_reports_it(capsys):
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(TARGETS)
    assert all("128-bit loads" in line and "; " not in line for line in lines)
