"""Users, API tokens and logins over REST; the Settings page uses the same functions."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from appliance.access import Permission, UserRole
from appliance.credentials import MAX_PASSWORD_CHARACTERS, hash_password, issue_token
from appliance.protocol import accounts as m
from web.guard import GuardedRoute, requester_of, requires
from web.login import LOGIN
from web.problems import problem_responses
from web.state import state_of

api = APIRouter(route_class=GuardedRoute, prefix="/api/v1", tags=["accounts"])

_NAME = Annotated[str, Path(pattern="^[a-z0-9][a-z0-9._@-]{0,63}$", examples=["ada"])]
_ID = Annotated[str, Path(pattern="^[0-9a-f]{12}$", examples=["0f1e2d3c4b5a"])]
_Password = Annotated[str, Field(max_length=MAX_PASSWORD_CHARACTERS)]

_USER: dict[str, Any] = {
    "name": "ada",
    "role": "operator",
    "created_unix": 1_800_000_000.0,
    "created_by": "admin",
    "changed_unix": 1_800_000_000.0,
}
_TOKEN: dict[str, Any] = {
    "token_id": "0f1e2d3c4b5a",
    "name": "prometheus",
    "owner": "ada",
    "role": "viewer",
    "scopes": ["status:read"],
    "created_unix": 1_800_000_000.0,
    "created_by": "admin",
    "expires_unix": None,
    "revoked_unix": None,
    "last_used_unix": 1_800_000_100.0,
}


class NewUser(BaseModel):
    """A user to make."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"name": "ada", "role": "operator", "password": "correct horse battery"}]
        },
    )

    name: m.UserName
    role: UserRole
    password: _Password


class UserChange(BaseModel):
    """What to change of a user; what is null stays."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"role": "viewer"}]})

    role: UserRole | None = None
    password: _Password | None = None


class User(m.UserInfo):
    """One user."""

    model_config = ConfigDict(json_schema_extra={"examples": [_USER]})


class Users(BaseModel):
    """Every user."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"users": [_USER]}]})

    users: list[m.UserInfo]


class NewToken(BaseModel):
    """An API token to make. Without scopes it may do all that its role, and its owner's, may."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "name": "prometheus",
                    "owner": "ada",
                    "role": "viewer",
                    "scopes": ["status:read"],
                    "days": 90,
                }
            ]
        },
    )

    name: Annotated[str, Field(min_length=1, max_length=256)]
    owner: m.UserName
    role: UserRole = UserRole.VIEWER
    scopes: Annotated[list[Permission], Field(max_length=64)] = []
    days: Annotated[float, Field(ge=0, le=3660, allow_inf_nan=False, strict=True)] = 0.0


class IssuedToken(m.TokenInfo):
    """A token that was just made; ``token`` is its text, which is not shown again."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{**_TOKEN, "last_used_unix": None, "token": "pgw_0f1e2d3c4b5a_..."}]}
    )

    token: str


class Tokens(BaseModel):
    """Every API token, the newest first; revoked ones too."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [_TOKEN]}]})

    tokens: list[m.TokenInfo]


class Logins(BaseModel):
    """The logins in force, the last seen first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"logins": [LOGIN]}]})

    logins: list[m.LoginInfo]


@api.get("/users", response_model=Users, responses=problem_responses(401, 403, 503), operation_id="getUsers")
@requires(Permission.ACCOUNTS_READ)
async def get_users(request: Request) -> Any:
    """Every user."""
    found = await asyncio.to_thread(state_of(request).identities.reader.users)
    return Users(users=[m.UserInfo.model_validate(asdict(user)) for user in found])


@api.post(
    "/users",
    status_code=201,
    response_model=User,
    responses=problem_responses(401, 403, 409, 422, 503),
    operation_id="addUser",
)
@requires(Permission.ACCOUNTS_WRITE)
async def post_user(request: Request, user: Annotated[NewUser, Body()]) -> Any:
    """Make a user."""
    return await add_user(request, user.name, user.role, user.password)


@api.patch(
    "/users/{name}",
    response_model=User,
    responses=problem_responses(401, 403, 404, 409, 422, 503),
    operation_id="changeUser",
)
@requires(Permission.ACCOUNTS_WRITE)
async def patch_user(request: Request, name: _NAME, change: Annotated[UserChange, Body()]) -> Any:
    """Change role or password; a lesser role or a new password ends the user's logins."""
    return await change_user(request, name, change.role, change.password)


