"""The Doctor page and its twin in the API: what the doctor sees from the dashboard's own process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from appliance.access import Permission
from appliance.doctor.findings import Code, Finding, Report, Severity, report_of
from appliance.doctor.run import examine
from appliance.doctor.subject import Subject
from web.guard import GuardedRoute, requires
from web.problems import problem_responses
from web.rendering import render
from web.state import WebState, state_of

KEPT_SECONDS = 3.0
"""A report serves everybody who asks within this time of it."""

pages = APIRouter(route_class=GuardedRoute, default_response_class=HTMLResponse, include_in_schema=False)
api = APIRouter(route_class=GuardedRoute, prefix="/api/v1", tags=["doctor"])


class DoctorDesk:
    """Examines one at a time, in a thread of its caller's. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[float, Report] | None = None

    def report(self, state: WebState) -> Report:
        """A report that is at most a few seconds old. Blocking: looks may take seconds."""
        with self._lock:
            now = time.monotonic()
            if self._kept is None or now - self._kept[0] > KEPT_SECONDS:
                self._kept = now, _examined(state)
            return self._kept[1]


def _examined(state: WebState) -> Report:
    settings, snapshot = state.settings, state.poller.snapshot()
    endpoint = settings.endpoint.removeprefix("tcp://")
    if snapshot.status is None or not snapshot.reachable:
        unreachable = Finding(
            area="daemon",
            code=Code.DAEMON_UNREACHABLE,
            severity=Severity.PROBLEM,
            message="The daemon does not answer this dashboard, so its settings are not known here.",
            evidence=snapshot.error or "no status has come yet",
            remedy="Start it, or run `pagewarden doctor` on its host with its own flags.",
        )
        return report_of(
            [unreachable], running=False, endpoint=endpoint, host=socket.gethostname(), engine_side=False
        )
    subject = Subject.of_settings(
        {**snapshot.status.settings, "host": settings.daemon_host, "port": settings.daemon_port},
        running=snapshot.status,
        same_host=settings.daemon_host in ("127.0.0.1", "::1", "localhost"),
    )
    return examine(subject)


def _desk(request: Request) -> DoctorDesk:
    desk = request.app.state.doctor
    assert isinstance(desk, DoctorDesk), "each request would look for itself, however many ask at once"
    return desk


@api.get("/doctor", response_model=Report, responses=problem_responses(401, 403), operation_id="getDoctor")
@requires(Permission.STATUS_READ)
async def get_doctor(request: Request) -> Report:
    """What is wrong with the machine, the daemon and its engines, with evidence and remedies; the worst first."""
    return await asyncio.to_thread(_desk(request).report, state_of(request))


@pages.get("/doctor")
@requires(Permission.STATUS_READ)
async def doctor_page(request: Request) -> HTMLResponse:
    """The report as a page."""
    return await _rendered(request, "doctor.html")


@pages.get("/fragments/doctor")
@requires(Permission.STATUS_READ)
async def doctor_fragment(request: Request) -> HTMLResponse:
    """The report alone."""
    return await _rendered(request, "_doctor_report.html")


async def _rendered(request: Request, template: str) -> HTMLResponse:
    report = await asyncio.to_thread(_desk(request).report, state_of(request))
    counts = {
        severity: sum(finding.severity is severity for finding in report.findings) for severity in Severity
    }
    return render(request, template, report=report, counts=counts)
