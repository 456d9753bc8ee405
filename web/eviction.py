"""The eviction policy: which one evicts, what the others would have hit, and changing it against the one that was read."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from appliance.access import Permission
from appliance.errors import PagewardenError, VersionRequired
from appliance.protocol.retention import SetPolicy, SetPolicyResult
from appliance.protocol.status import GroupUsage, RetentionStatus
from web.forms import form_of
from web.guard import GuardedRoute, requester_of, requires
from web.policies import ANY_VERSION, current_status, refused, version_of
from web.problems import problem_responses
from web.state import state_of

pages = APIRouter(route_class=GuardedRoute, include_in_schema=False)
api = APIRouter(route_class=GuardedRoute, prefix="/api/v1/policies", tags=["policies"])

_EXAMPLE_SHADOW: dict[str, Any] = {
    "policy": "RETURNS",
    "active": True,
    "default": True,
    "prompts": 1200,
    "asked_chunks": 24000,
    "hit_chunks": 8200,
}


class EvictionPolicies(BaseModel):
    """The policy that evicts, what each would have hit, and what became of the bytes of each object group."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "policy": "RETURNS",
                    "retention": {"share": 1.0, "since_seconds": 3600.0, "policies": [_EXAMPLE_SHADOW]},
                    "groups": [],
                }
            ]
        }
    )

    policy: str
    retention: RetentionStatus
    groups: list[GroupUsage]


class PolicyChange(BaseModel):
    """The policy to use from now on, or null for the configured one."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"policy": "LRU"}]})

    policy: Annotated[str | None, Field(max_length=64, strict=True)]


class PolicyChanged(SetPolicyResult):
    """The policies before and after."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"before": "RETURNS", "after": "LRU", "changed": True}]}
    )


_Match = Annotated[
    str | None, Header(alias="If-Match", description="The policy that was read, quoted, or `*`.")
]
_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"ETag": {"schema": {"type": "string"}, "description": "The policy that evicts."}}}
}


@api.get(
    "/eviction",
    response_model=EvictionPolicies,
    responses={**_RESPONSE, **problem_responses(401, 403, 503)},
    operation_id="getEvictionPolicy",
)
@requires(Permission.POLICIES_READ)
async def get_policy(request: Request, response: Response) -> Any:
    """The eviction policy and its rivals on the live traffic; the `ETag` is the policy that evicts."""
    status = await current_status(request)
    response.headers["ETag"] = f'"{status.l1.policy}"'
    return EvictionPolicies(policy=status.l1.policy, retention=status.retention, groups=status.groups)


@api.put(
    "/eviction",
    response_model=PolicyChanged,
    responses={**_RESPONSE, **problem_responses(401, 403, 412, 422, 428, 503)},
    operation_id="setEvictionPolicy",
)
@requires(Permission.POLICIES_WRITE)
async def put_policy(
    request: Request, response: Response, change: Annotated[PolicyChange, Body()], if_match: _Match = None
) -> Any:
    """Change the eviction policy, at once and durably. Needs `If-Match` with the policy that was read."""
    result = await _set(request, change.policy, version_of(if_match))
    response.headers["ETag"] = f'"{result.after}"'
    return result


@pages.post("/policies/eviction")
@requires(Permission.POLICIES_WRITE)
async def set_by_form(request: Request) -> Response:
    """Change the policy, or with ``reset`` use the configured one."""
    form = await form_of(request)
    try:
        await _set(request, None if "reset" in form else form.get("policy", ""), form.get("version", ""))
        await state_of(request).poller.after_change()
    except PagewardenError as error:
        return await refused(request, error, form)
    return RedirectResponse("/policies?done=policy-changed", 303)


async def _set(request: Request, policy: str | None, version: str) -> SetPolicyResult:
    if not version:
        raise VersionRequired(
            "The change does not say which eviction policy it was made from.",
            remedy="Send the ETag of /api/v1/policies/eviction as If-Match.",
        )
    return await state_of(request).admin.ask(
        "set_policy",
        SetPolicy,
        SetPolicyResult,
        requester_of(request),
        policy=policy,
        if_policy="" if version == ANY_VERSION else version[:64],
    )
