"""`pagewarden bench trace`: options and what they mean; the replay is imported when it runs."""

from __future__ import annotations

import json as to_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.errors import PagewardenError

if TYPE_CHECKING:
    from appliance.replay.cells import Cell
    from appliance.replay.trace import Trace

_SHARES = "0.01,0.03,0.1"
_RATIO = "5.7"


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Traces: a JSON object a line, with timestamp, input_length and hash_ids.",
            metavar="FILE...",
        ),
    ],
    policy: Annotated[str, typer.Option(help="all, or names of policies with commas between them.")] = "all",
    capacity: Annotated[
        str, typer.Option(help=f"Shares of all bytes ever stored, with commas.  [default: {_SHARES}]")
    ] = "",
    state_ratio: Annotated[
        str,
        typer.Option(
            help=f"Bytes of a state to those of a chunk's attention, with commas.  [default: {_RATIO}]"
        ),
    ] = "",
    l1_gb: Annotated[
        str, typer.Option(help="Sizes of L1 in GB (10^9 bytes), with commas; needs --geometry.")
    ] = "",
    geometry: Annotated[
        str, typer.Option(help="Whose chunks fill --l1-gb: a model and its ranks, such as kimi-k3-tp8.")
    ] = "",
    half: Annotated[str, typer.Option(help="Only the first or the second half of each trace.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Replay recorded prompts through the daemon's index and policies: what would have been hit."""
    from appliance.replay.trace import HALVES, read_trace

    policies = _policies(policy)
    shares = _numbers("--capacity", capacity or ("" if l1_gb and not state_ratio else _SHARES), at_most=1)
    ratios = _numbers("--state-ratio", state_ratio or _RATIO, at_most=1000, or_zero=True)
    sizes_gb = _numbers("--l1-gb", l1_gb)
    if bool(sizes_gb) != bool(geometry):
        raise typer.BadParameter("--l1-gb and --geometry go together: give both, or neither.")
    if half and half not in HALVES:
        raise typer.BadParameter(f"--half is '{half}'; use {' or '.join(HALVES)}.")
    cells: list[Cell] = []
    try:
        for path in files:
            found = read_trace(path)
            cells += _cells_of(
                found.half(half) if half else found, policies, shares, ratios, sizes_gb, geometry
            )
    except PagewardenError as error:
        typer.echo(f"pagewarden: {error.code}: {error}", err=True)
        raise typer.Exit(1) from None
    if json:
        typer.echo(to_json.dumps([cell.as_row() for cell in cells], indent=2))
    else:
        _print(cells)


def _cells_of(
    found: Trace,
    policies: list[str],
    shares: list[float],
    ratios: list[float],
    sizes_gb: list[float],
    geometry: str,
) -> list[Cell]:
    from appliance.replay.cells import cells_of_shares, cells_of_sizes
    from appliance.replay.layouts import layouts_of

    cells = list(cells_of_shares(found, policies, ratios, shares))
    if geometry:
        cells += cells_of_sizes(found, policies, layouts_of(geometry), sizes_gb)
    return cells


def _print(cells: list[Cell]) -> None:
    from rich.console import Console

    from appliance.replay.tables import tables

    console = Console()
    for table in tables(cells):
        console.print(table)


def _policies(text: str) -> list[str]:
    from appliance.replay.replay import REPLAYED

    if text.lower() == "all":
        return list(REPLAYED)
    names = [name.strip().upper() for name in text.split(",")]
    for name in names:
        if name not in REPLAYED:
            raise typer.BadParameter(f"--policy names '{name}'; use all, or any of {', '.join(REPLAYED)}.")
    return names


def _numbers(option: str, text: str, *, at_most: float = float("inf"), or_zero: bool = False) -> list[float]:
    """Numbers above 0, or from 0 on, that stand between commas."""
    found = []
    for part in filter(None, text.split(",")):
        try:
            value = float(part)
        except ValueError:
            value = float("nan")
        lowest_fits = value >= 0 if or_zero else value > 0
        if not (lowest_fits and value <= at_most and value < float("inf")):
            bounds = f"{'at least' if or_zero else 'above'} 0" + f" and at most {at_most:g}" * (
                at_most < float("inf")
            )
            raise typer.BadParameter(f"{option} has '{part.strip()}'; give numbers {bounds}.")
        found.append(value)
    return found
