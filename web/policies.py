"""TTLs: what holds, changing it against the version that was read, its history, and taking a change back."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Header, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from appliance.access import Permission
from appliance.catalog.queries import CatalogReader, SettingChangeRecord
from appliance.errors import (
    CatalogUnavailable,
    DaemonUnreachable,
    InvalidField,
    NotFound,
    PagewardenError,
    VersionChanged,
    VersionRequired,
)
from appliance.protocol.messages import SetTtl, SetTtlResult
from appliance.protocol.status import DaemonStatus, TtlStatus
from appliance.ttl import TTL_NAMES
from web.effective import SETTING_OF_TTL
from web.forms import form_of, number_of
from web.guard import GuardedRoute, requester_of, requires
from web.policy_table import policy_rows
from web.problems import problem_responses
from web.rendering import render
from web.state import state_of

HISTORY_SHOWN = 30
ANY_VERSION = "*"
"""In ``If-Match``: whatever the version is by now."""

pages = APIRouter(route_class=GuardedRoute, default_response_class=HTMLResponse, include_in_schema=False)
api = APIRouter(route_class=GuardedRoute, prefix="/api/v1/policies", tags=["policies"])

TtlName = Literal["read_lease_ttl_seconds", "write_ttl_seconds", "session_ttl_seconds"]

TTL_TITLES: dict[str, str] = {
    "read_lease_ttl_seconds": "Read lease",
    "write_ttl_seconds": "Write",
    "session_ttl_seconds": "Session",
}

_EXAMPLE_TTL: dict[str, Any] = {
    "name": "read_lease_ttl_seconds",
    "namespace": "",
    "value_seconds": 120.0,
    "configured_seconds": 300.0,
    "changed": True,
}


class TtlPolicies(BaseModel):
    """Every TTL in force: the global ones, then those of single namespaces. ``version`` goes into `If-Match`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"version": "9f2c4b6a8d0e1f35", "ttls": [_EXAMPLE_TTL]}]}
    )

    version: str
    ttls: list[TtlStatus]


class TtlChange(BaseModel):
    """The new value, or null to take the change back; for one namespace where it is named."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"value_seconds": 120.0, "namespace": ""}]}
    )

    value_seconds: Annotated[float | None, Field(gt=0, le=10_000_000, strict=True)]
    namespace: Annotated[str, Field(max_length=64)] = ""


_EXAMPLE_CHANGE: dict[str, Any] = {
    "change_id": 7,
    "name": "read_lease_ttl_seconds",
    "scope": "",
    "before": None,
    "after": 120.0,
    "changed_unix": 1_800_000_000.0,
    "changed_by": "ada",
}


class TtlChangeRecord(BaseModel):
    """One change of the history; null stands for the configured value."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_EXAMPLE_CHANGE]})

    change_id: int
    name: str
    scope: str
    before: float | None
    after: float | None
    changed_unix: float
    changed_by: str


class TtlChanged(SetTtlResult):
    """The value in force before and after, and the new version."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"before_seconds": 300.0, "after_seconds": 120.0, "version": "0a1b2c3d4e5f6071"}]
        }
    )


class TtlHistory(BaseModel):
    """Changes, the newest first; ``next_before_id`` asks for the page after, null after the last."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"changes": [_EXAMPLE_CHANGE], "next_before_id": None}]}
    )

    changes: list[TtlChangeRecord]
    next_before_id: int | None


_Match = Annotated[
    str | None, Header(alias="If-Match", description="The version that the change was made from, quoted.")
]
_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"ETag": {"schema": {"type": "string"}, "description": "The version."}}}
}


@api.get(
    "/ttls",
    response_model=TtlPolicies,
    responses={**_RESPONSE, **problem_responses(401, 403, 503)},
    operation_id="getTtls",
)
@requires(Permission.POLICIES_READ)
async def get_ttls(request: Request, response: Response) -> Any:
    """Every TTL in force, with its version as `ETag`."""
    status = await current_status(request)
    response.headers["ETag"] = f'"{status.ttls_version}"'
    return TtlPolicies(version=status.ttls_version, ttls=status.ttls)


@api.put(
    "/ttls/{name}",
    response_model=TtlChanged,
    responses={**_RESPONSE, **problem_responses(401, 403, 404, 412, 422, 428, 503)},
    operation_id="setTtl",
)
@requires(Permission.POLICIES_WRITE)
async def put_ttl(
    request: Request,
    response: Response,
    name: TtlName,
    change: Annotated[TtlChange, Body()],
    if_match: _Match = None,
) -> Any:
    """Change a TTL, at once and durably. Needs `If-Match` with the version that was read."""
    result = await _set(request, name, change.namespace, change.value_seconds, version_of(if_match))
    response.headers["ETag"] = f'"{result.version}"'
    return result


