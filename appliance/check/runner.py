"""One check at a time, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from appliance.check.entries import check_entries
from appliance.check.findings import Findings
from appliance.check.holds import check_sessions, check_totals
from appliance.check.looks import Looks
from appliance.check.ownership import check_ownership
from appliance.check.projection import check_catalog
from appliance.check.records import check_records
from appliance.errors import NotFound, PagewardenError
from appliance.l1.store import Store
from appliance.leases import LeaseTable
from appliance.protocol.messages import CheckResult
from appliance.reservations import ReservationTable
from appliance.sessions import SessionTable

if TYPE_CHECKING:
    from appliance.server.core import Core

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Run:
    """One check, under way or over."""

    number: int
    looks: Looks
    findings: Findings = field(default_factory=Findings)
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    done: bool = False
    failure: str = ""


class CheckRunner:
    """Starts checks and keeps the last one's result. ``ask`` runs on the loop thread and returns at once.

    ``post`` has the loop run something; ``queued`` counts the rows that wait for the catalog at ``catalog``.
    """

    def __init__(
        self,
        core: Core,
        post: Callable[[Callable[[], None]], None],
        catalog: Path,
        queued: Callable[[], int],
    ) -> None:
        self._core = core
        self._post = post
        self._catalog = catalog
        self._queued = queued
        self._run: _Run | None = None

    def ask(self, number: int) -> CheckResult:
        """Start a check, or join the one under way, if ``number`` is 0; else how that one stands.

        Raises:
            NotFound: if it is not the last one.
        """
        run = self._run
        if not number and (run is None or run.done):
            run = self._run = _Run(1 if run is None else run.number + 1, Looks(self._post))
            threading.Thread(target=self._check, args=(run,), name="check", daemon=True).start()
        if run is None or (number and number != run.number):
            raise NotFound(f"Check {number} is not the last one.", remedy="Start another one.")
        return _result(run)

    def _check(self, run: _Run) -> None:
        try:
            self._walk(run.looks, run.findings)
        except PagewardenError as error:
            run.failure = str(error)
        except Exception as error:  # noqa: BLE001  # told in the result, whatever it is
            run.failure = f"The check itself failed: {type(error).__name__}: {error}."
            _log.exception("a check failed")
        run.seconds = time.monotonic() - run.began
        run.done = True
        _log.info(
            "checked",
            findings=run.findings.total,
            notes=len(run.findings.notes),
            failure=run.failure,
            seconds=round(run.seconds, 3),
            longest_look_ms=round(run.looks.longest_seconds * 1000, 2),
            **run.findings.checked,
        )

    def _walk(self, looks: Looks, findings: Findings) -> None:
        core = self._core
        check_memory(core.store, core.leases, core.reservations, core.sessions, looks, findings)
        check_catalog(core.store, self._catalog, self._queued, looks, findings)


def check_memory(
    store: Store,
    leases: LeaseTable,
    reservations: ReservationTable,
    sessions: SessionTable,
    looks: Looks,
    findings: Findings,
) -> None:
    """Everything but the catalog."""
    check_ownership(store, reservations, looks, findings)
    check_records(store, looks, findings)
    check_entries(store, looks, findings)
    check_totals(store, leases, reservations, looks, findings)
    check_sessions(leases, reservations, sessions, looks, findings)


def _result(run: _Run) -> CheckResult:
    findings = run.findings
    return CheckResult(
        run=run.number,
        done=run.done,
        clean=run.done and not findings.total and not run.failure,
        failure=run.failure,
        seconds=run.seconds if run.done else time.monotonic() - run.began,
        looks=run.looks.count,
        longest_look_ms=run.looks.longest_seconds * 1000,
        checked=dict(findings.checked),
        findings_total=findings.total,
        findings=list(findings.shown) if run.done else [],
        notes=list(findings.notes) if run.done else [],
    )
