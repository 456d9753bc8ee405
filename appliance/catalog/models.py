"""The catalog's tables. All are SQLite STRICT; ``docs/catalog.md`` documents every column.

There are no foreign keys on purpose: history is written behind and may be dropped under overload, so a row must never
depend on another row having arrived. Times are unix seconds (``*_unix``), JSON is canonical text.
"""

# No ``from __future__ import annotations``: SQLAlchemy reads these annotations at run time.

from typing import Any

from sqlalchemy import DDL, REAL, CheckConstraint, Index, Integer, LargeBinary, MetaData, Text, event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

CHUNK_KEY_BYTES = 32

Blob = bytes
"""Another name for ``bytes``, which is also the name of a column."""

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "pk": "pk_%(table_name)s",
}
"""Every constraint and index has a name, so that a migration can name what it changes."""

STRICT: dict[str, Any] = {"sqlite_strict": True}
CLUSTERED: dict[str, Any] = {**STRICT, "sqlite_with_rowid": False}


class Base(DeclarativeBase):
    """The declarative base: Python types map to the few column types that a STRICT table knows."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {str: Text(), int: Integer(), float: REAL(), bytes: LargeBinary()}  # noqa: RUF012


class EngineRow(Base):
    """One session of one engine."""

    __tablename__ = "engines"
    __table_args__ = (
        CheckConstraint("state IN ('live', 'suspect', 'ended')", name="state"),
        Index(None, "namespace"),
        Index(None, "last_seen_unix"),
        CLUSTERED,
    )

    engine_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    namespace: Mapped[str]
    host: Mapped[str]
    pid: Mapped[int]
    engine_version: Mapped[str]
    ranks: Mapped[int]
    chunk_tokens: Mapped[int]
    block_tokens: Mapped[int]
    state: Mapped[str]
    first_seen_unix: Mapped[float]
    last_seen_unix: Mapped[float]
    ended_unix: Mapped[float | None]
    end_cause: Mapped[str | None]


class FingerprintRow(Base):
    """The whole record behind one namespace."""

    __tablename__ = "fingerprints"
    __table_args__ = (Index(None, "model"), STRICT)

    namespace: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    record: Mapped[str]
    first_seen_unix: Mapped[float]
    last_seen_unix: Mapped[float]


class FingerprintFieldRow(Base):
    """One leaf of a fingerprint's record, for field-by-field comparison."""

    __tablename__ = "fingerprint_fields"
    __table_args__ = (CLUSTERED,)

    namespace: Mapped[str] = mapped_column(primary_key=True)
    field: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class ObjectGroupRow(Base):
    """One object group of a namespace."""

    __tablename__ = "object_groups"
    __table_args__ = (
        CheckConstraint("kind IN ('attention', 'sliding', 'recurrent')", name="kind"),
        CheckConstraint("shards >= 1 AND replicas >= 1", name="ranks"),
        CLUSTERED,
    )

    namespace: Mapped[str] = mapped_column(primary_key=True)
    group_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str]
    kind: Mapped[str]
    shards: Mapped[int]
    replicas: Mapped[int]
    window_chunks: Mapped[int]
    object_bytes: Mapped[int]


class ObjectRow(Base):
    """One committed object: a projection of the arena's own tables, clustered in key order."""

    __tablename__ = "objects"
    __table_args__ = (
        CheckConstraint(f"length(chunk_key) = {CHUNK_KEY_BYTES}", name="chunk_key"),
        CheckConstraint("length(checksum) = 8", name="checksum"),
        CheckConstraint("state IN ('committed', 'quarantined')", name="state"),
        Index(None, "namespace", "group_index", "bytes"),
        CLUSTERED,
    )

    namespace: Mapped[str] = mapped_column(primary_key=True)
    chunk_key: Mapped[Blob] = mapped_column(primary_key=True)
    group_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    shard: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    bytes: Mapped[int]
    checksum: Mapped[Blob]
    chunk_index: Mapped[int]
    salt_digest: Mapped[str]
    stored_unix: Mapped[float]
    last_used_unix: Mapped[float]
    state: Mapped[str]


class LeaseEndRow(Base):
    """How one lease ended."""

    __tablename__ = "lease_ends"
    __table_args__ = (Index(None, "engine_id"), Index(None, "namespace"), STRICT)

    end_id: Mapped[int] = mapped_column(primary_key=True)
    lease_id: Mapped[str]
    engine_id: Mapped[str]
    session_id: Mapped[str]
    namespace: Mapped[str]
    request_id: Mapped[str]
    cause: Mapped[str]
    chunks: Mapped[int]
    bytes: Mapped[int]
    age_seconds: Mapped[float]
    renewals: Mapped[int]
    ended_unix: Mapped[float]


class EvictionRow(Base):
    """One (chunk, group) that left the cache, over all its shards, and why."""

    __tablename__ = "evictions"
    __table_args__ = (
        CheckConstraint(f"length(chunk_key) = {CHUNK_KEY_BYTES}", name="chunk_key"),
        Index(None, "namespace"),
        STRICT,
    )

    eviction_id: Mapped[int] = mapped_column(primary_key=True)
    namespace: Mapped[str]
    group_index: Mapped[int]
    chunk_key: Mapped[Blob]
    bytes: Mapped[int]
    cause: Mapped[str]
    age_seconds: Mapped[float]
    idle_seconds: Mapped[float]
    evicted_unix: Mapped[float]


