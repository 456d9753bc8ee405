"""Alembic migrations of the catalog, run by the daemon at start. ``docs/catalog.md`` says how to add one."""

HEAD = "0002"
"""The revision that this version of Pagewarden reads and writes."""
