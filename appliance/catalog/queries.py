"""The read-only view of the catalog, for the web process, the command line and tests.

Every call opens the file by its path and closes it again, so a file that was replaced is simply the next answer. A
catalog that is missing, locked, damaged or of another version raises ``CatalogUnavailable``; raw SQLite errors never
come out of here. Lists are newest first and bounded; pass the last row's id (or key) to get the next page.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import and_, func, select, tuple_

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
from appliance.catalog.reading import Reader
from appliance.catalog.reading import page as _page
from appliance.catalog.records import (
    ClearRecord,
    EngineRecord,
    EvictionRecord,
    FingerprintRecord,
    GroupRecord,
    GroupTotal,
    LeaseEndRecord,
    ObjectKey,
    ObjectRecord,
    RestartRecord,
    SettingChangeRecord,
    SettingRecord,
)
from appliance.fingerprint import FieldDifference

__all__ = [
    "CatalogReader",
    "ClearRecord",
    "EngineRecord",
    "EvictionRecord",
    "FieldDifference",
    "FingerprintRecord",
    "GroupRecord",
    "GroupTotal",
    "LeaseEndRecord",
    "ObjectKey",
    "ObjectRecord",
    "RestartRecord",
    "SettingChangeRecord",
    "SettingRecord",
]


class CatalogReader(Reader):
    """What the daemon remembers. Safe to share between threads; every method may raise ``CatalogUnavailable``."""

    # --- engines and fingerprints ---

    def engines(self, *, namespace: str | None = None, limit: int = 100) -> list[EngineRecord]:
        """Engine sessions, the last seen first."""
        query = select(EngineRow.__table__).order_by(EngineRow.last_seen_unix.desc(), EngineRow.engine_id)
        if namespace is not None:
            query = query.where(EngineRow.namespace == namespace)
        with self.reading() as connection:
            return [EngineRecord(**row) for row in _page(connection, query, limit)]

    def fingerprints(self, *, model: str | None = None, limit: int = 100) -> list[FingerprintRecord]:
        """Namespaces with their whole records, the last seen first."""
        query = select(FingerprintRow.__table__).order_by(FingerprintRow.last_seen_unix.desc())
        if model is not None:
            query = query.where(FingerprintRow.model == model)
        with self.reading() as connection:
            return [
                FingerprintRecord(**{**row, "record": json.loads(row["record"])})
                for row in _page(connection, query, limit)
            ]

    def groups(self, namespace: str) -> list[GroupRecord]:
        """The object groups of a namespace, in order."""
        query = select(ObjectGroupRow.__table__).where(ObjectGroupRow.namespace == namespace)
        with self.reading() as connection:
            found = connection.execute(query.order_by(ObjectGroupRow.group_index))
            return [GroupRecord(**row) for row in found.mappings()]

    def fingerprint_fields(self, namespace: str) -> dict[str, Any]:
        """The leaves of a namespace's record by dotted path; empty for a namespace that was never registered."""
        query = select(FingerprintFieldRow.field, FingerprintFieldRow.value).where(
            FingerprintFieldRow.namespace == namespace
        )
        with self.reading() as connection:
            found = connection.execute(query.order_by(FingerprintFieldRow.field))
            return {row.field: json.loads(row.value) for row in found}

    def differing_fields(self, ours: str, theirs: str) -> list[FieldDifference]:
        """The fields in which two namespaces differ, in path order; a field that one lacks is ``None`` there."""
        mine = (
            select(FingerprintFieldRow.field, FingerprintFieldRow.value)
            .where(FingerprintFieldRow.namespace == ours)
            .subquery()
        )
        other = (
            select(FingerprintFieldRow.field, FingerprintFieldRow.value)
            .where(FingerprintFieldRow.namespace == theirs)
            .subquery()
        )
        query = (
            select(func.coalesce(mine.c.field, other.c.field).label("field"), mine.c.value, other.c.value)
            .select_from(mine.outerjoin(other, mine.c.field == other.c.field, full=True))
            .where(mine.c.value.is_distinct_from(other.c.value))
            .order_by("field")
        )
        with self.reading() as connection:
            return [
                FieldDifference(field, _loads(left), _loads(right))
                for field, left, right in connection.execute(query)
            ]

    # --- histories ---

    def lease_ends(
        self,
        *,
        namespace: str | None = None,
        engine_id: str | None = None,
        before_id: int | None = None,
        limit: int = 100,
    ) -> list[LeaseEndRecord]:
        """Ended leases, the newest first; ``before_id`` is the last ``end_id`` of the page before."""
        query = select(LeaseEndRow.__table__).order_by(LeaseEndRow.end_id.desc())
        if namespace is not None:
            query = query.where(LeaseEndRow.namespace == namespace)
        if engine_id is not None:
            query = query.where(LeaseEndRow.engine_id == engine_id)
        if before_id is not None:
            query = query.where(LeaseEndRow.end_id < before_id)
        with self.reading() as connection:
            return [LeaseEndRecord(**row) for row in _page(connection, query, limit)]

    def evictions(
        self, *, namespace: str | None = None, before_id: int | None = None, limit: int = 100
    ) -> list[EvictionRecord]:
        """What left the cache, the newest first; ``before_id`` is the last ``eviction_id`` of the page before."""
        query = select(EvictionRow.__table__).order_by(EvictionRow.eviction_id.desc())
        if namespace is not None:
            query = query.where(EvictionRow.namespace == namespace)
        if before_id is not None:
            query = query.where(EvictionRow.eviction_id < before_id)
        with self.reading() as connection:
            return [EvictionRecord(**row) for row in _page(connection, query, limit)]

    def restarts(self, *, limit: int = 100) -> list[RestartRecord]:
        """Starts of the daemon, the newest first."""
        query = select(RestartRow.__table__).order_by(RestartRow.started_unix.desc())
        with self.reading() as connection:
            return [
                RestartRecord(
                    **{**row, "gates": json.loads(row["gates"]), "clean_stop": bool(row["clean_stop"])}
                )
                for row in _page(connection, query, limit)
            ]

    # --- control rows ---

    def settings(self) -> list[SettingRecord]:
        """Every setting that was changed at run time, by name and scope."""
        query = select(SettingRow.__table__).order_by(SettingRow.name, SettingRow.scope)
        with self.reading() as connection:
            return [
                SettingRecord(**{**row, "value": json.loads(row["value"])})
                for row in connection.execute(query).mappings()
            ]

    def setting_changes(
        self,
        *,
        name: str | None = None,
        names: Collection[str] = (),
        before_id: int | None = None,
        limit: int = 100,
    ) -> list[SettingChangeRecord]:
        """Changes of settings (of one, of several, or of all), the newest first.

        ``before_id`` is the last ``change_id`` of the page before.
        """
        query = select(SettingHistoryRow.__table__).order_by(SettingHistoryRow.change_id.desc())
        if name is not None:
            query = query.where(SettingHistoryRow.name == name)
        if names:
            query = query.where(SettingHistoryRow.name.in_(names))
        if before_id is not None:
            query = query.where(SettingHistoryRow.change_id < before_id)
        with self.reading() as connection:
            return [
                SettingChangeRecord(**{**row, "before": _loads(row["before"]), "after": _loads(row["after"])})
                for row in _page(connection, query, limit)
            ]

    def clears(self, *, before_id: int | None = None, limit: int = 100) -> list[ClearRecord]:
        """Acknowledged clears, the newest first; ``before_id`` is the last ``clear_id`` of the page before."""
        query = select(ClearRow.__table__).order_by(ClearRow.clear_id.desc())
        if before_id is not None:
            query = query.where(ClearRow.clear_id < before_id)
        with self.reading() as connection:
            return [ClearRecord(**row) for row in _page(connection, query, limit)]

    # --- objects ---

    def objects(
        self,
        namespace: str,
        *,
        group_index: int | None = None,
        chunk_key_prefix: bytes = b"",
        after: ObjectKey | None = None,
        limit: int = 100,
    ) -> list[ObjectRecord]:
        """Objects of a namespace in key order; ``after`` is the last object's ``key`` of the page before.

        ``chunk_key_prefix`` keeps the chunks whose key begins with these bytes.
        """
        key = (ObjectRow.chunk_key, ObjectRow.group_index, ObjectRow.shard)
        query = select(ObjectRow.__table__).where(ObjectRow.namespace == namespace).order_by(*key)
        if group_index is not None:
            query = query.where(ObjectRow.group_index == group_index)
        if chunk_key_prefix:
            last = chunk_key_prefix.ljust(32, b"\xff")
            query = query.where(and_(ObjectRow.chunk_key >= chunk_key_prefix, ObjectRow.chunk_key <= last))
        if after is not None:
            query = query.where(tuple_(*key) > tuple_(*after))
        with self.reading() as connection:
            return [
                ObjectRecord(**{**row, "checksum": int.from_bytes(row["checksum"], "big")})
                for row in _page(connection, query, limit)
            ]

    def totals(self) -> list[GroupTotal]:
        """Objects and bytes by namespace and group, as last projected; reads an index over all objects."""
        group = (ObjectRow.namespace, ObjectRow.group_index)
        query = (
            select(*group, func.count().label("objects"), func.sum(ObjectRow.bytes).label("bytes"))
            .group_by(*group)
            .order_by(*group)
        )
        with self.reading() as connection:
            return [GroupTotal(**row) for row in connection.execute(query).mappings()]


def _loads(text: str | None) -> Any:
    return None if text is None else json.loads(text)
