"""Logging in and out, for the page and for programs, and one's own password."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from appliance.catalog.accounts import UserChanged
from appliance.credentials import MAX_PASSWORD_CHARACTERS, hash_password, issue_login, password_matches
from appliance.errors import Forbidden, PagewardenError, TooManyAttempts, WrongCredentials
from appliance.protocol import accounts as m
from appliance.protocol.messages import Done
from web.forms import form_of
from web.guard import GuardedRoute, address_of, identity_of, public, requester_of, requires_login
from web.identity import Identity, Requester
from web.problems import problem_responses
from web.rendering import render
from web.state import state_of

LOGIN_SECONDS = 12 * 3600.0
"""How long a login lasts."""

pages = APIRouter(route_class=GuardedRoute, default_response_class=HTMLResponse, include_in_schema=False)
api = APIRouter(route_class=GuardedRoute, prefix="/api/v1", tags=["login"])


LOGIN: dict[str, Any] = {
    "login_id": "0f1e2d3c4b5a",
    "user": "ada",
    "origin": "127.0.0.1",
    "agent": "Mozilla/5.0",
    "created_unix": 1_800_000_000.0,
    "expires_unix": 1_800_043_200.0,
    "last_seen_unix": 1_800_000_060.0,
}
"""An example of a login."""


class Login(m.LoginInfo):
    """One login to the dashboard."""

    model_config = ConfigDict(json_schema_extra={"examples": [LOGIN]})


class Credentials(BaseModel):
    """Who wants in."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"user": "admin", "password": "abcd-efgh-jkmn-pqrs"}]}
    )

    user: Annotated[str, Field(max_length=64)]
    password: Annotated[str, Field(max_length=MAX_PASSWORD_CHARACTERS)]


class NewPassword(BaseModel):
    """A change of one's own password; every login of the user ends with it."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"current": "abcd-efgh-jkmn-pqrs", "new": "correct horse battery"}]},
    )

    current: Annotated[str, Field(max_length=MAX_PASSWORD_CHARACTERS)]
    new: Annotated[str, Field(max_length=MAX_PASSWORD_CHARACTERS)]


class Me(BaseModel):
    """Who asks, and what they may do. ``token_id`` or ``login_id`` says by what they are known."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user": "ada",
                    "role": "viewer",
                    "permissions": ["policies:read", "settings:read", "status:read"],
                    "token_id": "",
                    "login_id": "0f1e2d3c4b5a",
                }
            ]
        }
    )

    user: str
    role: str
    permissions: list[str]
    token_id: str = ""
    login_id: str = ""

    @classmethod
    def of(cls, identity: Identity) -> Me:
        """The document for an identity."""
        return cls(
            user=identity.user,
            role=identity.role.value,
            permissions=sorted(identity.permissions),
            token_id=identity.token_id,
            login_id=identity.login_id,
        )


@api.post(
    "/login",
    response_model=Login,
    responses=problem_responses(401, 403, 422, 429, 503),
    operation_id="logIn",
)
@public()
async def log_in(request: Request, response: Response, credentials: Annotated[Credentials, Body()]) -> Any:
    """Log in; the answer sets the cookie that carries the login. Programs are better off with an API token."""
    info, cookie = await _log_in(request, credentials.user, credentials.password)
    _set_cookie(request, response, cookie)
    return info


@api.post("/logout", status_code=204, responses=problem_responses(401, 403, 503), operation_id="logOut")
@requires_login(own=True)
async def log_out(request: Request) -> Response:
    """End the login of the cookie; with an API token there is nothing to end."""
    response = Response(status_code=204)
    await _log_out(request, response)
    return response


@api.get("/me", response_model=Me, responses=problem_responses(401), operation_id="getMe")
@requires_login()
async def get_me(request: Request) -> Any:
    """Who asks, and what they may do."""
    return Me.of(identity_of(request))


@api.post(
    "/me/password",
    status_code=204,
    responses=problem_responses(401, 403, 422, 429, 503),
    operation_id="setMyPassword",
)
@requires_login(own=True)
async def set_my_password(request: Request, change: Annotated[NewPassword, Body()]) -> Response:
    """Set one's own password, showing the present one; every login of the user ends. Not for API tokens."""
    await change_own_password(request, change.current, change.new)
    return Response(status_code=204)


@pages.get("/login")
@public()
async def login_page(request: Request) -> HTMLResponse:
    """The form."""
    return _form(request, next_page=request.query_params.get("next", "/"))


