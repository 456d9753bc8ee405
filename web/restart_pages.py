"""The Restarts page and its REST twin: each start of the daemon with its gates."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from appliance.access import Permission
from web.guard import GuardedRoute, requires
from web.problems import problem_responses
from web.rendering import render
from web.restarts import RestartsDocument, restarts_of, tally
from web.state import state_of

pages = APIRouter(route_class=GuardedRoute, default_response_class=HTMLResponse, include_in_schema=False)
api = APIRouter(route_class=GuardedRoute, prefix="/api/v1", tags=["status"])


def _restarts(request: Request) -> RestartsDocument:
    """As last read: neither the daemon nor the catalog's file is waited for."""
    state = state_of(request)
    return restarts_of(state.history.history(), state.poller.snapshot().status)


@pages.get("/restarts")
@requires(Permission.STATUS_READ)
async def restarts_page(request: Request) -> HTMLResponse:
    """Each start, the newest first and open."""
    found = _restarts(request)
    return render(
        request,
        "restarts.html",
        restarts=found.restarts,
        unavailable=found.unavailable,
        tally=tally(found.restarts),
    )


@api.get("/restarts", responses=problem_responses(401, 403), operation_id="getRestarts")
@requires(Permission.STATUS_READ)
async def get_restarts(request: Request) -> RestartsDocument:
    """The latest starts of the daemon, newest first: warm or cold, why, and what each gate found.

    The running boot is there as soon as its status was read; earlier ones come from the catalog, and `unavailable` says
    why they are missing where it cannot be read.
    """
    return _restarts(request)
