"""`pagewarden bench copy` and `lookup`: options only; what they run is imported when it runs."""

from __future__ import annotations

import importlib
import json as to_json
from typing import Annotated

import typer

from connector.bench import BENCHMARKS

_JSON = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


def copy(json: _JSON = False) -> None:  # noqa: FBT002
    """Copies between an engine's pages and an arena, against one contiguous copy."""
    _measure("copy", as_json=json)


def lookup(json: _JSON = False) -> None:  # noqa: FBT002
    """Lookups with half a million objects indexed, against the bare round trip."""
    _measure("lookup", as_json=json)


def _measure(name: str, *, as_json: bool) -> None:
    module = importlib.import_module(BENCHMARKS[name])
    measured = module.measure()
    typer.echo(to_json.dumps(measured, indent=2) if as_json else module.table(measured))
