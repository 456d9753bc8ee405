"""Users, tokens, logins and the audit as the web process reads them. Raises ``CatalogUnavailable`` like all readers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, or_, select

from appliance.catalog.accounts import LoginChanged, TokenChanged, UserChanged
from appliance.catalog.models import AuditRow, LoginRow, TokenRow, UserRow
from appliance.catalog.reading import Reader, page

if TYPE_CHECKING:
    from sqlalchemy import Connection, Select

LARGEST_EXPORT = 100_000


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One audit entry; ``audit_id`` grows with time."""

    audit_id: int
    at_unix: float
    actor: str
    origin: str
    action: str
    subject: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries are wanted; empty text means any. ``text`` is looked for in subject, before and after."""

    actor: str = ""
    action: str = ""
    text: str = ""
    since_unix: float | None = None
    until_unix: float | None = None


class AccountReader(Reader):
    """Reads the accounts and the audit of a catalog. Safe to share between threads."""

    def user(self, name: str) -> UserChanged | None:
        """The user of that name."""
        with self.reading() as connection:
            return next(iter(_users(connection, select(UserRow.__table__).where(UserRow.name == name))), None)

    def users(self) -> list[UserChanged]:
        """All users, by name."""
        with self.reading() as connection:
            return _users(connection, select(UserRow.__table__).order_by(UserRow.name))

    def tokens(self) -> list[TokenChanged]:
        """All tokens, the newest first; revoked ones too."""
        query = select(TokenRow.__table__).order_by(TokenRow.created_unix.desc(), TokenRow.token_id)
        with self.reading() as connection:
            return _tokens(connection, query)

    def logins(self, now_unix: float) -> list[LoginChanged]:
        """Logins that are in force at that time, the last seen first."""
        query = (
            select(LoginRow.__table__)
            .where(LoginRow.ended_unix.is_(None), LoginRow.expires_unix > now_unix)
            .order_by(LoginRow.last_seen_unix.desc(), LoginRow.login_id)
        )
        with self.reading() as connection:
            return _logins(connection, query)

    def token_and_owner(self, token_id: str) -> tuple[TokenChanged, UserChanged] | None:
        """A token with its owner; ``None`` if either does not exist."""
        with self.reading() as connection:
            tokens = _tokens(connection, select(TokenRow.__table__).where(TokenRow.token_id == token_id))
            if not tokens:
                return None
            owner = select(UserRow.__table__).where(UserRow.name == tokens[0].owner)
            users = _users(connection, owner)
            return (tokens[0], users[0]) if users else None

    def login_and_user(self, login_id: str) -> tuple[LoginChanged, UserChanged] | None:
        """A login with its user; ``None`` if either does not exist."""
        with self.reading() as connection:
            logins = _logins(connection, select(LoginRow.__table__).where(LoginRow.login_id == login_id))
            if not logins:
                return None
            users = _users(connection, select(UserRow.__table__).where(UserRow.name == logins[0].user))
            return (logins[0], users[0]) if users else None

    def audit(
        self, wanted: AuditFilter, *, before_id: int | None = None, limit: int = 100
    ) -> list[AuditRecord]:
        """Audit entries, the newest first; ``before_id`` is the last ``audit_id`` of the page before."""
        query = _filtered(wanted).order_by(AuditRow.audit_id.desc())
        if before_id is not None:
            query = query.where(AuditRow.audit_id < before_id)
        with self.reading() as connection:
            return [_audit_record(dict(row)) for row in page(connection, query, limit)]

    def audit_export(self, wanted: AuditFilter) -> list[AuditRecord]:
        """Up to ``LARGEST_EXPORT`` entries, the newest first."""
        query = _filtered(wanted).order_by(AuditRow.audit_id.desc()).limit(LARGEST_EXPORT)
        with self.reading() as connection:
            return [_audit_record(dict(row)) for row in connection.execute(query).mappings()]

    def audit_actions(self) -> list[str]:
        """Every action that was ever audited, in order."""
        query = select(AuditRow.action).group_by(AuditRow.action).order_by(AuditRow.action)
        with self.reading() as connection:
            return list(connection.execute(query).scalars())


def read_accounts(
    connection: Connection,
) -> tuple[tuple[UserChanged, ...], tuple[TokenChanged, ...], tuple[LoginChanged, ...]]:
    """Every user and token, and the logins that have not ended, through an open connection."""
    return (
        tuple(_users(connection, select(UserRow.__table__).order_by(UserRow.name))),
        tuple(_tokens(connection, select(TokenRow.__table__).order_by(TokenRow.token_id))),
        tuple(_logins(connection, select(LoginRow.__table__).where(LoginRow.ended_unix.is_(None)))),
    )


def _users(connection: Connection, query: Select[Any]) -> list[UserChanged]:
    return [UserChanged(**row) for row in connection.execute(query).mappings()]


def _tokens(connection: Connection, query: Select[Any]) -> list[TokenChanged]:
    return [
        TokenChanged(**{**row, "scopes": tuple(json.loads(row["scopes"]))})
        for row in connection.execute(query).mappings()
    ]


def _logins(connection: Connection, query: Select[Any]) -> list[LoginChanged]:
    return [LoginChanged(**row) for row in connection.execute(query).mappings()]


def _filtered(wanted: AuditFilter) -> Select[Any]:
    query = select(AuditRow.__table__)
    if wanted.actor:
        query = query.where(AuditRow.actor == wanted.actor)
    if wanted.action:
        query = query.where(AuditRow.action == wanted.action)
    if wanted.text:
        found = [
            func.instr(func.lower(column), wanted.text.lower()) > 0
            for column in (AuditRow.subject, AuditRow.before, AuditRow.after)
        ]
        query = query.where(or_(*found))
    if wanted.since_unix is not None:
        query = query.where(AuditRow.at_unix >= wanted.since_unix)
    if wanted.until_unix is not None:
        query = query.where(AuditRow.at_unix < wanted.until_unix)
    return query


def _audit_record(row: dict[str, Any]) -> AuditRecord:
    row.pop("entry_id")
    for name in ("before", "after"):
        row[name] = None if row[name] is None else json.loads(row[name])
    return AuditRecord(**row)
