"""`pagewarden user` and `pagewarden token`: what the Settings page does, in a shell on the daemon's host."""

from __future__ import annotations

import sys
import time
from json import dumps
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from appliance.access import Permission, UserRole
from appliance.asking import HOST, PORT, RUN_DIR, ask, requester
from appliance.credentials import generate_password, hash_password, issue_token
from appliance.errors import PagewardenError
from appliance.protocol import DEFAULT_PORT
from appliance.protocol.accounts import (
    Accounts,
    AddToken,
    ListAccounts,
    Removed,
    RemoveUser,
    RevokeToken,
    SetUser,
    TokenInfo,
    UserInfo,
)
from appliance.protocol.base import parse

user = typer.Typer(name="user", no_args_is_help=True, help="Users of the dashboard and the REST API.")
token = typer.Typer(name="token", no_args_is_help=True, help="API tokens.")

_JSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_NAME = Annotated[str, typer.Argument(help="Name of the user.")]
_PASSWORD = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password from standard input; else one is made up.")
]
_ROLE = Annotated[UserRole, typer.Option(help="viewer, operator or admin.")]


def _print(document: BaseModel, line: str, *, json: bool, **secret: str) -> None:
    """The result in a line or as JSON; a secret that was made up is in it, and not shown again."""
    if json:
        typer.echo(dumps({**document.model_dump(mode="json"), **secret}, indent=2))
        return
    typer.echo(line)
    for name, value in secret.items():
        typer.echo(f"The {name}, not shown again: {value}")


def _request(model: Any, values: dict[str, Any]) -> Any:
    """``values`` as a request; what cannot be sent is printed and ends the command with status 1."""
    try:
        return parse(model, {**values, **requester()})
    except PagewardenError as error:
        typer.echo(f"pagewarden: {error.code}: {error}", err=True)
        raise typer.Exit(1) from None


def _password(*, from_stdin: bool) -> tuple[str, dict[str, str]]:
    """The password's hash, and what is to be shown of it: itself, where it was made up here."""
    password = sys.stdin.readline().rstrip("\r\n") if from_stdin else generate_password()
    try:
        return hash_password(password), {} if from_stdin else {"password": password}
    except PagewardenError as error:
        typer.echo(f"pagewarden: {error.code}: {error}", err=True)
        raise typer.Exit(1) from None


@user.command("list")
def list_users(
    host: HOST = "127.0.0.1",
    port: PORT = DEFAULT_PORT,
    run_dir: RUN_DIR = None,
    json: _JSON = False,  # noqa: FBT002
) -> None:
    """List the users."""
    found = ask(host, port, run_dir, "accounts", ListAccounts(), Accounts)
    lines = [f"{each.name:<24} {each.role:<9} made by {each.created_by}" for each in found.users]
    shown = Accounts(users=found.users, tokens=[], logins=[])
    typer.echo(shown.model_dump_json(indent=2, include={"users"}) if json else "\n".join(lines))


@user.command("add")
def add_user(
    name: _NAME,
    role: _ROLE = UserRole.VIEWER,
    password_stdin: _PASSWORD = False,  # noqa: FBT002
    host: HOST = "127.0.0.1",
    port: PORT = DEFAULT_PORT,
    run_dir: RUN_DIR = None,
    json: _JSON = False,  # noqa: FBT002
) -> None:
    """Make a user; prints the password where none was given."""
    hashed, made_up = _password(from_stdin=password_stdin)
    args = _request(SetUser, {"name": name, "role": role, "password_hash": hashed, "create": True})
    done = ask(host, port, run_dir, "set_user", args, UserInfo)
    _print(done, f"The {done.role} {done.name} can log in.", json=json, **made_up)


@user.command("role")
def change_role(
    name: _NAME,
    role: Annotated[UserRole, typer.Argument(help="The new role.")],
    host: HOST = "127.0.0.1",
    port: PORT = DEFAULT_PORT,
    run_dir: RUN_DIR = None,
    json: _JSON = False,  # noqa: FBT002
) -> None:
    """Change a user's role; a lesser one ends the user's logins."""
    args = _request(SetUser, {"name": name, "role": role})
    done = ask(host, port, run_dir, "set_user", args, UserInfo)
    _print(done, f"{done.name} is {done.role} now.", json=json)


