"""`pagewarden arena`: what it says of a directory, and that looking changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.errors import ArenaInUse
from appliance.l1.survey import clear_arena
from appliance.protocol import arena_layout as layout
from tests.support.boots import HYBRID, Boots, descriptor_of
from tests.support.core_lockholder import lock_holder
from tests.support.core_store import EXTENT, chain

NAMESPACE = descriptor_of(*HYBRID)
KEYS = chain(1, 2)
LIVING = 0xA11FE


@pytest.fixture
def boots(tmp_path) -> Iterator[Boots]:
    directory = tmp_path / "arena"
    directory.mkdir(mode=0o700)
    made = Boots(directory)
    yield made
    made.end(clean=False)


def arena(boots: Boots, action: str, *more: str, extents: int = 64) -> tuple[int, str]:
    arguments = [
        "arena",
        action,
        f"--arena-dir={boots.directory}",
        f"--catalog={boots.directory.parent / 'catalog.db'}",
        f"--l1-size-gb={extents * EXTENT / (1 << 30)}",
        f"--extent-kib={EXTENT // 1024}",
        *more,
    ]
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def status(boots: Boots, **how: int) -> dict:
    code, text = arena(boots, "status", "--json", **how)
    assert code == 0, text
    return json.loads(text)


def content(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}


@pytest.mark.parametrize("clean", [True, False])
def test_status_says_what_a_start_would_find_and_changes_nothing(boots, clean):
    boot = boots.start()
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    boots.end(clean=clean)
    before = content(boots.directory)
    told = status(boots)
    assert (told["running"], told["next_start"]) == (False, "warm")
    assert [gate["outcome"] for gate in told["gates"]] == ["passed"] * 8
    assert [(each["model"], each["objects"], each["bytes"]) for each in told["namespaces"]] == [
        ("m", 6, 6 * EXTENT)
    ]
    assert [(each["extents"], each["clean"]) for each in told["files"]] == [(64, clean)]
    code, text = arena(boots, "status")
    assert code == 0
    assert "The next start would be warm." in text
    assert text.count("pass  ") == 8
    assert content(boots.directory) == before
    assert boots.start().opened.object_count == 6


def test_status_names_the_gate_that_would_fail(boots):
    boot = boots.start()
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    boots.end(clean=True)
    with boots.segments()[0].open("r+b") as file:
        file.write(b"x")
    told = status(boots)
    assert told["next_start"] == "cold"
    assert told["reason"].endswith("is no segment of an arena.")
    assert [gate["outcome"] for gate in told["gates"]] == ["passed", "passed", "failed", *["skipped"] * 5]
    assert "FAIL  magic" in arena(boots, "status")[1]


def test_status_of_another_size(boots):
    boot = boots.start()
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    boots.end(clean=True)
    assert "larger" in status(boots, extents=100)["gates"][-1]["reason"]
    assert "smaller" in status(boots, extents=32)["gates"][-1]["reason"]


def test_status_where_there_is_nothing(boots, tmp_path):
    told = status(boots)
    assert (told["files"], told["next_start"], told["reason"]) == ([], "cold", "There was no arena.")
    boots.directory = tmp_path / "nowhere"
    assert status(boots)["reason"] == "There was no arena."
    assert not boots.directory.exists()


def test_a_namespace_file_that_cannot_be_read_is_named(boots):
    boot = boots.start()
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    boots.end(clean=False)
    [path] = boots.directory.glob("namespace-*.json")
    path.write_text("{")
    told = status(boots)
    assert list(told["unreadable"]) == [path.name]
    assert told["faults"] == {"namespace": 6}
    assert f"unreadable: {path.name}" in arena(boots, "status")[1]


def test_clear_removes_every_file_but_those_of_the_living(boots):
    boot = boots.start()
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    boots.end(clean=True)
    dead = boots.directory / layout.lock_name(7)
    dead.write_text("")
    with lock_holder(boots.directory, LIVING):
        assert status(boots)["attachments"] == 1
        code, text = arena(boots, "clear", "--json")
        assert code == 0, text
        told = json.loads(text)
        assert told["removed_files"] == 4
        assert told["memory_bytes"] >= 64 * EXTENT
        assert {path.name for path in boots.directory.iterdir()} == {"daemon.lock", layout.lock_name(LIVING)}
    assert status(boots)["next_start"] == "cold"
    assert arena(boots, "clear")[1].endswith("The next start is cold.\n")
    assert not boots.start().opened.warm


def test_under_a_running_daemon_only_the_files_are_listed(boots, tmp_path):
    boot = boots.start()
    boot.put_chain(boot.namespace(NAMESPACE), KEYS)
    boots.end(clean=False)
    with lock_holder(boots.directory, LIVING) as process:
        (boots.directory / layout.lock_name(LIVING)).replace(boots.directory / "daemon.lock")
        told = status(boots)
        assert (told["running"], told["next_start"], told["gates"]) == (True, None, [])
        assert len(told["files"]) == 1
        assert "a daemon uses it" in arena(boots, "status")[1]
        code, text = arena(boots, "clear")
        assert code == ArenaInUse.exit_status
        assert "arena_in_use" in text
        with pytest.raises(ArenaInUse):
            clear_arena(boots.directory)
        assert len(boots.segments()) == 1
        process.kill()
        process.wait(timeout=30)
    assert status(boots)["next_start"] == "warm"
