"""The starts of the daemon as people and programs read them: made of the catalog's rows and of the running boot's status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from appliance.catalog.queries import RestartRecord
from appliance.protocol.status import DaemonStatus, RestartGate
from web.history import History


class Restart(BaseModel):
    """One start: warm or cold and why, and every gate in order. ``running`` is whether this boot is the one that serves."""

    boot: str
    started_unix: float
    mode: str
    reason: str
    clean_stop: bool
    running: bool
    gates: list[RestartGate]


_EXAMPLE: dict[str, Any] = {
    "restarts": [
        {
            "boot": "00112233445566778899aabbccddeeff",
            "started_unix": 1_800_000_000.0,
            "mode": "warm",
            "reason": "Every gate opened after an orderly stop: 1234 objects were taken back.",
            "clean_stop": True,
            "running": True,
            "gates": [{"name": "lock", "outcome": "passed", "reason": "Nobody else has it.", "facts": {}}],
        }
    ],
    "unavailable": "",
}


class RestartsDocument(BaseModel):
    """The latest starts, newest first. ``unavailable`` says why the catalog's are missing, where they are."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    restarts: list[Restart]
    unavailable: str = ""


def restarts_of(history: History, status: DaemonStatus | None) -> RestartsDocument:
    """What is known: the running boot from its own status, so that it is there without a catalog too."""
    boot = "" if status is None else status.boot
    found = [_recorded(row, running=row.boot_id == boot) for row in history.restarts]
    if status is not None and status.restart is not None and boot not in {each.boot for each in found}:
        told = status.restart
        running = Restart(
            boot=boot,
            started_unix=status.started_unix,
            mode=told.mode,
            reason=told.reason,
            clean_stop=told.clean_stop,
            running=True,
            gates=told.gates,
        )
        found.insert(0, running)
    return RestartsDocument(restarts=found, unavailable=history.unavailable)


def _recorded(row: RestartRecord, *, running: bool) -> Restart:
    return Restart(
        boot=row.boot_id,
        started_unix=row.started_unix,
        mode=row.mode,
        reason=row.reason,
        clean_stop=row.clean_stop,
        running=running,
        gates=_gates(row.gates),
    )


def _gates(recorded: Mapping[str, Any]) -> list[RestartGate]:
    """The gates in their order; a row that another version wrote may hold less than this one writes."""
    told = [(name, gate) for name, gate in recorded.items() if isinstance(gate, Mapping)]
    told.sort(key=lambda each: _whole(each[1].get("place")))
    return [
        RestartGate(
            name=name,
            outcome=str(gate.get("outcome", "")),
            reason=str(gate.get("reason", "")),
            facts=_facts(gate.get("facts")),
        )
        for name, gate in told
    ]


def _facts(value: Any) -> dict[str, int]:
    facts = value if isinstance(value, Mapping) else {}
    return {str(name): fact for name, fact in facts.items() if isinstance(fact, int)}


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def tally(restarts: Sequence[Restart]) -> str:
    """How many of them were warm, in words."""
    warm = sum(each.mode == "warm" for each in restarts)
    return f"{warm} of the latest {len(restarts)} were warm"
