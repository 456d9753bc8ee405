"""The settings in force, and where each value comes from."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from appliance.access import Permission
from appliance.errors import DaemonUnreachable
from appliance.protocol.status import DaemonStatus
from appliance.settings import Settings
from web.guard import GuardedRoute, requires
from web.problems import problem_responses
from web.state import state_of

HIDDEN = "hidden"
RUN_TIME = "run time"

_MASK = "**********"
"""What pydantic writes in a secret's place: the value never leaves the daemon."""

SETTING_OF_TTL = {
    "read_lease_ttl_seconds": "l1_read_ttl_seconds",
    "write_ttl_seconds": "l1_write_ttl_seconds",
    "session_ttl_seconds": "session_ttl_seconds",
}
"""The setting that gives each TTL its value at the start."""

api = APIRouter(route_class=GuardedRoute, prefix="/api/v1", tags=["settings"])


_SETTING: dict[str, Any] = {
    "name": "l1_size_gb",
    "value": 64.0,
    "source": "flag",
    "flag": "--l1-size-gb",
    "variable": "PAGEWARDEN_L1_SIZE_GB",
    "description": "Size of L1 in GiB.",
}


class EffectiveSetting(BaseModel):
    """One setting: ``source`` is `flag`, `variable`, `file`, `default`, or `run time` for what was changed since."""

    model_config = ConfigDict(json_schema_extra={"examples": [_SETTING]})

    name: str
    value: Any
    source: str
    flag: str
    variable: str
    description: str


class EffectiveSettings(BaseModel):
    """Every setting of the daemon."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"settings": [_SETTING]}]})

    settings: list[EffectiveSetting]


@api.get(
    "/settings",
    response_model=EffectiveSettings,
    responses=problem_responses(401, 403, 503),
    operation_id="getSettings",
)
@requires(Permission.SETTINGS_READ)
async def get_settings(request: Request) -> Any:
    """Every setting of the daemon with its value, its source and what it means."""
    state = state_of(request)
    snapshot = await state.poller.recent()
    if snapshot.status is None:
        raise DaemonUnreachable(
            f"The daemon at {state.settings.endpoint} has not answered yet.",
            remedy="Check that `pagewarden server` runs and that host and port are right.",
        )
    return EffectiveSettings(settings=effective_settings(snapshot.status))


def effective_settings(status: DaemonStatus) -> list[EffectiveSetting]:
    """The daemon's settings in its order; one that this version does not know has no description."""
    changed = {SETTING_OF_TTL.get(ttl.name) for ttl in status.ttls if ttl.changed and not ttl.namespace}
    found = []
    for name, value in status.settings.items():
        info = Settings.model_fields.get(name)
        source = status.setting_sources.get(name, "default")
        found.append(
            EffectiveSetting(
                name=name,
                value=HIDDEN if value == _MASK else value,
                source=RUN_TIME if name in changed else source,
                flag=f"--{name.replace('_', '-')}",
                variable=f"PAGEWARDEN_{name.upper()}",
                description=(info.description or "") if info is not None else "",
            )
        )
    return found
