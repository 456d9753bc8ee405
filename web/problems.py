"""Errors as RFC 9457 problem documents, with the stable codes of the project's error tree."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from appliance.errors import (
    InvalidField,
    NotAuthenticated,
    NotFound,
    PagewardenError,
    TooManyAttempts,
    UnknownOperation,
)
from web.rendering import render

PROBLEM_MEDIA_TYPE = "application/problem+json"

_log = structlog.stdlib.get_logger("web")


class Problem(BaseModel):
    """A problem document (RFC 9457). ``code`` is stable, ``remedy`` says what to do, where there is something."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    remedy: str = ""
    retryable: bool = False
    details: dict[str, Any] = {}


def problem_response(
    request: Request,
    error: PagewardenError,
    *,
    status: int | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """The answer that tells a client about ``error``: a problem document, or a page for who wants one."""
    http_status = status or error.http_status
    headers = {**_headers_of(error), **(headers or {})}
    if _wants_page(request):
        return _page_of(request, error, http_status, headers)
    document = Problem(
        type=f"urn:pagewarden:error:{error.code}",
        title=_title(error),
        status=http_status,
        detail=error.message,
        instance=request.url.path,
        code=error.code,
        remedy=error.remedy,
        retryable=error.retryable,
        details=error.details,
    )
    return JSONResponse(
        document.model_dump(mode="json"), http_status, headers=headers, media_type=PROBLEM_MEDIA_TYPE
    )


def install_problem_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` a problem document."""
    app.add_exception_handler(PagewardenError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_bug)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route in OpenAPI, for the error statuses it may answer with."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }


def _headers_of(error: PagewardenError) -> dict[str, str]:
    if isinstance(error, NotAuthenticated):
        return {"WWW-Authenticate": 'Bearer realm="pagewarden"'}
    if isinstance(error, TooManyAttempts):
        return {"Retry-After": str(error.details.get("retry_after_seconds", 60))}
    return {}


def _wants_page(request: Request) -> bool:
    """Whether a person is looking: a browser asks for HTML, and the API never gives any."""
    return not request.url.path.startswith("/api/") and "text/html" in request.headers.get("accept", "")


def _page_of(
    request: Request, error: PagewardenError, http_status: int, headers: dict[str, str] | None
) -> Response:
    response = render(request, "error.html", shown=error, title=_title(error), status=http_status)
    response.headers.update(headers or {})
    return response


def _title(error: PagewardenError) -> str:
    words = error.code.replace("_", " ")
    return words[:1].upper() + words[1:]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PagewardenError), "another error would leak its text as a known one"
    return problem_response(request, error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "another error would leak its text as a known one"
    if isinstance(error.__cause__, PagewardenError):  # what went wrong while the body was read
        return problem_response(request, error.__cause__)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        known: PagewardenError = NotFound(
            f"There is nothing at {request.url.path}.", remedy="See /api/v1/openapi.json for what there is."
        )
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        known = UnknownOperation(f"{request.method} is not possible at {request.url.path}.")
    else:
        known = PagewardenError(str(error.detail))
    return problem_response(request, known, status=error.status_code, headers=headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "another error would leak its text as a known one"
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return problem_response(request, InvalidField(f"The parameter '{field}': {first['msg']}.", field=field))


async def _on_bug(request: Request, error: Exception) -> Response:
    _log.error("a request failed", path=request.url.path, exc_info=error)
    hidden = PagewardenError(
        "This page's process failed to answer; its log has the details.",
        remedy="Please report it with the log's traceback.",
    )
    return problem_response(request, hidden)
