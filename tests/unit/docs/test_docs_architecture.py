"""docs/architecture.md and docs/operations.md follow the modules, the state machines and the gates."""

from __future__ import annotations

import re
from enum import Enum

import pytest
from docs_reader import ROOT, first_words, rows, section, text_of

from appliance.catalog.health import CatalogState
from appliance.engines import EngineState
from appliance.l1.space import TRANSITIONS as EXTENT_TRANSITIONS
from appliance.l1.space import ExtentState
from appliance.leases import LeaseState
from appliance.reservations import ReservationState
from appliance.server.core import Phase
from appliance.sessions import SessionState
from connector.client import ClientState
from connector.vllm.requests import TRANSITIONS as REQUEST_TRANSITIONS
from connector.vllm.requests import Phase as RequestPhase
from web.api import DAEMON_GATE

TEXT = text_of("docs/architecture.md")
PACKAGES = ("appliance", "connector", "kernels", "web", "migrations")


def modules() -> list[str]:
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return sorted(found)


def test_the_map_has_one_line_for_every_module():
    mapped = first_words(section(TEXT, "## Module map"))
    assert sorted(mapped) == modules(), "docs/architecture.md, 'Module map': one line for each module"
    assert all(row[1] for row in rows(section(TEXT, "## Module map")))


def machine(name: str) -> str:
    """The text from the machine's name to the next one's."""
    machines = section(TEXT, "## State machines")
    begin = machines.index(f"(`{name}`)")
    following = re.search(r"^\*\*", machines[begin:], flags=re.MULTILINE)
    return machines[begin : begin + following.start()] if following else machines[begin:]


@pytest.mark.parametrize(
    "states",
    [
        Phase,
        SessionState,
        EngineState,
        LeaseState,
        ReservationState,
        ExtentState,
        ClientState,
        RequestPhase,
        CatalogState,
    ],
    ids=lambda states: f"{states.__module__}.{states.__qualname__}",
)
def test_every_state_is_in_its_machine(states: type[Enum]):
    name = (
        "connector.client.jobs.ClientState"
        if states is ClientState
        else f"{states.__module__}.{states.__name__}"
    )
    text = machine(name)
    for state in states:
        word = state.value if isinstance(state.value, str) else state.name.lower()
        assert re.search(rf"\b{word}\b", text), f"{name} has no {word}"


def transitions_of(name: str) -> set[tuple[str, str]]:
    return {(before, row[1]) for row in rows(machine(name)) for before in row[0].split(", ")}


def test_every_transition_of_extents():
    expected = {
        (before.name.lower(), after.name.lower())
        for before, following in EXTENT_TRANSITIONS.items()
        for after in following
    }
    assert transitions_of("appliance.l1.space.ExtentState") == expected


def test_every_transition_of_requests():
    expected = {
        (before.name.lower(), after.name.lower()) for (before, _), after in REQUEST_TRANSITIONS.items()
    }
    assert transitions_of("connector.vllm.requests.Phase") == expected


def test_every_gate_is_explained():
    sources = (ROOT / "appliance/server/daemon.py").read_text() + (ROOT / "web/api.py").read_text()
    made = set(re.findall(r"Gate\(\s*name=\"(\w+)\"", sources))
    assert len(made) > 1, "the gates are made elsewhere now: look for them there"
    gates = made | {DAEMON_GATE}
    assert set(first_words(section(text_of("docs/operations.md"), "## Readiness"))) == gates


def test_every_ttl_is_in_operations():
    from appliance.ttl import TTL_NAMES

    assert first_words(section(text_of("docs/operations.md"), "## TTLs")) == list(TTL_NAMES)
