"""The Plan page and its twin in the API: a configuration is pasted, and nothing of this machine is read or changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import ConfigDict, Field

from appliance.access import Permission
from appliance.errors import ModelConfigUnreadable, PagewardenError
from appliance.planning import Plan, PlanRequest, make_plan
from appliance.planning.plan import EXAMPLE_CONFIG
from appliance.planning.request import Platform, Regime
from appliance.planning.rules import BACKENDS
from appliance.planning.source import parse_config
from web.forms import form_of
from web.guard import GuardedRoute, requires, requires_login
from web.problems import problem_responses
from web.rendering import render

pages = APIRouter(route_class=GuardedRoute, default_response_class=HTMLResponse, include_in_schema=False)
api = APIRouter(route_class=GuardedRoute, prefix="/api/v1", tags=["planning"])


@dataclass(frozen=True, slots=True)
class FormField:
    """One input of the form. ``options`` make it a choice; without, ``numeric`` makes it a number."""

    name: str
    label: str
    options: tuple[str, ...] = ()
    numeric: bool = False
    hint: str = ""

    @property
    def default(self) -> str:
        """What stands in it before anything was entered."""
        value = PlanRequest.model_fields[self.name].default
        return str(getattr(value, "value", value))


_TYPES = ("auto", "float32", "bfloat16", "float16")

FIELDS: tuple[tuple[str, tuple[FormField, ...]], ...] = (
    (
        "Engine",
        (
            FormField("tp", "TP", numeric=True),
            FormField("pp", "PP", numeric=True),
            FormField("dcp", "DCP", numeric=True),
            FormField("vllm", "vLLM version"),
            FormField("align", "Align N to", numeric=True, hint="0: the version's rule"),
            FormField("platform", "Platform", options=tuple(each.value for each in Platform)),
            FormField("attention_backend", "Attention backend", options=("", *BACKENDS)),
            FormField("regime", "Token budget", options=tuple(each.value for each in Regime)),
        ),
    ),
    (
        "Types",
        (
            FormField("dtype", "Model", options=("", *_TYPES[1:])),
            FormField("kv_cache_dtype", "Attention cache", options=(*_TYPES, "fp8", "fp8_e4m3", "fp8_e5m2")),
            FormField("mamba_cache_dtype", "Convolution states", options=_TYPES),
            FormField("mamba_ssm_cache_dtype", "Recurrent states", options=_TYPES),
        ),
    ),
    (
        "Users",
        (
            FormField("users", "Conversations", numeric=True),
            FormField("context", "Tokens of each", numeric=True),
            FormField("snapshots", "States kept of each", numeric=True),
            FormField("chunk_size", "Least chunk", numeric=True),
        ),
    ),
)
"""The form in sections, in the order of the page."""

_NAMES = [field.name for _, fields in FIELDS for field in fields]


class PlanBody(PlanRequest):
    """The configuration of a model, as its config.json has it, and the options of ``pagewarden plan``."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"config": EXAMPLE_CONFIG, "tp": 2}]})

    config: dict[str, Any] = Field(description="The parsed config.json of the model.")


@api.post(
    "/plan", response_model=Plan, responses=problem_responses(401, 403, 413, 422), operation_id="makePlan"
)
@requires_login(own=True)
async def make_plan_document(body: PlanBody) -> Plan:
    """Block size, bytes, token budgets, L1 size and commands for a model. Nothing is read or changed."""
    values = body.model_dump()
    config = values.pop("config")
    model = values["model"] or str(config.get("_name_or_path") or "")
    return make_plan(config, PlanRequest.of({**values, "model": model}))


@pages.get("/plan")
@requires(Permission.STATUS_READ)
async def plan_page(request: Request) -> HTMLResponse:
    """The form."""
    return _rendered(request, "plan.html", {}, None, None)


@pages.post("/plan")
@requires_login(own=True)
async def planned_page(request: Request) -> HTMLResponse:
    """The form with the plan under it: what a browser without scripts gets."""
    return await _planned(request, "plan.html")


@pages.post("/fragments/plan")
@requires_login(own=True)
async def plan_fragment(request: Request) -> HTMLResponse:
    """The plan alone."""
    return await _planned(request, "_plan_result.html")


async def _planned(request: Request, template: str) -> HTMLResponse:
    form = await form_of(request)
    try:
        return _rendered(request, template, form, _plan_of(form), None)
    except PagewardenError as error:
        return _rendered(request, template, form, None, error)


def _plan_of(form: dict[str, str]) -> Plan:
    text = form.get("config", "").strip()
    if not text:
        raise ModelConfigUnreadable(
            "No configuration was pasted.", remedy="Paste the model's config.json.", field="config"
        )
    config = parse_config(text, "the configuration")
    given = {name: form[name].strip() for name in _NAMES if form.get(name, "").strip()}
    model = form.get("model", "").strip() or str(config.get("_name_or_path") or "")
    return make_plan(config, PlanRequest.of({**given, "ep": "ep" in form, "model": model}))


def _rendered(
    request: Request, template: str, form: dict[str, str], plan: Plan | None, error: PagewardenError | None
) -> HTMLResponse:
    return render(
        request,
        template,
        error=error,
        plan=plan,
        form={"config": "", "model": "", "ep": ""}
        | {field.name: field.default for _, fields in FIELDS for field in fields}
        | form,
        sections=FIELDS,
        wrong=str(error.details.get("field", "")) if error is not None else "",
    )
