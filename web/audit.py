"""The audit: who did what, before and after, from where; filtered, in pages, and as CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict

from appliance.access import Permission
from appliance.catalog.account_queries import AuditFilter, AuditRecord
from appliance.errors import InvalidField, PagewardenError
from web.guard import GuardedRoute, requires
from web.problems import problem_responses
from web.rendering import render
from web.state import state_of

PAGE_ENTRIES = 50
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")

pages = APIRouter(route_class=GuardedRoute, default_response_class=HTMLResponse, include_in_schema=False)
api = APIRouter(route_class=GuardedRoute, prefix="/api/v1", tags=["audit"])


_ENTRY: dict[str, Any] = {
    "audit_id": 42,
    "at_unix": 1_800_000_000.0,
    "actor": "ada",
    "origin": "127.0.0.1",
    "action": "ttl.set",
    "subject": "read_lease_ttl_seconds",
    "before": 300.0,
    "after": 120.0,
}


class AuditEntryDocument(BaseModel):
    """One entry: ``before`` and ``after`` are JSON values, null where there is none."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_ENTRY]})

    audit_id: int
    at_unix: float
    actor: str
    origin: str
    action: str
    subject: str
    before: Any
    after: Any


class AuditPage(BaseModel):
    """Entries, the newest first; ``next_before_id`` asks for the page after, null after the last."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"entries": [_ENTRY], "next_before_id": None}]})

    entries: list[AuditEntryDocument]
    next_before_id: int | None


_Text = Annotated[str, Query(max_length=256)]
_Time = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False)]
_Before = Annotated[int | None, Query(ge=1, le=2**63 - 1)]


def wanted_of(
    actor: _Text = "",
    action: _Text = "",
    text: _Text = "",
    since_unix: _Time = None,
    until_unix: _Time = None,
) -> AuditFilter:
    """The filter in the query."""
    return AuditFilter(actor.strip(), action.strip(), text.strip(), since_unix, until_unix)


_Wanted = Annotated[AuditFilter, Depends(wanted_of)]


@api.get(
    "/audit",
    response_model=AuditPage,
    responses=problem_responses(401, 403, 422, 503),
    operation_id="getAudit",
)
@requires(Permission.AUDIT_READ)
async def get_audit(
    request: Request,
    wanted: _Wanted,
    before_id: _Before = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> Any:
    """Audit entries, the newest first. ``text`` is looked for in subject, before and after."""
    entries, following = await _entries(request, wanted, before_id, limit)
    return AuditPage(
        entries=[AuditEntryDocument.model_validate(each) for each in entries], next_before_id=following
    )


@api.get(
    "/audit.csv",
    response_class=Response,
    responses={
        200: {"content": {"text/csv": {"schema": {"type": "string"}}}},
        **problem_responses(401, 403, 422, 503),
    },
    operation_id="getAuditCsv",
)
@requires(Permission.AUDIT_READ)
async def get_audit_csv(request: Request, wanted: _Wanted) -> Response:
    """The entries of a filter as CSV, the newest first, at most 100,000."""
    reader = state_of(request).identities.reader
    entries = await asyncio.to_thread(reader.audit_export, wanted)
    return Response(
        await asyncio.to_thread(csv_of, entries),
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": 'attachment; filename="pagewarden-audit.csv"'},
    )


@pages.get("/audit")
@requires(Permission.AUDIT_READ)
async def audit_page(request: Request) -> HTMLResponse:
    """The audit with its filter; times are days in UTC."""
    query = request.query_params
    shown = {name: query.get(name, "")[:256] for name in ("actor", "action", "text", "since", "until")}
    error: PagewardenError | None = None
    entries: list[AuditRecord] = []
    following: int | None = None
    actions: list[str] = []
    try:
        wanted = AuditFilter(
            shown["actor"].strip(),
            shown["action"].strip(),
            shown["text"].strip(),
            _day(shown["since"], "since"),
            _day(shown["until"], "until", days_later=1),
        )
        entries, following = await _entries(request, wanted, _id_of(query.get("before_id", "")), PAGE_ENTRIES)
        actions = await asyncio.to_thread(state_of(request).identities.reader.audit_actions)
    except PagewardenError as refused:
        error = refused
    used = {name: value for name, value in shown.items() if value}
    return render(
        request,
        "audit.html",
        error=error,
        entries=entries,
        actions=actions,
        shown=shown,
        filtered=bool(used),
        paged="before_id" in query,
        api_query=_api_query(shown),
        newest_query=urlencode(used),
        older_query=urlencode({**used, "before_id": following}) if following else "",
    )


def csv_of(entries: list[AuditRecord]) -> str:
    """Entries as CSV with a header. A cell that a spreadsheet would compute gets an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["audit_id", "at", "actor", "origin", "action", "subject", "before", "after"])
    for entry in entries:
        at = datetime.fromtimestamp(entry.at_unix, UTC).isoformat(timespec="milliseconds")
        cells = [entry.actor, entry.origin, entry.action, entry.subject]
        values = ["" if value is None else json.dumps(value) for value in (entry.before, entry.after)]
        writer.writerow([entry.audit_id, at, *(_harmless(cell) for cell in [*cells, *values])])
    return out.getvalue()


def _harmless(cell: str) -> str:
    return f"'{cell}" if cell.startswith(FORMULA_STARTS) else cell


async def _entries(
    request: Request, wanted: AuditFilter, before_id: int | None, limit: int
) -> tuple[list[AuditRecord], int | None]:
    reader = state_of(request).identities.reader
    found = await asyncio.to_thread(reader.audit, wanted, before_id=before_id, limit=limit + 1)
    return found[:limit], found[limit - 1].audit_id if len(found) > limit else None


def _day(text: str, field: str, *, days_later: int = 0) -> float | None:
    """The begin of a day in UTC, in unix seconds; ``None`` for no text.

    Raises:
        InvalidField: if it is no day.
    """
    if not text.strip():
        return None
    try:
        day = datetime.strptime(text.strip(), "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise InvalidField(
            f"The field '{field}' is {text[:40]!r}: it must be a day like 2027-01-31.", field=field
        ) from None
    return day.timestamp() + days_later * 86_400.0


def _id_of(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _api_query(shown: dict[str, str]) -> str:
    """The same filter for the API."""
    query: dict[str, Any] = {name: shown[name] for name in ("actor", "action", "text") if shown[name]}
    for name, later in (("since", 0), ("until", 1)):
        try:
            day = _day(shown[name], name, days_later=later)
        except InvalidField:
            continue
        if day is not None:
            query[f"{name}_unix"] = int(day)
    return urlencode(query)
