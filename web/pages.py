"""The HTML pages and their fragments."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from appliance.access import Permission
from web.guard import GuardedRoute, requires
from web.rendering import render
from web.state import state_of
from web.view import overview_of

router = APIRouter(route_class=GuardedRoute, default_response_class=HTMLResponse, include_in_schema=False)

REFRESH_SECONDS = 2
"""How often the page asks for its fragment."""

NOSCRIPT_REFRESH_SECONDS = 5
"""How often the whole page is loaded anew where scripts are off."""


@router.get("/")
@requires(Permission.STATUS_READ)
async def overview_page(
    request: Request, live: Annotated[Literal["on", "off"], Query()] = "on"
) -> HTMLResponse:
    """The overview; ``?live=off`` stops the reloading that stands in for scripts."""
    return _render(request, "overview.html", live=live == "on")


@router.get("/fragments/overview")
@requires(Permission.STATUS_READ)
async def overview_fragment(request: Request) -> HTMLResponse:
    """The part of the overview that changes."""
    return _render(request, "overview_fragment.html", live=True)


def _render(request: Request, template: str, *, live: bool) -> HTMLResponse:
    state = state_of(request)
    overview = overview_of(
        state.poller.snapshot(), state.history.history(), state.settings, now_unix=time.time()
    )
    return render(
        request,
        template,
        page=overview,
        refresh_seconds=REFRESH_SECONDS,
        noscript_seconds=NOSCRIPT_REFRESH_SECONDS,
        live=live,
    )
