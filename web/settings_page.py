"""The Settings page and its forms: settings in force, users, API tokens, logins, and one's own password."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from appliance.access import LEAST_ROLE, Permission, UserRole
from appliance.errors import PagewardenError
from appliance.protocol.base import parse
from web import accounts
from web.accounts import IssuedToken, NewToken
from web.effective import effective_settings
from web.forms import form_of, number_of
from web.guard import GuardedRoute, identity_of, requires, requires_login
from web.login import change_own_password
from web.rendering import render
from web.state import state_of

pages = APIRouter(route_class=GuardedRoute, default_response_class=HTMLResponse, include_in_schema=False)


@pages.get("/settings")
@requires(Permission.SETTINGS_READ)
async def settings_page(request: Request) -> HTMLResponse:
    """The page."""
    return await _page(request)


@pages.post("/settings/users")
@requires(Permission.ACCOUNTS_WRITE)
async def add_user(request: Request) -> Response:
    """Make a user."""
    form = await form_of(request)
    return await _done(
        request,
        "user-added",
        lambda: accounts.add_user(
            request, form.get("name", "").strip(), form.get("role", ""), form.get("password", "")
        ),
        form,
    )


@pages.post("/settings/users/change")
@requires(Permission.ACCOUNTS_WRITE)
async def change_user(request: Request) -> Response:
    """Change a user's role, or password where one is given."""
    form = await form_of(request)
    role, password = form.get("role") or None, form.get("password") or None
    return await _done(
        request,
        "user-changed",
        lambda: accounts.change_user(request, form.get("name", ""), role, password),
        form,
    )


@pages.post("/settings/users/remove")
@requires(Permission.ACCOUNTS_WRITE)
async def remove_user(request: Request) -> Response:
    """Remove a user."""
    form = await form_of(request)
    return await _done(
        request, "user-removed", lambda: accounts.remove_user(request, form.get("name", "")), form
    )


@pages.post("/settings/tokens")
@requires(Permission.ACCOUNTS_WRITE)
async def add_token(request: Request) -> Response:
    """Make an API token; the answer is the page with the token's text, which no later one has."""
    form = await form_of(request)
    try:
        scope = form.get("scope", "")
        values: dict[str, Any] = {
            "name": form.get("name", "").strip(),
            "owner": form.get("owner", ""),
            "role": form.get("role", ""),
            "scopes": [scope] if scope else [],
            "days": number_of(form, "days"),
        }
        issued = await accounts.add_token(request, parse(NewToken, values))
    except PagewardenError as error:
        return await _page(request, error=error, form=form)
    return await _page(request, issued=issued)


@pages.post("/settings/tokens/revoke")
@requires(Permission.ACCOUNTS_WRITE)
async def revoke_token(request: Request) -> Response:
    """Revoke an API token."""
    form = await form_of(request)
    return await _done(
        request, "token-revoked", lambda: accounts.revoke_token(request, form.get("token_id", "")), form
    )


@pages.post("/settings/logins/end")
@requires(Permission.ACCOUNTS_WRITE)
async def end_login(request: Request) -> Response:
    """End a login."""
    form = await form_of(request)
    return await _done(
        request, "login-ended", lambda: accounts.end_login(request, form.get("login_id", "")), form
    )


@pages.post("/settings/password")
@requires_login(own=True)
async def set_own_password(request: Request) -> Response:
    """Set one's own password; that ends this login too, so the next page is the login's."""
    form = await form_of(request)
    try:
        await change_own_password(request, form.get("current", ""), form.get("new", ""))
    except PagewardenError as error:
        return await _page(request, error=error)
    return RedirectResponse("/login", 303)


async def _done(
    request: Request, word: str, change: Callable[[], Awaitable[Any]], form: dict[str, str]
) -> Response:
    """Make a change and show the page anew, or the page with what was wrong."""
    try:
        await change()
    except PagewardenError as error:
        return await _page(request, error=error, form=form)
    return RedirectResponse(f"/settings?done={word}", 303)


async def _page(
    request: Request,
    *,
    error: PagewardenError | None = None,
    form: dict[str, str] | None = None,
    issued: IssuedToken | None = None,
) -> HTMLResponse:
    state, identity = state_of(request), identity_of(request)
    snapshot = await state.poller.recent()
    found: dict[str, Any] = {"users": [], "tokens": [], "logins": [], "accounts_missing": ""}
    if identity.may(Permission.ACCOUNTS_READ):
        found |= await asyncio.to_thread(_accounts, request)
    return render(
        request,
        "settings.html",
        error=error,
        snapshot=snapshot,
        settings=[] if snapshot.status is None else effective_settings(snapshot.status),
        form={name: value for name, value in (form or {}).items() if name != "password"},
        issued=issued,
        roles=[role.value for role in UserRole],
        scopes=[permission.value for permission in LEAST_ROLE],
        **found,
    )


def _accounts(request: Request) -> dict[str, Any]:
    now = time.time()
    try:
        reader = state_of(request).identities.reader
        tokens = reader.tokens()
        return {
            "users": reader.users(),
            "tokens": [token for token in tokens if token.revoked_unix is None],
            "tokens_revoked": sum(token.revoked_unix is not None for token in tokens),
            "logins": reader.logins(now),
        }
    except PagewardenError as error:
        return {"accounts_missing": str(error)}