@pages.post("/login")
@public()
async def log_in_by_form(request: Request) -> Response:
    """Log in and go on to where the reader wanted."""
    form = await form_of(request)
    user, next_page = form.get("user", "").strip(), form.get("next", "/")
    try:
        _, cookie = await _log_in(request, user, form.get("password", ""))
    except PagewardenError as error:
        return _form(request, next_page=next_page, user=user, error=error)
    response = RedirectResponse(next_page if _is_ours(next_page) else "/", 303)
    _set_cookie(request, response, cookie)
    return response


@pages.post("/logout")
@requires_login(own=True)
async def log_out_by_form(request: Request) -> Response:
    """Log out."""
    response = RedirectResponse("/login", 303)
    await _log_out(request, response)
    return response


async def change_own_password(request: Request, current: str, new: str) -> None:
    """Check the present password as a login would, then set the new one.

    Raises:
        Forbidden: for an API token; WrongCredentials, TooManyAttempts: as a login.
    """
    state, identity = state_of(request), identity_of(request)
    if identity.token_id:
        raise Forbidden(
            "An API token cannot change its owner's password.", remedy="Log in with the password."
        )
    await _proven(request, identity.user, current)
    hashed = await asyncio.to_thread(hash_password, new)
    await state.admin.ask(
        "set_user", m.SetUser, m.UserInfo, requester_of(request), name=identity.user, password_hash=hashed
    )


async def _log_in(request: Request, user: str, password: str) -> tuple[m.LoginInfo, str]:
    known = await _proven(request, user, password)
    issued = issue_login()
    info = await state_of(request).admin.ask(
        "open_login",
        m.OpenLogin,
        m.LoginInfo,
        Requester(known.name, address_of(request)),
        login_id=issued.public_id,
        user=known.name,
        secret_hash=issued.secret_hash,
        lifetime_seconds=LOGIN_SECONDS,
        agent=request.headers.get("user-agent", "")[:256],
    )
    return info, issued.text


async def _proven(request: Request, user: str, password: str) -> UserChanged:
    """The user, whose password this is.

    Raises:
        TooManyAttempts: before the password is looked at.
        WrongCredentials: after it was, in the same time whether the user exists or not; audited.
    """
    state, address = state_of(request), address_of(request)
    name = user.lower()[:64]
    state.attempts.check(name, address)
    async with state.hashing:
        known = await asyncio.to_thread(state.identities.reader.user, name)
        stored = None if known is None else known.password_hash
        matches = await asyncio.to_thread(password_matches, stored, password)
    if known is not None and matches:
        state.attempts.succeeded(name, address)
        return known
    state.attempts.failed(name, address)
    await _audit_failure(request, name)
    raise WrongCredentials("There is no such user with such a password.", remedy="Try again.")


async def _audit_failure(request: Request, name: str) -> None:
    note = m.NoteAudit(
        action="login.fail", subject=name, requested_by="nobody", requested_from=address_of(request)
    )
    try:
        await state_of(request).admin.note("note_audit", note, Done)
    except PagewardenError:
        return  # the daemon is away: the answer stays the same


async def _log_out(request: Request, response: Response) -> None:
    state, identity = state_of(request), identity_of(request)
    if identity.login_id:
        await state.admin.ask(
            "end_login", m.EndLogin, m.Removed, requester_of(request), login_id=identity.login_id
        )
        response.delete_cookie(state.settings.cookie_name, path="/", httponly=True, samesite="lax")


def _set_cookie(request: Request, response: Response, cookie: str) -> None:
    """The cookie that no script can read, and that other sites' requests but plain links do not carry."""
    response.set_cookie(
        state_of(request).settings.cookie_name,
        cookie,
        max_age=int(LOGIN_SECONDS),
        path="/",
        httponly=True,
        secure=request.url.scheme == "https",
        samesite="lax",
    )


def _is_ours(path: str) -> bool:
    """Whether a place to go to is on this dashboard: browsers read `//host` and `/\\host` as another one."""
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()


def _form(
    request: Request, *, next_page: str, user: str = "", error: PagewardenError | None = None
) -> HTMLResponse:
    response = render(
        request,
        "login.html",
        error=error,
        user=user,
        next_page=next_page if _is_ours(next_page) else "/",
    )
    if isinstance(error, TooManyAttempts):
        response.headers["Retry-After"] = str(error.details["retry_after_seconds"])
    return response
