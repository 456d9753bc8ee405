"""The Restarts page and its REST twin, over a real catalog and a real peer."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from appliance.catalog.events import RestartRecorded
from appliance.catalog.writer import CatalogWriter
from appliance.l1.gates import GateName
from tests.integration._peer import BOOT, HOSTILE, empty_status, serving, wait_for
from tests.integration._web import RunningWeb, running_web, settings_for

NAMES = [name.value for name in GateName]
COLD = "The file segment-00-0000.arena has arena layout version 9; this daemon reads 1."


def gates(failed: str = "", reason: str = "") -> list[dict[str, Any]]:
    """What a start says of its gates: all passed, or one failed."""
    found = []
    for place, name in enumerate(NAMES):
        behind = failed and place > NAMES.index(failed)
        outcome = "failed" if name == failed else "skipped" if behind else "passed"
        told = reason if name == failed else f"What the gate {name} found."
        facts = {"objects": 1234} if name == "table_walk" and outcome == "passed" else {}
        found.append({"name": name, "outcome": outcome, "reason": told, "facts": facts})
    return found


def recorded(
    number: int, mode: str, reason: str, told: list[dict[str, Any]], **changes: Any
) -> RestartRecorded:
    by_name = {
        gate["name"]: {"place": place, **{key: gate[key] for key in ("outcome", "reason", "facts")}}
        for place, gate in enumerate(told)
    }
    facts = {"clean_stop": mode == "warm", "gates": by_name, **changes}
    return RestartRecorded(f"{number:032x}", 1_760_000_000.0 + number, mode, reason, **facts)


def catalog_with(path: Path, *events: RestartRecorded) -> Path:
    writer = CatalogWriter(path, on_durable=lambda *_: None)
    writer.start()
    for event in events:
        assert writer.submit(event)
    assert writer.stop(10.0)
    return path


def restart_status(mode: str = "warm") -> dict[str, Any]:
    return {
        "mode": mode,
        "reason": "Every gate opened after an orderly stop: 1234 objects were taken back.",
        "clean_stop": True,
        "objects": 1234,
        "limbo_objects": 0,
        "left_behind": {},
        "seconds": 0.4,
        "gates": gates(),
    }


@pytest.fixture
def web(tmp_path: Path) -> Iterator[RunningWeb]:
    path = catalog_with(
        tmp_path / "catalog.db",
        recorded(1, "cold", "There was no arena.", []),
        recorded(2, "cold", COLD, gates("schema", COLD)),
        recorded(3, "warm", "Every gate opened.", gates()),
    )
    status = empty_status(restart=restart_status())
    with serving(status) as peer, running_web(settings_for(peer.port, catalog=path), let_in=True) as running:
        running.wait_for_status()
        wait_for(lambda: running.state.history.history().reads > 0, "the catalog is read")
        yield running


def test_every_start_with_its_gates_in_order(web: RunningWeb) -> None:
    document = web.client.get("/api/v1/restarts").json()
    assert document["unavailable"] == ""
    assert [(each["mode"], each["running"]) for each in document["restarts"]] == [
        ("warm", True),
        ("warm", False),
        ("cold", False),
        ("cold", False),
    ]
    running, warm, cold, first = document["restarts"]
    assert running["boot"] == BOOT.hex()
    assert [gate["name"] for gate in running["gates"]] == NAMES
    assert [gate["name"] for gate in cold["gates"]] == NAMES, "the catalog keeps them by name, not in order"
    assert [gate["outcome"] for gate in cold["gates"]] == ["passed"] * 3 + ["failed"] + ["skipped"] * 4
    assert warm["gates"][6]["facts"] == {"objects": 1234}
    assert first["gates"] == []


def test_the_page_says_the_same_in_words(web: RunningWeb) -> None:
    html = unescape(web.client.get("/restarts").text)
    for text in (
        "2 of the latest 4 were warm",
        "1234 objects were taken back",
        COLD,
        "There was no arena.",
        "The version that started then told no gates.",
        "Table walk",
        "objects 1,234",
        "/api/v1/restarts | jq",
    ):
        assert text in html, text
    assert html.count('class="restart"') == 4
    assert html.count('class="restart" open') == 1
    assert "<script" not in html
    assert web.client.get("/").text.count('href="/restarts"') >= 1


def test_the_running_boot_is_not_told_twice(tmp_path: Path) -> None:
    path = catalog_with(
        tmp_path / "catalog.db", recorded(int(BOOT.hex(), 16), "warm", "As recorded.", gates())
    )
    status = empty_status(restart=restart_status())
    with serving(status) as peer, running_web(settings_for(peer.port, catalog=path), let_in=True) as running:
        running.wait_for_status()
        wait_for(lambda: running.state.history.history().reads > 0, "the catalog is read")
        [only] = running.client.get("/api/v1/restarts").json()["restarts"]
    assert (only["running"], only["reason"]) == (True, "As recorded.")


def test_without_a_catalog_the_running_boot_is_there(tmp_path: Path) -> None:
    status = empty_status(restart=restart_status("cold"))
    path = catalog_with(tmp_path / "catalog.db")
    with (
        serving(status) as peer,
        running_web(settings_for(peer.port, catalog=path), let_in=True) as running,
    ):
        running.wait_for_status()
        assert running.client.get("/restarts").status_code == 200, "recognised while the catalog was there"
        for each in tmp_path.glob("catalog.db*"):
            each.unlink()
        wait_for(lambda: running.state.history.history().errors > 0, "the catalog cannot be read")
        document = running.client.get("/api/v1/restarts").json()
        html = running.client.get("/restarts").text
    assert [each["mode"] for each in document["restarts"]] == ["cold"]
    assert "cannot be read" in document["unavailable"]
    assert "Earlier starts are not shown." in html


def test_with_nothing_known_the_page_says_what_to_do() -> None:
    with serving(empty_status()) as peer:
        peer.silent = True
        with running_web(settings_for(peer.port)) as running:
            html = running.client.get("/restarts").text
            assert running.client.get("/api/v1/restarts").json()["restarts"] == []
    assert "pagewarden server" in html


def test_what_another_version_wrote_breaks_nothing(tmp_path: Path) -> None:
    odd = {"arena": "a sentence", "x": {"place": "first", "facts": {"a": "b"}}, "y": {"facts": [1]}}
    path = catalog_with(
        tmp_path / "catalog.db", recorded(5, "warm", HOSTILE, [], gates={**odd, HOSTILE: {"reason": HOSTILE}})
    )
    with (
        serving(empty_status()) as peer,
        running_web(settings_for(peer.port, catalog=path), let_in=True) as running,
    ):
        wait_for(lambda: running.state.history.history().reads > 0, "the catalog is read")
        [only] = running.client.get("/api/v1/restarts").json()["restarts"]
        html = running.client.get("/restarts").text
    assert {gate["name"] for gate in only["gates"]} == {"x", "y", HOSTILE}
    assert "<script>" not in html


def test_a_cold_start_that_a_gate_decided_is_a_health_sentence(tmp_path: Path) -> None:
    cold = {**restart_status("cold"), "reason": COLD, "gates": gates("schema", COLD)}
    with serving(empty_status(restart=cold)) as peer, running_web(settings_for(peer.port)) as running:
        running.wait_for_status()
        html = unescape(running.client.get("/").text)
    assert f"This boot began with an empty cache: {COLD}" in html
