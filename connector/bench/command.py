"""`pagewarden bench`: options only; what it runs is imported when it runs."""

from __future__ import annotations

import importlib
import json as to_json
from typing import Annotated

import typer

from connector.bench import BENCHMARKS


def bench(
    name: Annotated[str, typer.Argument(help="copy or lookup.")],
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Measure on this machine, side by side with what it is compared with."""
    if name not in BENCHMARKS:
        typer.echo(f"pagewarden: there is no benchmark '{name}'; use {' or '.join(BENCHMARKS)}.", err=True)
        raise typer.Exit(2)
    module = importlib.import_module(BENCHMARKS[name])
    measured = module.measure()
    typer.echo(to_json.dumps(measured, indent=2) if json else module.table(measured))