@api.delete(
    "/users/{name}",
    status_code=204,
    responses=problem_responses(401, 403, 409, 422, 503),
    operation_id="removeUser",
)
@requires(Permission.ACCOUNTS_WRITE)
async def delete_user(request: Request, name: _NAME) -> Response:
    """Remove a user with all logins and tokens; one that is not there is no error."""
    await remove_user(request, name)
    return Response(status_code=204)


@api.get(
    "/tokens", response_model=Tokens, responses=problem_responses(401, 403, 503), operation_id="getTokens"
)
@requires(Permission.ACCOUNTS_READ)
async def get_tokens(request: Request) -> Any:
    """Every API token, without its text."""
    found = await asyncio.to_thread(state_of(request).identities.reader.tokens)
    return Tokens(tokens=[m.TokenInfo.model_validate(asdict(token)) for token in found])


@api.post(
    "/tokens",
    status_code=201,
    response_model=IssuedToken,
    responses=problem_responses(401, 403, 404, 422, 503),
    operation_id="addToken",
)
@requires(Permission.ACCOUNTS_WRITE)
async def post_token(request: Request, token: Annotated[NewToken, Body()]) -> Any:
    """Make an API token; the answer is the only one with its text."""
    return await add_token(request, token)


@api.delete(
    "/tokens/{token_id}",
    status_code=204,
    responses=problem_responses(401, 403, 422, 503),
    operation_id="revokeToken",
)
@requires(Permission.ACCOUNTS_WRITE)
async def delete_token(request: Request, token_id: _ID) -> Response:
    """Revoke an API token for good; one that is revoked is no error."""
    await revoke_token(request, token_id)
    return Response(status_code=204)


@api.get(
    "/logins", response_model=Logins, responses=problem_responses(401, 403, 503), operation_id="getLogins"
)
@requires(Permission.ACCOUNTS_READ)
async def get_logins(request: Request) -> Any:
    """The logins in force."""
    found = await asyncio.to_thread(state_of(request).identities.reader.logins, time.time())
    return Logins(logins=[m.LoginInfo.model_validate(asdict(login)) for login in found])


@api.delete(
    "/logins/{login_id}",
    status_code=204,
    responses=problem_responses(401, 403, 422, 503),
    operation_id="endLogin",
)
@requires(Permission.ACCOUNTS_WRITE)
async def delete_login(request: Request, login_id: _ID) -> Response:
    """End a login; one that has ended is no error."""
    await end_login(request, login_id)
    return Response(status_code=204)


# --- what the page uses too -------------------------------------------------------------------------------------


async def add_user(request: Request, name: str, role: str, password: str) -> m.UserInfo:
    """Make a user; the password is hashed here and travels no further."""
    hashed = await _hashed(request, password)
    return await state_of(request).admin.ask(
        "set_user",
        m.SetUser,
        m.UserInfo,
        requester_of(request),
        name=name,
        role=role,
        password_hash=hashed,
        create=True,
    )


async def change_user(request: Request, name: str, role: str | None, password: str | None) -> m.UserInfo:
    """Change what is given."""
    hashed = await _hashed(request, password) if password is not None else ""
    return await state_of(request).admin.ask(
        "set_user", m.SetUser, m.UserInfo, requester_of(request), name=name, role=role, password_hash=hashed
    )


async def remove_user(request: Request, name: str) -> m.Removed:
    """Remove a user."""
    return await state_of(request).admin.ask(
        "remove_user", m.RemoveUser, m.Removed, requester_of(request), name=name
    )


async def add_token(request: Request, token: NewToken) -> IssuedToken:
    """Make a token; only its hash is kept."""
    issued = issue_token()
    info = await state_of(request).admin.ask(
        "add_token",
        m.AddToken,
        m.TokenInfo,
        requester_of(request),
        token_id=issued.public_id,
        name=token.name,
        owner=token.owner,
        role=token.role,
        scopes=token.scopes,
        secret_hash=issued.secret_hash,
        lifetime_seconds=token.days * 86_400.0,
    )
    return IssuedToken(**info.model_dump(), token=issued.text)


async def revoke_token(request: Request, token_id: str) -> m.Removed:
    """Revoke a token."""
    return await state_of(request).admin.ask(
        "revoke_token", m.RevokeToken, m.Removed, requester_of(request), token_id=token_id
    )


async def end_login(request: Request, login_id: str) -> m.Removed:
    """End a login."""
    return await state_of(request).admin.ask(
        "end_login", m.EndLogin, m.Removed, requester_of(request), login_id=login_id
    )


async def _hashed(request: Request, password: str) -> str:
    async with state_of(request).hashing:
        return await asyncio.to_thread(hash_password, password)
