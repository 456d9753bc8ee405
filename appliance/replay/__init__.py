"""Recorded request traces, replayed through the daemon's own lookup, index and eviction policies without any bytes."""
