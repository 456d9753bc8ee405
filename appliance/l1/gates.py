"""The gates of a restart: what must hold, in this order, for the objects of an earlier boot to be taken back.

::

    LOCK ─► SIZE ─► MAGIC ─► SCHEMA ─► LAYOUT ─► EPOCHS ─► TABLE_WALK ─► FIT ─► warm
     │       └────────┴─────────┴─────────┴─────────┴───────────┴─────────┴───► cold, with the reason
     └► the start is refused

A gate that fails leaves those behind it unreached: what it said could not be trusted there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class GateName(StrEnum):
    """The gates, in order."""

    LOCK = "lock"
    SIZE = "size"
    MAGIC = "magic"
    SCHEMA = "schema"
    LAYOUT = "layout"
    EPOCHS = "epochs"
    TABLE_WALK = "table_walk"
    FIT = "fit"


class GateOutcome(StrEnum):
    """What came of a gate."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate of one restart; ``reason`` is a sentence, ``facts`` are plain numbers beside it."""

    name: GateName
    outcome: GateOutcome
    reason: str
    facts: dict[str, int] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """For the catalog and the status document."""
        return {
            "name": self.name.value,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "facts": self.facts,
        }


@dataclass(slots=True)
class GateLog:
    """The gates of one restart as they are met; once one has failed or was skipped, no other can pass."""

    results: list[GateResult] = field(default_factory=list)

    def passed(self, name: GateName, reason: str, **facts: int) -> None:
        """The gate is open."""
        self._add(GateResult(name, GateOutcome.PASSED, reason, facts))

    def failed(self, name: GateName, reason: str, **facts: int) -> None:
        """The gate is closed, so the start is cold."""
        self._add(GateResult(name, GateOutcome.FAILED, reason, facts))

    def nothing_there(self, reason: str) -> None:
        """There is nothing to take back, so that no gate behind the lock has anything to judge."""
        self._add(GateResult(self._next(), GateOutcome.SKIPPED, reason))

    def _add(self, result: GateResult) -> None:
        assert result.name is self._next(), f"gate {result.name} out of order: it would judge unproven files"
        assert self.open, f"gate {result.name} behind a closed one: it would judge unproven files"
        self.results.append(result)

    def _next(self) -> GateName:
        return list(GateName)[len(self.results)]

    @property
    def open(self) -> bool:
        """Whether every gate met so far has passed."""
        return all(result.outcome is GateOutcome.PASSED for result in self.results)

    @property
    def warm(self) -> bool:
        """Whether all gates have passed."""
        return self.open and len(self.results) == len(GateName)

    @property
    def reason(self) -> str:
        """Why the start is warm or cold, in a sentence: what the deciding gate said."""
        return self.results[-1].reason

    def complete(self) -> list[GateResult]:
        """Every gate in order; those behind a closed one are skipped."""
        behind = list(GateName)[len(self.results) :]
        closed = self.results[-1]
        return [
            *self.results,
            *(
                GateResult(name, GateOutcome.SKIPPED, f"Not reached: the gate '{closed.name}' did not pass.")
                for name in behind
            ),
        ]
