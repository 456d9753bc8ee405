"""The control rows of users, API tokens and logins, and the audit entries that go with every control row.

A row always describes the whole account, so that writing it twice changes nothing. Secrets stand in it as hashes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who did what to what, and from where; written in the transaction of the change itself.

    ``before`` and ``after`` are plain JSON values, ``None`` where there is none. ``entry_id`` is random: an entry that
    is written again is the same entry.
    """

    entry_id: str
    at_unix: float
    actor: str
    origin: str
    action: str
    subject: str
    before: Any = None
    after: Any = None


@dataclass(frozen=True, slots=True)
class UserChanged:
    """A user was made or changed, or with ``removed`` taken away.

    ``ends_logins`` ends every login of the user; a removal does so in any case, and revokes the user's tokens.
    """

    name: str
    role: str
    password_hash: str
    created_unix: float
    created_by: str
    changed_unix: float
    removed: bool = False
    ends_logins: bool = False
    audit: AuditEntry | None = None


@dataclass(frozen=True, slots=True)
class TokenChanged:
    """An API token was made, or with ``revoked_unix`` revoked. ``scopes`` narrow the role, none of them narrow nothing."""

    token_id: str
    name: str
    owner: str
    role: str
    scopes: tuple[str, ...]
    secret_hash: str
    created_unix: float
    created_by: str
    expires_unix: float | None = None
    revoked_unix: float | None = None
    last_used_unix: float | None = None
    audit: AuditEntry | None = None


@dataclass(frozen=True, slots=True)
class LoginChanged:
    """Somebody logged in to the dashboard, or with ``ended_unix`` that login is over."""

    login_id: str
    user: str
    secret_hash: str
    origin: str
    agent: str
    created_unix: float
    expires_unix: float
    last_seen_unix: float
    ended_unix: float | None = None
    end_cause: str | None = None
    audit: AuditEntry | None = None


AccountRow = UserChanged | TokenChanged | LoginChanged
