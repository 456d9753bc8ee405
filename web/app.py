"""The application: routes, error answers, static files and the background threads' lifetime."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from appliance import __version__
from web import api, pages, restart_pages
from web.assets import STATIC_DIR
from web.problems import Problem, install_problem_handlers
from web.security import SecurityHeaders
from web.settings import WebSettings
from web.state import WebState

DESCRIPTION = (
    "What the Pagewarden daemon knows, read-only. Errors are problem documents (RFC 9457) with stable codes."
)


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
            self.openapi_schema = document
        return self.openapi_schema


def create_app(settings: WebSettings) -> FastAPI:
    """The application for ``settings``; its threads live as long as its lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = WebState.of_settings(settings)
        app.state.web = state
        state.start()
        try:
            yield
        finally:
            state.stop()

    app = WebApp(
        title="Pagewarden",
        version=__version__,
        description=DESCRIPTION,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        openapi_tags=[
            {"name": "status", "description": "The daemon's account of itself."},
            {"name": "probes", "description": "For orchestrators and load balancers."},
            {"name": "metrics", "description": "For Prometheus."},
        ],
        lifespan=lifespan,
    )
    install_problem_handlers(app)
    app.include_router(pages.router)
    app.include_router(api.router)
    app.include_router(restart_pages.router)
    app.mount("/static", StaticFiles(directory=STATIC_DIR), name="static")
    return app
