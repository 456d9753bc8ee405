"""Looks at the loop that fail, catalogs that cannot be compared, and what a check tells of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.check import looks as looks_module
from appliance.check import projection
from appliance.check.asking import check_text
from appliance.check.findings import Findings
from appliance.check.looks import Looks
from appliance.check.projection import check_catalog
from appliance.check.runner import CheckRunner
from appliance.errors import CheckFailed, NotFound
from appliance.protocol.messages import CheckFinding, CheckResult
from appliance.sessions import SessionTable
from tests.support.core_store import World, attention, chain


def at_once(work: Callable[[], None]) -> None:
    work()


def test_a_look_runs_where_it_is_posted_and_gives_its_answer():
    posted: list[Callable[[], None]] = []

    def post(work: Callable[[], None]) -> None:
        posted.append(work)
        work()

    looks = Looks(post)
    assert looks.take(lambda: 42) == 42
    assert len(posted) == looks.count == 1
    assert looks.longest_seconds > 0


def test_a_loop_that_does_not_come_round_ends_the_check(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(looks_module, "ANSWER_SECONDS", 0.01)
    with pytest.raises(CheckFailed, match="did not come round"):
        Looks(lambda work: None).take(lambda: 1)


def test_a_look_that_fails_harms_only_the_check():
    def broken() -> None:
        raise ZeroDivisionError("by nothing")

    with pytest.raises(CheckFailed, match="ZeroDivisionError: by nothing"):
        Looks(at_once).take(broken)


@pytest.fixture
def world():
    made = World()
    made.put_chain(made.namespace(1, attention(0)), chain(1, 2))
    yield made
    made.close()


def test_an_unreadable_catalog_and_a_long_queue_are_notes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    findings = Findings()
    check_catalog(world.store, tmp_path / "missing.db", lambda: 0, Looks(at_once), findings)
    monkeypatch.setattr(projection, "WAIT_SECONDS", 0.0)
    check_catalog(world.store, tmp_path / "missing.db", lambda: 7, Looks(at_once), findings)
    unreadable, waiting = findings.notes
    assert "were not compared" in unreadable
    assert "7 rows wait to be written" in waiting
    assert findings.total == 0


def runner_of(world: World, post: Callable[[Callable[[], None]], None], catalog: Path) -> CheckRunner:
    core = SimpleNamespace(
        store=world.store,
        leases=world.leases,
        reservations=world.reservations,
        sessions=SessionTable(world.clock, 1.0),
    )
    return CheckRunner(core, post, catalog, lambda: 0)  # type: ignore[arg-type]


def result_of(runner: CheckRunner, number: int) -> CheckResult:
    deadline = time.monotonic() + 20
    while not (result := runner.ask(number)).done and time.monotonic() < deadline:
        time.sleep(0.005)
    return result


def test_a_check_that_cannot_look_is_not_clean(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(looks_module, "ANSWER_SECONDS", 0.01)
    runner = runner_of(world, lambda work: None, tmp_path / "c.db")
    result = result_of(runner, runner.ask(0).run)
    assert result.done
    assert not result.clean
    assert "did not come round" in result.failure
    assert "could not be carried through" in check_text(result)


def test_a_second_ask_joins_the_check_under_way(world: World, tmp_path: Path):
    waiting: list[Callable[[], None]] = []
    runner = runner_of(world, waiting.append, tmp_path / "c.db")
    first = runner.ask(0)
    assert (first.run, first.done, first.findings) == (1, False, [])
    assert runner.ask(0).run == 1
    with pytest.raises(NotFound):
        runner.ask(2)
    deadline = time.monotonic() + 20
    while not runner.ask(1).done and time.monotonic() < deadline:
        while waiting:
            waiting.pop(0)()
        time.sleep(0.001)
    assert runner.ask(1).clean
    assert runner.ask(0).run == 2


def test_the_text_names_every_finding_and_counts_the_rest():
    result = CheckResult(
        run=1,
        done=True,
        clean=False,
        seconds=1.0,
        looks=3,
        longest_look_ms=0.5,
        checked={"extents": 2, "catalog_rows": 1},
        findings_total=3,
        findings=[CheckFinding(kind="holds", subject="Chunk a", sentence="Chunk a is held twice.")],
        notes=["The projection is behind."],
    )
    assert check_text(result).splitlines() == [
        "holds: Chunk a is held twice.",
        "and 2 more",
        "note: The projection is behind.",
        "3 findings: 1 catalog rows, 2 extents checked in 1.0 s, in 3 looks of at most 0.5 ms.",
    ]
