"""Configurations written by hand from published architectures, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from appliance.planning import Plan, PlanRequest, make_plan

CONFIGS = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A configuration with top-level fields changed; ``...`` takes a field out."""
    values = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {key: value for key, value in values.items() if value is not ...}


def plan_of(name: str, **options: Any) -> Plan:
    """The plan of a named configuration."""
    return make_plan(config(name), PlanRequest(model=name, **options))
