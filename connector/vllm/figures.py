"""What the connector counts for vLLM's metrics, in plain data: vLLM's classes for it are in `stats`."""

from __future__ import annotations

from collections import Counter

FIGURES = {
    "lookups": "Prompts that were looked up.",
    "lookup_hits": "Prompts of which something was loaded.",
    "rank_loads": "Loads that ended, counted once on each rank.",
    "rank_loads_failed": "Loads that failed and were computed instead, counted on each rank where they failed.",
    "loaded_bytes": "Bytes loaded into the engine's cache, over all ranks.",
    "stored_objects": "Objects stored, over all ranks.",
    "stored_bytes": "Bytes stored, over all ranks.",
    "failed_objects": "Objects that could not be stored, over all ranks.",
}
"""Every figure with its meaning."""


class Tally:
    """Counts by name that are taken away from time to time."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        """Count; names are those of `FIGURES`."""
        self._counts.update(counts)

    def take(self) -> dict[str, int]:
        """What was counted since the last call; empty if nothing was."""
        taken, self._counts = self._counts, Counter()
        return {name: count for name, count in taken.items() if count}
