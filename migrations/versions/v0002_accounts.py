"""Users, API tokens, logins and the audit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ROLES = "role IN ('viewer', 'operator', 'admin')"


def upgrade() -> None:
    """Create the tables, and the triggers that keep the audit append-only."""
    op.create_table(
        "audit",
        sa.Column("audit_id", sa.Integer(), nullable=False),
        sa.Column("entry_id", sa.Text(), nullable=False),
        sa.Column("at_unix", sa.REAL(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("audit_id", name=op.f("pk_audit")),
        sqlite_strict=True,
    )
    op.create_index(op.f("ix_audit_action"), "audit", ["action"], unique=False)
    op.create_index(op.f("ix_audit_actor"), "audit", ["actor"], unique=False)
    op.create_index("ux_audit_entry_id", "audit", ["entry_id"], unique=True)
    op.create_table(
        "logins",
        sa.Column("login_id", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("secret_hash", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("created_unix", sa.REAL(), nullable=False),
        sa.Column("expires_unix", sa.REAL(), nullable=False),
        sa.Column("last_seen_unix", sa.REAL(), nullable=False),
        sa.Column("ended_unix", sa.REAL(), nullable=True),
        sa.Column("end_cause", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("login_id", name=op.f("pk_logins")),
        sqlite_strict=True,
    )
    op.create_index(op.f("ix_logins_user"), "logins", ["user"], unique=False)
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("secret_hash", sa.Text(), nullable=False),
        sa.Column("created_unix", sa.REAL(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("expires_unix", sa.REAL(), nullable=True),
        sa.Column("revoked_unix", sa.REAL(), nullable=True),
        sa.Column("last_used_unix", sa.REAL(), nullable=True),
        sa.CheckConstraint(ROLES, name=op.f("ck_tokens_role")),
        sa.PrimaryKeyConstraint("token_id", name=op.f("pk_tokens")),
        sqlite_strict=True,
    )
    op.create_index(op.f("ix_tokens_owner"), "tokens", ["owner"], unique=False)
    op.create_table(
        "users",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("password_hash", sa.Text(), nullable=False),
        sa.Column("created_unix", sa.REAL(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("changed_unix", sa.REAL(), nullable=False),
        sa.CheckConstraint(ROLES, name=op.f("ck_users_role")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_users")),
        sqlite_strict=True,
    )
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_no_{verb.lower()} BEFORE {verb} ON audit "
            "BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END"
        )
