"""The application: routes, error answers, static files and the background threads' lifetime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from appliance import __version__
from appliance.access import Permission
from web import (
    accounts,
    api,
    audit,
    doctoring,
    effective,
    eviction,
    login,
    pages,
    planning,
    policies,
    restart_pages,
    settings_page,
)
from web.access_notes import note_access
from web.assets import STATIC_DIR
from web.guard import GuardedRoute, requires
from web.openapi import describe_access
from web.problems import Problem, install_problem_handlers
from web.security import SecurityHeaders
from web.settings import WebSettings
from web.state import WebState

DESCRIPTION = (
    "What the Pagewarden daemon knows, and what an admin may change. Errors are problem documents (RFC 9457) with "
    "stable codes. Send `Authorization: Bearer TOKEN`; make a token with `pagewarden token add NAME`."
)

ROUTERS: tuple[APIRouter, ...] = (
    pages.router,
    login.pages,
    policies.pages,
    eviction.pages,
    audit.pages,
    planning.pages,
    doctoring.pages,
    restart_pages.pages,
    settings_page.pages,
    api.router,
    login.api,
    policies.api,
    eviction.api,
    audit.api,
    effective.api,
    accounts.api,
    planning.api,
    doctoring.api,
    restart_pages.api,
)
"""Everything that is served; a new page appends its routers."""

OPENAPI_PATH = "/api/v1/openapi.json"


class WebApp(FastAPI):
    """The application inside its security headers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; also the answers to errors in the outermost layer carry the headers."""
        await SecurityHeaders(super().__call__)(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The description of the API; it holds the problem document that routes refer to."""
        if self.openapi_schema is None:
            document = get_openapi(
                title=self.title,
                version=self.version,
                description=self.description,
                routes=self.routes,
                tags=self.openapi_tags,
            )
            schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            document["components"]["schemas"]["Problem"] = schema
            describe_access(document, self.routes)
            self.openapi_schema = document
        return self.openapi_schema


def create_app(settings: WebSettings) -> FastAPI:
    """The application for ``settings``; its threads live as long as its lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = WebState.of_settings(settings)
        app.state.web = state
        state.start()
        notes = asyncio.create_task(note_access(state))
        try:
            yield
        finally:
            notes.cancel()
            with suppress(asyncio.CancelledError):
                await notes
            state.stop()

    app = WebApp(
        title="Pagewarden",
        version=__version__,
        description=DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        openapi_tags=[
            {"name": "status", "description": "The daemon's account of itself."},
            {"name": "planning", "description": "What a model's cache will look like, before it is started."},
            {"name": "doctor", "description": "What is wrong, with evidence and remedies."},
            {"name": "login", "description": "Logging in and out, and who asks."},
            {
                "name": "policies",
                "description": "TTLs and the eviction policy: read, changed against their version, taken back.",
            },
            {"name": "audit", "description": "Who did what."},
            {"name": "settings", "description": "What is in force, and where it comes from."},
            {"name": "accounts", "description": "Users, API tokens and logins."},
            {"name": "probes", "description": "For orchestrators and load balancers."},
            {"name": "metrics", "description": "For Prometheus."},
        ],
        lifespan=lifespan,
    )
    app.state.doctor = doctoring.DoctorDesk()
    install_problem_handlers(app)
    for router in (*ROUTERS, _description(app)):
        # Its routes themselves and not the router: so they are all seen here, guarded each by its own class.
        app.router.routes.extend(router.routes)
    unguarded = [route for route in app.routes if not isinstance(route, GuardedRoute)]
    assert not unguarded, f"{unguarded} would be open to everybody"
    app.mount("/static", StaticFiles(directory=STATIC_DIR), name="static")
    return app


def _description(app: FastAPI) -> APIRouter:
    router = APIRouter(route_class=GuardedRoute, include_in_schema=False)

    @router.get(OPENAPI_PATH)
    @requires(Permission.STATUS_READ)
    async def get_openapi_document(request: Request) -> JSONResponse:  # noqa: ARG001
        """The OpenAPI description."""
        return JSONResponse(app.openapi())

    return router
