"""Cells as tables for people: one for each trace and weight of a chunk, a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from appliance.l1.eviction import DEFAULT_POLICY
from appliance.replay.cells import EVERY_RANK_PADDED, Cell
from appliance.replay.replay import REFERENCE

_TITLES = {
    EVERY_RANK_PADDED: "LRU, every rank, padded",
    "SIMPLE": "simple rule",
    "MARCONI": "Marconi's rule",
    "SEGLEN": "SegLen's rule",
    DEFAULT_POLICY: f"{DEFAULT_POLICY} (default)",
    REFERENCE: "reference (clairvoyant)",
}


def tables(cells: Sequence[Cell]) -> list[Table]:
    """In the order of the cells."""
    return [
        _table(title, list(group))
        for title, group in groupby(cells, key=lambda cell: (cell.trace, _weight(cell)))
    ]


def _weight(cell: Cell) -> str:
    return f"{cell.geometry}, " * bool(cell.geometry) + f"state : attention = {cell.state_ratio:g}"


def _size(cell: Cell) -> str:
    return f"{cell.capacity:.1%}" if cell.l1_gb is None else f"{cell.l1_gb:g} GB"


def _table(title: tuple[str, str], cells: list[Cell]) -> Table:
    sizes = list(dict.fromkeys(_size(cell) for cell in cells))
    found = Table(
        title=": ".join(title),
        caption=f"Hits, as a share of chunks asked.\nWithout a limit: {cells[0].no_limit_hit_rate:.3f}.",
        title_justify="left",
        caption_justify="left",
    )
    found.add_column("policy")
    for size in sizes:
        found.add_column(size, justify="right")
    found.add_column("requests/s", justify="right")
    for policy in dict.fromkeys(cell.policy for cell in cells):
        mine = {_size(cell): cell for cell in cells if cell.policy == policy}
        slowest = min(cell.requests_per_second for cell in mine.values())
        rates = [f"{mine[size].hit_rate:.3f}" for size in sizes]
        found.add_row(_TITLES.get(policy, policy), *rates, f"{slowest:,.0f}")
    return found
