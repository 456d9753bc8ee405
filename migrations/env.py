"""Alembic's entry: runs on the connection, and in the transaction, that the caller brings."""

from __future__ import annotations

from alembic import context

from appliance.catalog.models import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("The catalog is migrated by the daemon; start it with --catalog FILE.")

context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
context.run_migrations()