class SettingRow(Base):
    """The value in force of a setting that was changed at run time."""

    __tablename__ = "settings"
    __table_args__ = (CLUSTERED,)

    name: Mapped[str] = mapped_column(primary_key=True)
    scope: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
    changed_unix: Mapped[float]
    changed_by: Mapped[str]


class SettingHistoryRow(Base):
    """One change of a setting; rows are only ever added, which triggers enforce."""

    __tablename__ = "settings_history"
    __table_args__ = (Index(None, "name", "scope"), STRICT)

    change_id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    scope: Mapped[str]
    before: Mapped[str | None]
    after: Mapped[str | None]
    changed_unix: Mapped[float]
    changed_by: Mapped[str]


class ClearRow(Base):
    """One clear that was acknowledged; no restart may bring back what it removed."""

    __tablename__ = "clears"
    __table_args__ = (
        CheckConstraint("scope IN ('all', 'namespace')", name="scope"),
        CheckConstraint("(scope = 'all') = (namespace = '')", name="namespace"),
        Index("ux_clears_epoch_namespace_cleared_unix", "epoch", "namespace", "cleared_unix", unique=True),
        STRICT,
    )

    clear_id: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    scope: Mapped[str]
    namespace: Mapped[str]
    requested_by: Mapped[str]
    cleared_unix: Mapped[float]
    removed_objects: Mapped[int]
    removed_bytes: Mapped[int]


class RestartRow(Base):
    """One start of the daemon: warm or cold, and what each gate said."""

    __tablename__ = "restarts"
    __table_args__ = (
        CheckConstraint("mode IN ('cold', 'warm')", name="mode"),
        CheckConstraint("clean_stop IN (0, 1)", name="clean_stop"),
        Index(None, "started_unix"),
        STRICT,
    )

    boot_id: Mapped[str] = mapped_column(primary_key=True)
    started_unix: Mapped[float]
    mode: Mapped[str]
    reason: Mapped[str]
    gates: Mapped[str]
    clean_stop: Mapped[int]


class UserRow(Base):
    """Somebody who may log in."""

    __tablename__ = "users"
    __table_args__ = (CheckConstraint("role IN ('viewer', 'operator', 'admin')", name="role"), STRICT)

    name: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    password_hash: Mapped[str]
    created_unix: Mapped[float]
    created_by: Mapped[str]
    changed_unix: Mapped[float]


class TokenRow(Base):
    """One API token: a hash of it, what it may do, and when it was last used."""

    __tablename__ = "tokens"
    __table_args__ = (
        CheckConstraint("role IN ('viewer', 'operator', 'admin')", name="role"),
        Index(None, "owner"),
        STRICT,
    )

    token_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    owner: Mapped[str]
    role: Mapped[str]
    scopes: Mapped[str]
    secret_hash: Mapped[str]
    created_unix: Mapped[float]
    created_by: Mapped[str]
    expires_unix: Mapped[float | None]
    revoked_unix: Mapped[float | None]
    last_used_unix: Mapped[float | None]


class LoginRow(Base):
    """One login to the dashboard, until it ends or expires."""

    __tablename__ = "logins"
    __table_args__ = (Index(None, "user"), STRICT)

    login_id: Mapped[str] = mapped_column(primary_key=True)
    user: Mapped[str]
    secret_hash: Mapped[str]
    origin: Mapped[str]
    agent: Mapped[str]
    created_unix: Mapped[float]
    expires_unix: Mapped[float]
    last_seen_unix: Mapped[float]
    ended_unix: Mapped[float | None]
    end_cause: Mapped[str | None]


class AuditRow(Base):
    """Who did what; rows are only ever added, which triggers enforce."""

    __tablename__ = "audit"
    __table_args__ = (
        Index(None, "actor"),
        Index(None, "action"),
        Index("ux_audit_entry_id", "entry_id", unique=True),
        STRICT,
    )

    audit_id: Mapped[int] = mapped_column(primary_key=True)
    entry_id: Mapped[str]
    at_unix: Mapped[float]
    actor: Mapped[str]
    origin: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    before: Mapped[str | None]
    after: Mapped[str | None]


APPEND_ONLY = (SettingHistoryRow, AuditRow)

for _row in APPEND_ONLY:
    for _verb in ("update", "delete"):
        _name = _row.__tablename__
        _statement = (
            f"CREATE TRIGGER {_name}_no_{_verb} BEFORE {_verb.upper()} ON {_name} "
            f"BEGIN SELECT RAISE(ABORT, '{_name} is append-only'); END"
        )
        event.listen(_row.__table__, "after_create", DDL(_statement))  # type: ignore[no-untyped-call]

TABLES: tuple[str, ...] = tuple(sorted(Base.metadata.tables))
"""Every table's name."""
