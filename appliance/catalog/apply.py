"""Events and control rows as SQL. Every function here runs inside a transaction of the caller's.

Control rows and projections can be repeated, so a transaction whose outcome is not known is simply tried again.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from appliance.catalog.apply_accounts import apply_account, record_audit, see_access
from appliance.catalog.events import (
    AccessSeen,
    AuditNoted,
    ClearRecorded,
    EngineEnded,
    EngineSeen,
    FingerprintSeen,
    LeaseEnded,
    ObjectsForgotten,
    ObjectsRemoved,
    ObjectsStored,
    ObjectsUsed,
    RestartRecorded,
    SettingChanged,
)
from appliance.catalog.models import (
    ClearRow,
    EngineRow,
    EvictionRow,
    FingerprintFieldRow,
    FingerprintRow,
    LeaseEndRow,
    ObjectGroupRow,
    ObjectRow,
    RestartRow,
    SettingHistoryRow,
    SettingRow,
)
from appliance.catalog.text import json_text
from appliance.fingerprint import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqlalchemy import Connection

    from appliance.catalog.events import ControlRow, HistoryEvent

CHECKSUM_BYTES = 8


def apply_history(connection: Connection, events: Sequence[HistoryEvent]) -> None:
    """Write events in order; neighbours of one type share statements.

    Raises:
        sqlalchemy.exc.DBAPIError: what SQLite reports.
        TypeError, ValueError: if a value has no JSON form.
    """
    for kind, run in groupby(events, key=type):
        _WRITERS[kind](connection, list(run))


def apply_control(connection: Connection, row: ControlRow) -> tuple[str, int]:
    """Write one control row and its audit entry; the table and rowid that prove it. Repeating it gives the same rowid.

    Raises:
        sqlalchemy.exc.DBAPIError: what SQLite reports.
        TypeError, ValueError: if a setting's value has no JSON form.
    """
    if isinstance(row, SettingChanged):
        proof = SettingHistoryRow.__tablename__, _change_setting(connection, row)
    elif isinstance(row, ClearRecorded):
        proof = ClearRow.__tablename__, _record_clear(connection, row)
    else:
        proof = apply_account(connection, row)
    return proof if row.audit is None else record_audit(connection, row.audit)


def prune_history(connection: Connection, keep_rows: int) -> int:
    """Keep the newest ``keep_rows`` lease ends and evictions each; returns the rows deleted."""
    deleted = 0
    for key in (LeaseEndRow.end_id, EvictionRow.eviction_id):
        newest = connection.execute(select(func.max(key))).scalar()
        if newest is not None:
            deleted += connection.execute(delete(key.class_).where(key <= newest - keep_rows)).rowcount
    return deleted


# --- control rows ---


def _change_setting(connection: Connection, row: SettingChanged) -> int:
    after = None if row.value is None else json_text(row.value)
    history = SettingHistoryRow
    newest = connection.execute(
        select(history.change_id, history.after, history.changed_unix, history.changed_by)
        .where(history.name == row.name, history.scope == row.scope)
        .order_by(history.change_id.desc())
        .limit(1)
    ).first()
    if newest is not None and tuple(newest[1:]) == (after, row.changed_unix, row.changed_by):
        return int(newest.change_id)
    here = (SettingRow.name == row.name, SettingRow.scope == row.scope)
    before = connection.execute(select(SettingRow.value).where(*here)).scalar()
    if after is None:
        connection.execute(delete(SettingRow).where(*here))
    else:
        _replace(
            connection,
            SettingRow,
            [
                {
                    "name": row.name,
                    "scope": row.scope,
                    "value": after,
                    "changed_unix": row.changed_unix,
                    "changed_by": row.changed_by,
                }
            ],
        )
    change_id = connection.execute(
        insert(history)
        .values(
            name=row.name,
            scope=row.scope,
            before=before,
            after=after,
            changed_unix=row.changed_unix,
            changed_by=row.changed_by,
        )
        .returning(history.change_id)
    ).scalar_one()
    return int(change_id)


def _record_clear(connection: Connection, row: ClearRecorded) -> int:
    values = {name: value for name, value in _values(row).items() if name != "audit"}
    connection.execute(upsert(ClearRow).values(values).on_conflict_do_nothing(_CLEAR_IDENTITY))
    return int(
        connection.execute(
            select(ClearRow.clear_id).where(
                ClearRow.epoch == row.epoch,
                ClearRow.namespace == row.namespace,
                ClearRow.cleared_unix == row.cleared_unix,
            )
        ).scalar_one()
    )


_CLEAR_IDENTITY = ["epoch", "namespace", "cleared_unix"]


# --- history ---


def _values(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__dataclass_fields__}


def _replace(
    connection: Connection,
    table: Any,
    rows: Iterable[Mapping[str, Any]],
    *,
    keep: frozenset[str] = frozenset(),
) -> None:
    """Insert rows, or overwrite all but the ``keep`` columns of those that exist."""
    statement = upsert(table)
    changed = {
        column.name: statement.excluded[column.name]
        for column in table.__table__.columns
        if not column.primary_key and column.name not in keep
    }
    connection.execute(statement.on_conflict_do_update(set_=changed), list(rows))


def _engines_seen(connection: Connection, events: Sequence[EngineSeen]) -> None:
    rows = [{**_values(event), "ended_unix": None, "end_cause": None} for event in events]
    _replace(connection, EngineRow, rows, keep=frozenset({"first_seen_unix"}))


def _engines_ended(connection: Connection, events: Sequence[EngineEnded]) -> None:
    statement = (
        update(EngineRow)
        .where(EngineRow.engine_id == bindparam("engine"), EngineRow.session_id == bindparam("session"))
        .values(state="ended", ended_unix=bindparam("at"), end_cause=bindparam("cause"))
    )
    connection.execute(
        statement,
        [
            {
                "engine": event.engine_id,
                "session": event.session_id,
                "at": event.ended_unix,
                "cause": event.cause,
            }
            for event in events
        ],
    )


def _fingerprints_seen(connection: Connection, events: Sequence[FingerprintSeen]) -> None:
    for event in events:
        known = connection.execute(
            select(FingerprintRow.namespace).where(FingerprintRow.namespace == event.namespace)
        ).scalar()
        row = {
            "namespace": event.namespace,
            "model": event.model,
            "record": json_text(event.record),
            "first_seen_unix": event.seen_unix,
            "last_seen_unix": event.seen_unix,
        }
        _replace(connection, FingerprintRow, [row], keep=frozenset({"first_seen_unix"}))
        if known is None:
            fields = [
                {"namespace": event.namespace, "field": field, "value": json_text(value)}
                for field, value in flatten(event.record)
            ]
            _replace(connection, FingerprintFieldRow, fields)
        groups = [
            {"namespace": event.namespace, "group_index": index, **shape._asdict()}
            for index, shape in enumerate(event.groups)
        ]
        if groups:
            _replace(connection, ObjectGroupRow, groups)


def _objects_stored(connection: Connection, events: Sequence[ObjectsStored]) -> None:
    rows = (item._asdict() for event in events for item in event.objects)
    _replace(
        connection,
        ObjectRow,
        ({**row, "checksum": row["checksum"].to_bytes(CHECKSUM_BYTES, "big")} for row in rows),
    )


_SAME_CHUNK = (
    ObjectRow.namespace == bindparam("of_namespace"),
    ObjectRow.chunk_key == bindparam("of_chunk"),
    ObjectRow.group_index == bindparam("of_group"),
)


def _objects_used(connection: Connection, events: Sequence[ObjectsUsed]) -> None:
    connection.execute(
        update(ObjectRow).where(*_SAME_CHUNK).values(last_used_unix=bindparam("at")),
        [
            {
                "of_namespace": item.namespace,
                "of_chunk": item.chunk_key,
                "of_group": item.group_index,
                "at": at,
            }
            for event in events
            for item in event.objects
            for at in (item.last_used_unix,)
        ],
    )


def _objects_removed(connection: Connection, events: Sequence[ObjectsRemoved]) -> None:
    removed = [item for event in events for item in event.objects]
    connection.execute(
        delete(ObjectRow).where(*_SAME_CHUNK),
        [
            {"of_namespace": item.namespace, "of_chunk": item.chunk_key, "of_group": item.group_index}
            for item in removed
        ],
    )
    rows = [item._asdict() for item in removed]
    for row in rows:
        row["evicted_unix"] = row.pop("removed_unix")
    connection.execute(insert(EvictionRow), rows)


def _objects_forgotten(connection: Connection, events: Sequence[ObjectsForgotten]) -> None:
    for event in events:
        statement = delete(ObjectRow)
        if event.namespace is not None:
            statement = statement.where(ObjectRow.namespace == event.namespace)
        connection.execute(statement)


def _leases_ended(connection: Connection, events: Sequence[LeaseEnded]) -> None:
    connection.execute(insert(LeaseEndRow), [_values(event) for event in events])


def _restarts(connection: Connection, events: Sequence[RestartRecorded]) -> None:
    for event in events:
        row = {**_values(event), "gates": json_text(dict(event.gates)), "clean_stop": int(event.clean_stop)}
        _replace(connection, RestartRow, [row])
        connection.execute(
            update(EngineRow)
            .where(EngineRow.state != "ended", EngineRow.last_seen_unix < event.started_unix)
            .values(state="ended", ended_unix=event.started_unix, end_cause="daemon restarted")
        )


def _access_seen(connection: Connection, events: Sequence[AccessSeen]) -> None:
    for event in events:
        see_access(connection, event.token_ids, event.login_ids, event.seen_unix)


def _audit_noted(connection: Connection, events: Sequence[AuditNoted]) -> None:
    for event in events:
        record_audit(connection, event.entry)


_WRITERS: dict[type[HistoryEvent], Callable[[Connection, Any], None]] = {
    EngineSeen: _engines_seen,
    EngineEnded: _engines_ended,
    FingerprintSeen: _fingerprints_seen,
    ObjectsStored: _objects_stored,
    ObjectsUsed: _objects_used,
    ObjectsRemoved: _objects_removed,
    ObjectsForgotten: _objects_forgotten,
    LeaseEnded: _leases_ended,
    RestartRecorded: _restarts,
    AccessSeen: _access_seen,
    AuditNoted: _audit_noted,
}
