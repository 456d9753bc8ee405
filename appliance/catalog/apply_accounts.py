"""Users, tokens, logins and the audit as SQL. Every function runs inside a transaction of the caller's, and can be repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, select, text, update
from sqlalchemy.dialects.sqlite import insert as upsert

from appliance.catalog.accounts import AccountRow, AuditEntry, LoginChanged, TokenChanged, UserChanged
from appliance.catalog.models import AuditRow, LoginRow, TokenRow, UserRow
from appliance.catalog.text import json_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Connection

ENDED_LOGINS_KEPT_SECONDS = 30 * 86_400.0


def apply_account(connection: Connection, row: AccountRow) -> tuple[str, int]:
    """Write one account; the table and rowid that prove it, rowid 0 for an account that is gone.

    Raises:
        sqlalchemy.exc.DBAPIError: what SQLite reports.
    """
    if isinstance(row, UserChanged):
        return _change_user(connection, row)
    if isinstance(row, TokenChanged):
        values = {**_values(row), "scopes": json_text(list(row.scopes))}
        return _replace(connection, TokenRow, "token_id", values)
    return _change_login(connection, row)


def record_audit(connection: Connection, entry: AuditEntry) -> tuple[str, int]:
    """Add an audit entry; the table and rowid that prove it."""
    values = {
        **{name: getattr(entry, name) for name in AuditEntry.__dataclass_fields__},
        "before": None if entry.before is None else json_text(entry.before),
        "after": None if entry.after is None else json_text(entry.after),
    }
    connection.execute(upsert(AuditRow).values(values).on_conflict_do_nothing(["entry_id"]))
    found = connection.execute(select(AuditRow.audit_id).where(AuditRow.entry_id == entry.entry_id))
    return AuditRow.__tablename__, int(found.scalar_one())


def see_access(
    connection: Connection, token_ids: Collection[str], login_ids: Collection[str], seen_unix: float
) -> None:
    """Tokens and logins were used at that time."""
    if token_ids:
        connection.execute(
            update(TokenRow).where(TokenRow.token_id.in_(token_ids)).values(last_used_unix=seen_unix)
        )
    if login_ids:
        connection.execute(
            update(LoginRow).where(LoginRow.login_id.in_(login_ids)).values(last_seen_unix=seen_unix)
        )


def _change_user(connection: Connection, row: UserChanged) -> tuple[str, int]:
    if row.removed or row.ends_logins:
        connection.execute(
            update(LoginRow)
            .where(LoginRow.user == row.name, LoginRow.ended_unix.is_(None))
            .values(ended_unix=row.changed_unix, end_cause="user removed" if row.removed else "user changed")
        )
    if row.removed:
        connection.execute(
            update(TokenRow)
            .where(TokenRow.owner == row.name, TokenRow.revoked_unix.is_(None))
            .values(revoked_unix=row.changed_unix)
        )
        connection.execute(delete(UserRow).where(UserRow.name == row.name))
        return UserRow.__tablename__, 0
    values = {name: value for name, value in _values(row).items() if name not in ("removed", "ends_logins")}
    return _replace(connection, UserRow, "name", values)


def _change_login(connection: Connection, row: LoginChanged) -> tuple[str, int]:
    connection.execute(
        delete(LoginRow).where(LoginRow.expires_unix < row.created_unix - ENDED_LOGINS_KEPT_SECONDS)
    )
    return _replace(connection, LoginRow, "login_id", _values(row))


def _values(row: AccountRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__ if name != "audit"}


def _replace(connection: Connection, table: Any, key: str, values: dict[str, Any]) -> tuple[str, int]:
    statement = upsert(table).values(values)
    changed = {name: statement.excluded[name] for name in values if name != key}
    connection.execute(statement.on_conflict_do_update(index_elements=[key], set_=changed))
    name = table.__tablename__
    query = text(f"SELECT rowid FROM {name} WHERE {key} = :key")  # noqa: S608  # names of this module's tables
    return name, int(connection.execute(query, {"key": values[key]}).scalar_one())
