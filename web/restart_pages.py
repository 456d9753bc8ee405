"""The Restarts page and its REST twin: each start of the daemon with its gates."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from web.restarts import RestartsDocument, restarts_of, tally
from web.state import base_url, state_of

router = APIRouter()


def _restarts(request: Request) -> RestartsDocument:
    """As last read: neither the daemon nor the catalog's file is waited for."""
    state = state_of(request)
    return restarts_of(state.history.history(), state.poller.snapshot().status)


@router.get("/restarts", response_class=HTMLResponse, include_in_schema=False)
async def restarts_page(request: Request) -> HTMLResponse:
    """Each start, the newest first and open."""
    state = state_of(request)
    found = _restarts(request)
    html = state.templates.get_template("restarts.html").render(
        restarts=found.restarts,
        unavailable=found.unavailable,
        tally=tally(found.restarts),
        base_url=base_url(request),
        web_version=state.version,
        daemon_endpoint=state.settings.endpoint.removeprefix("tcp://"),
        now_unix=time.time(),
    )
    return HTMLResponse(html)


@router.get("/api/v1/restarts", tags=["status"], operation_id="getRestarts")
async def get_restarts(request: Request) -> RestartsDocument:
    """The latest starts of the daemon, newest first: warm or cold, why, and what each gate found.

    The running boot is there as soon as its status was read; earlier ones come from the catalog, and `unavailable` says
    why they are missing where it cannot be read.
    """
    return _restarts(request)
