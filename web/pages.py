"""The HTML pages and their fragments."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from web.state import base_url, state_of
from web.view import overview_of

router = APIRouter(default_response_class=HTMLResponse, include_in_schema=False)

REFRESH_SECONDS = 2
"""How often the page asks for its fragment."""

NOSCRIPT_REFRESH_SECONDS = 5
"""How often the whole page is loaded anew where scripts are off."""


@router.get("/")
async def overview_page(
    request: Request, live: Annotated[Literal["on", "off"], Query()] = "on"
) -> HTMLResponse:
    """The overview; ``?live=off`` stops the reloading that stands in for scripts."""
    return _render(request, "overview.html", live=live == "on")


@router.get("/fragments/overview")
async def overview_fragment(request: Request) -> HTMLResponse:
    """The part of the overview that changes."""
    return _render(request, "overview_fragment.html", live=True)


def _render(request: Request, template: str, *, live: bool) -> HTMLResponse:
    state = state_of(request)
    overview = overview_of(
        state.poller.snapshot(), state.history.history(), state.settings, now_unix=time.time()
    )
    html = state.templates.get_template(template).render(
        page=overview,
        web_version=state.version,
        base_url=base_url(request),
        daemon_endpoint=state.settings.endpoint.removeprefix("tcp://"),
        refresh_seconds=REFRESH_SECONDS,
        noscript_seconds=NOSCRIPT_REFRESH_SECONDS,
        live=live,
    )
    return HTMLResponse(html)