@api.get(
    "/ttls/history",
    response_model=TtlHistory,
    responses=problem_responses(401, 403, 422, 503),
    operation_id="getTtlHistory",
)
@requires(Permission.POLICIES_READ)
async def get_history(
    request: Request,
    before_id: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Any:
    """Changes of TTLs, the newest first."""
    found = await asyncio.to_thread(_history, request, limit + 1, before_id)
    more = len(found) > limit
    shown = [TtlChangeRecord.model_validate(each) for each in found[:limit]]
    return TtlHistory(changes=shown, next_before_id=shown[-1].change_id if more else None)


@api.post(
    "/ttls/history/{change_id}/undo",
    response_model=TtlChanged,
    responses={**_RESPONSE, **problem_responses(401, 403, 404, 412, 422, 428, 503)},
    operation_id="undoTtlChange",
)
@requires(Permission.POLICIES_WRITE)
async def undo_change(
    request: Request,
    response: Response,
    change_id: Annotated[int, Path(ge=1, le=2**63 - 1)],
    if_match: _Match = None,
) -> Any:
    """Set the value from before a change again. Needs `If-Match`."""
    result = await _undo(request, change_id, version_of(if_match))
    response.headers["ETag"] = f'"{result.version}"'
    return result


@pages.get("/policies")
@requires(Permission.POLICIES_READ)
async def policies_page(request: Request) -> HTMLResponse:
    """TTLs with their forms, and their history."""
    return await _page(request)


@pages.post("/policies/ttls")
@requires(Permission.POLICIES_WRITE)
async def set_by_form(request: Request) -> Response:
    """Change a TTL, or with ``reset`` take its change back."""
    form = await form_of(request)
    try:
        name, value = form.get("name", ""), None if "reset" in form else number_of(form, "value_seconds")
        await _set(request, name, form.get("namespace", ""), value, form.get("version", ""))
        await state_of(request).poller.after_change()
    except PagewardenError as error:
        return await refused(request, error, form)
    return RedirectResponse("/policies?done=saved", 303)


@pages.post("/policies/ttls/undo")
@requires(Permission.POLICIES_WRITE)
async def undo_by_form(request: Request) -> Response:
    """Take a change of the history back."""
    form = await form_of(request)
    try:
        change_id = number_of(form, "change_id")
        if not change_id.is_integer() or not 0 < change_id < 2**53:
            raise InvalidField(f"The field 'change_id' is {change_id:g}, no change.", field="change_id")
        await _undo(request, int(change_id), form.get("version", ""))
        await state_of(request).poller.after_change()
    except PagewardenError as error:
        return await refused(request, error, form)
    return RedirectResponse("/policies?done=undone", 303)


async def refused(request: Request, error: PagewardenError, form: dict[str, str]) -> HTMLResponse:
    """The page with what was wrong and what was typed; where somebody else was quicker, with their values."""
    if isinstance(error, VersionChanged):
        await state_of(request).poller.after_change()
    return await _page(request, error=error, form=form)


async def _set(
    request: Request, name: str, namespace: str, value_seconds: float | None, version: str
) -> SetTtlResult:
    if not version:
        raise VersionRequired(
            "The change does not say which version of the TTLs it was made from.",
            remedy="Send the ETag of /api/v1/policies/ttls as If-Match.",
        )
    return await state_of(request).admin.ask(
        "set_ttl",
        SetTtl,
        SetTtlResult,
        requester_of(request),
        name=name,
        value_seconds=value_seconds,
        namespace=namespace,
        if_version="" if version == ANY_VERSION else version[:64],
    )


async def _undo(request: Request, change_id: int, version: str) -> SetTtlResult:
    changes = await asyncio.to_thread(_history, request, 1, change_id + 1)
    if not changes or changes[0].change_id != change_id:
        raise NotFound(
            f"There is no change {change_id} of a TTL.", remedy="See /api/v1/policies/ttls/history."
        )
    change = changes[0]
    return await _set(request, change.name, change.scope, change.before, version)


def version_of(if_match: str | None) -> str:
    """The version inside ``If-Match``; empty without one. A weak one or a list fits no version."""
    text = (if_match or "").strip()
    return text[1:-1] if len(text) > 2 and text[0] == text[-1] == '"' else text


def _history(request: Request, limit: int, before_id: int | None = None) -> list[SettingChangeRecord]:
    path = state_of(request).settings.catalog_path
    if path is None:
        raise CatalogUnavailable("No catalog was named to the dashboard's process.")
    return CatalogReader(path).setting_changes(names=TTL_NAMES, before_id=before_id, limit=limit)


async def current_status(request: Request) -> DaemonStatus:
    """The newest status.

    Raises:
        DaemonUnreachable: before the first one: no page could be made of nothing.
    """
    state = state_of(request)
    snapshot = await state.poller.fresh()
    if snapshot.status is None:
        raise DaemonUnreachable(
            f"The daemon at {state.settings.endpoint} has not answered yet.",
            remedy="Check that `pagewarden server` runs and that host and port are right.",
        )
    return snapshot.status


async def _page(
    request: Request, *, error: PagewardenError | None = None, form: dict[str, str] | None = None
) -> HTMLResponse:
    state = state_of(request)
    snapshot = await state.poller.fresh()
    try:
        history = await asyncio.to_thread(_history, request, HISTORY_SHOWN)
        history_missing = ""
    except CatalogUnavailable as unavailable:
        history, history_missing = [], str(unavailable)
    newest = {(change.name, change.scope): change.change_id for change in reversed(history)}
    return render(
        request,
        "policies.html",
        error=error,
        snapshot=snapshot,
        daemon=snapshot.status,
        ttl_names=TTL_NAMES,
        ttl_titles=TTL_TITLES,
        setting_of_ttl=SETTING_OF_TTL,
        history=history,
        history_missing=history_missing,
        undoable=frozenset(newest.values()),
        policy_rows=policy_rows(snapshot.status) if snapshot.status else [],
        form=form or {},
    )
