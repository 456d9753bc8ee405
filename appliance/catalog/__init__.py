"""The catalog: what the daemon remembers on disk, in one SQLite file, off the hot path.

=============  =======================================================================================
models         the tables
events         what the daemon hands to the writer: history events and control rows
writer         the one thread that writes
queries        the typed, read-only view that the web process and the command line use
database       opening and migrating the file at start
recovery       the control rows that the daemon applies at start
=============  =======================================================================================

Control rows (settings, clears) are durable before they are acknowledged. Everything else is a history or a
projection of the arena: losing the file costs history, never the cache. ``docs/catalog.md`` has the tables.
"""
