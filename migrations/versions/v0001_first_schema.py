"""The first schema: engines, fingerprints, objects, histories, settings, clears, restarts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table, and the triggers that keep the history of settings append-only."""
    op.create_table(
        "clears",
        sa.Column("clear_id", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("requested_by", sa.Text(), nullable=False),
        sa.Column("cleared_unix", sa.REAL(), nullable=False),
        sa.Column("removed_objects", sa.Integer(), nullable=False),
        sa.Column("removed_bytes", sa.Integer(), nullable=False),
        sa.CheckConstraint("(scope = 'all') = (namespace = '')", name=op.f("ck_clears_namespace")),
        sa.CheckConstraint("scope IN ('all', 'namespace')", name=op.f("ck_clears_scope")),
        sa.PrimaryKeyConstraint("clear_id", name=op.f("pk_clears")),
        sqlite_strict=True,
    )
    op.create_index(
        "ux_clears_epoch_namespace_cleared_unix",
        "clears",
        ["epoch", "namespace", "cleared_unix"],
        unique=True,
    )
    op.create_table(
        "engines",
        sa.Column("engine_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("engine_version", sa.Text(), nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("chunk_tokens", sa.Integer(), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("first_seen_unix", sa.REAL(), nullable=False),
        sa.Column("last_seen_unix", sa.REAL(), nullable=False),
        sa.Column("ended_unix", sa.REAL(), nullable=True),
        sa.Column("end_cause", sa.Text(), nullable=True),
        sa.CheckConstraint("state IN ('live', 'suspect', 'ended')", name=op.f("ck_engines_state")),
        sa.PrimaryKeyConstraint("engine_id", "session_id", name=op.f("pk_engines")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_engines_last_seen_unix"), "engines", ["last_seen_unix"], unique=False)
    op.create_index(op.f("ix_engines_namespace"), "engines", ["namespace"], unique=False)
    op.create_table(
        "evictions",
        sa.Column("eviction_id", sa.Integer(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("chunk_key", sa.LargeBinary(), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("age_seconds", sa.REAL(), nullable=False),
        sa.Column("idle_seconds", sa.REAL(), nullable=False),
        sa.Column("evicted_unix", sa.REAL(), nullable=False),
        sa.CheckConstraint("length(chunk_key) = 32", name=op.f("ck_evictions_chunk_key")),
        sa.PrimaryKeyConstraint("eviction_id", name=op.f("pk_evictions")),
        sqlite_strict=True,
    )
    op.create_index(op.f("ix_evictions_namespace"), "evictions", ["namespace"], unique=False)
    op.create_table(
        "fingerprint_fields",
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("field", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "field", name=op.f("pk_fingerprint_fields")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "fingerprints",
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("first_seen_unix", sa.REAL(), nullable=False),
        sa.Column("last_seen_unix", sa.REAL(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", name=op.f("pk_fingerprints")),
        sqlite_strict=True,
    )
    op.create_index(op.f("ix_fingerprints_model"), "fingerprints", ["model"], unique=False)
    op.create_table(
        "lease_ends",
        sa.Column("end_id", sa.Integer(), nullable=False),
        sa.Column("lease_id", sa.Text(), nullable=False),
        sa.Column("engine_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("chunks", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("age_seconds", sa.REAL(), nullable=False),
        sa.Column("renewals", sa.Integer(), nullable=False),
        sa.Column("ended_unix", sa.REAL(), nullable=False),
        sa.PrimaryKeyConstraint("end_id", name=op.f("pk_lease_ends")),
        sqlite_strict=True,
    )
    op.create_index(op.f("ix_lease_ends_engine_id"), "lease_ends", ["engine_id"], unique=False)
    op.create_index(op.f("ix_lease_ends_namespace"), "lease_ends", ["namespace"], unique=False)
    op.create_table(
        "object_groups",
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("group_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("shards", sa.Integer(), nullable=False),
        sa.Column("replicas", sa.Integer(), nullable=False),
        sa.Column("window_chunks", sa.Integer(), nullable=False),
        sa.Column("object_bytes", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "kind IN ('attention', 'sliding', 'recurrent')", name=op.f("ck_object_groups_kind")
        ),
        sa.CheckConstraint("shards >= 1 AND replicas >= 1", name=op.f("ck_object_groups_ranks")),
        sa.PrimaryKeyConstraint("namespace", "group_index", name=op.f("pk_object_groups")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "objects",
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("chunk_key", sa.LargeBinary(), nullable=False),
        sa.Column("group_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("shard", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(), nullable=False),
        sa.Column("chunk_index", sa.Integer(), nullable=False),
        sa.Column("salt_digest", sa.Text(), nullable=False),
        sa.Column("stored_unix", sa.REAL(), nullable=False),
        sa.Column("last_used_unix", sa.REAL(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.CheckConstraint("state IN ('committed', 'quarantined')", name=op.f("ck_objects_state")),
        sa.CheckConstraint("length(checksum) = 8", name=op.f("ck_objects_checksum")),
        sa.CheckConstraint("length(chunk_key) = 32", name=op.f("ck_objects_chunk_key")),
        sa.PrimaryKeyConstraint("namespace", "chunk_key", "group_index", "shard", name=op.f("pk_objects")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_index(
        op.f("ix_objects_namespace_group_index_bytes"),
        "objects",
        ["namespace", "group_index", "bytes"],
        unique=False,
    )
    op.create_table(
        "restarts",
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("started_unix", sa.REAL(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("gates", sa.Text(), nullable=False),
        sa.Column("clean_stop", sa.Integer(), nullable=False),
        sa.CheckConstraint("mode IN ('cold', 'warm')", name=op.f("ck_restarts_mode")),
        sa.CheckConstraint("clean_stop IN (0, 1)", name=op.f("ck_restarts_clean_stop")),
        sa.PrimaryKeyConstraint("boot_id", name=op.f("pk_restarts")),
        sqlite_strict=True,
    )
    op.create_index(op.f("ix_restarts_started_unix"), "restarts", ["started_unix"], unique=False)
    op.create_table(
        "settings",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("changed_unix", sa.REAL(), nullable=False),
        sa.Column("changed_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", "scope", name=op.f("pk_settings")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.create_table(
        "settings_history",
        sa.Column("change_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.Column("changed_unix", sa.REAL(), nullable=False),
        sa.Column("changed_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("change_id", name=op.f("pk_settings_history")),
        sqlite_strict=True,
    )
    op.create_index(
        op.f("ix_settings_history_name_scope"), "settings_history", ["name", "scope"], unique=False
    )
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER settings_history_no_{verb.lower()} BEFORE {verb} ON settings_history "
            "BEGIN SELECT RAISE(ABORT, 'settings_history is append-only'); END"
        )