@user.command("password")
def change_password(
    name: _NAME,
    password_stdin: _PASSWORD = False,  # noqa: FBT002
    host: HOST = "127.0.0.1",
    port: PORT = DEFAULT_PORT,
    run_dir: RUN_DIR = None,
    json: _JSON = False,  # noqa: FBT002
) -> None:
    """Set a user's password and end the user's logins; prints it where none was given."""
    hashed, made_up = _password(from_stdin=password_stdin)
    args = _request(SetUser, {"name": name, "password_hash": hashed})
    done = ask(host, port, run_dir, "set_user", args, UserInfo)
    _print(done, f"{done.name} has a new password.", json=json, **made_up)


@user.command("remove")
def remove_user(
    name: _NAME,
    host: HOST = "127.0.0.1",
    port: PORT = DEFAULT_PORT,
    run_dir: RUN_DIR = None,
    json: _JSON = False,  # noqa: FBT002
) -> None:
    """Remove a user, with all logins and tokens."""
    done = ask(host, port, run_dir, "remove_user", _request(RemoveUser, {"name": name}), Removed)
    _print(done, f"Removed {name}." if done.removed else f"There is no user {name}.", json=json)


@token.command("list")
def list_tokens(
    host: HOST = "127.0.0.1",
    port: PORT = DEFAULT_PORT,
    run_dir: RUN_DIR = None,
    json: _JSON = False,  # noqa: FBT002
) -> None:
    """List the API tokens, revoked ones too."""
    found = ask(host, port, run_dir, "accounts", ListAccounts(), Accounts)
    now = time.time()
    shown = Accounts(users=[], tokens=found.tokens, logins=[])
    lines = [
        f"{each.token_id}  {_state(each, now):<8} {each.role:<9} {each.owner}  {each.name}"
        for each in found.tokens
    ]
    typer.echo(shown.model_dump_json(indent=2, include={"tokens"}) if json else "\n".join(lines))


@token.command("add")
def add_token(
    name: Annotated[str, typer.Argument(help="What the token is for.")],
    owner: Annotated[str, typer.Option(help="The user whose token it is.")] = "admin",
    role: _ROLE = UserRole.VIEWER,
    scope: Annotated[list[Permission] | None, typer.Option(help="Only this; may be repeated.")] = None,
    days: Annotated[float, typer.Option(help="Days until it expires; 0 never.")] = 0.0,
    host: HOST = "127.0.0.1",
    port: PORT = DEFAULT_PORT,
    run_dir: RUN_DIR = None,
    json: _JSON = False,  # noqa: FBT002
) -> None:
    """Make an API token and print it: it is not shown again."""
    issued = issue_token()
    values = {
        "token_id": issued.public_id,
        "name": name,
        "owner": owner,
        "role": role,
        "scopes": scope or [],
        "secret_hash": issued.secret_hash,
        "lifetime_seconds": days * 86_400,
    }
    done = ask(host, port, run_dir, "add_token", _request(AddToken, values), TokenInfo)
    _print(done, f"Made the token {done.token_id}.", json=json, token=issued.text)


@token.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="The token's id, as listed.")],
    host: HOST = "127.0.0.1",
    port: PORT = DEFAULT_PORT,
    run_dir: RUN_DIR = None,
    json: _JSON = False,  # noqa: FBT002
) -> None:
    """Revoke an API token at once and for good."""
    args = _request(RevokeToken, {"token_id": token_id})
    done = ask(host, port, run_dir, "revoke_token", args, Removed)
    _print(done, "Revoked." if done.removed else "No token of that id is in force.", json=json)


def _state(info: TokenInfo, now_unix: float) -> str:
    if info.revoked_unix is not None:
        return "revoked"
    return "expired" if info.expires_unix is not None and info.expires_unix <= now_unix else "valid"
