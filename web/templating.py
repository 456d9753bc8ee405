"""The Jinja environment: everything is escaped, and an undefined name is an error instead of a hole in the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from web import explain
from web import format as fmt
from web.assets import asset
from web.format import visible
from web.gauge import BAR_UNITS
from web.view import shown_differences

TEMPLATES_DIR = Path(__file__).parent / "templates"


def _shown(value: Any) -> Any:
    """What an expression writes into the page; markup that a macro made is passed on."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def environment() -> Environment:
    """A new environment with this package's filters and globals."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES_DIR),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(
        size=fmt.format_bytes,
        count=fmt.format_count,
        compact=fmt.format_compact,
        duration=fmt.format_duration,
        clock=fmt.format_clock,
        iso=fmt.format_iso,
        value=fmt.format_value,
        cut=fmt.shortened,
        ns=fmt.short_namespace,
        words=explain.title_of,
    )
    env.globals.update(
        asset=asset,
        percent=fmt.format_percent,
        plural=fmt.plural,
        shown_differences=shown_differences,
        lease_end_meanings=explain.LEASE_END_CAUSES,
        orderly_lease_ends=explain.ORDERLY_LEASE_ENDS,
        eviction_meanings=explain.EVICTION_CAUSES,
        engine_state_meanings=explain.ENGINE_STATES,
        bar_units=BAR_UNITS,
    )
    return env
