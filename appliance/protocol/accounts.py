"""The schema of the operations on users, API tokens, logins and the audit.

Secrets never travel but as hashes: the dashboard and the command line hash what they are given. All of these belong to
admin sessions, which showed the daemon's secret at hello. ``requested_by`` and ``requested_from`` say in whose name the
client asks; they go into the audit.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from appliance.access import Permission, UserRole
from appliance.protocol.base import Lenient, Message
from appliance.protocol.bounds import Name

MAX_NAMED = 1024
LONGEST_LIFETIME_SECONDS = 10 * 366 * 86_400

UserName = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9._@-]{0,63}$")]
PublicId = Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
SecretHash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Origin = Annotated[str, Field(max_length=256)]


class SetUser(Message):
    """Makes a user (``create``), or changes role or password of one; what is empty stays as it is."""

    name: UserName
    role: Annotated[UserRole | None, Field(strict=False)] = None
    password_hash: Annotated[str, Field(max_length=256)] = ""
    create: bool = False
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class UserInfo(Lenient):
    """One user."""

    name: str
    role: str
    created_unix: float
    created_by: str
    changed_unix: float


class RemoveUser(Message):
    """Removes a user, ends the logins and revokes the tokens of that user."""

    name: UserName
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class Removed(Lenient):
    """Whether there was something to remove, revoke or end."""

    removed: bool


class AddToken(Message):
    """Makes an API token of a user. Without ``scopes`` it may do all that its role and its owner's may."""

    token_id: PublicId
    name: Name
    owner: UserName
    role: Annotated[UserRole, Field(strict=False)]
    scopes: Annotated[list[Annotated[Permission, Field(strict=False)]], Field(max_length=64)] = []
    secret_hash: SecretHash
    lifetime_seconds: Annotated[float, Field(ge=0, le=LONGEST_LIFETIME_SECONDS)] = 0.0
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class TokenInfo(Lenient):
    """One API token; ``null`` times never were, or never will be."""

    token_id: str
    name: str
    owner: str
    role: str
    scopes: list[str]
    created_unix: float
    created_by: str
    expires_unix: float | None = None
    revoked_unix: float | None = None
    last_used_unix: float | None = None


class RevokeToken(Message):
    """Revokes an API token for good."""

    token_id: PublicId
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class OpenLogin(Message):
    """Somebody has shown the right password to the dashboard."""

    login_id: PublicId
    user: UserName
    secret_hash: SecretHash
    lifetime_seconds: Annotated[float, Field(gt=0, le=LONGEST_LIFETIME_SECONDS)]
    agent: Annotated[str, Field(max_length=256)] = ""
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class LoginInfo(Lenient):
    """One login to the dashboard."""

    login_id: str
    user: str
    origin: str
    agent: str
    created_unix: float
    expires_unix: float
    last_seen_unix: float


class EndLogin(Message):
    """Ends one login."""

    login_id: PublicId
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class NoteAccess(Message):
    """These tokens and logins were used lately; written behind."""

    tokens: Annotated[list[PublicId], Field(max_length=MAX_NAMED)] = []
    logins: Annotated[list[PublicId], Field(max_length=MAX_NAMED)] = []


class NoteAudit(Message):
    """Something to be audited that changes nothing, such as a login that failed; written behind."""

    action: Annotated[str, Field(pattern="^[a-z]+[.][a-z]+$")]
    subject: Annotated[str, Field(max_length=256)]
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class ListAccounts(Message):
    """Asks for every user, every token and the logins in force."""


class Accounts(Lenient):
    """Every user, every token and the logins in force."""

    users: list[UserInfo]
    tokens: list[TokenInfo]
    logins: list[LoginInfo]


ACCOUNT_REQUESTS: dict[str, type[Message]] = {
    "set_user": SetUser,
    "remove_user": RemoveUser,
    "add_token": AddToken,
    "revoke_token": RevokeToken,
    "open_login": OpenLogin,
    "end_login": EndLogin,
    "note_access": NoteAccess,
    "note_audit": NoteAudit,
    "accounts": ListAccounts,
}
"""The operations of this module, by their names on the wire."""
