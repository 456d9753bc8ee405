"""The Plan and Doctor pages and their twins in the API, over a real socket, beside peers and a real daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from appliance.doctor.findings import Code, Report, Severity
from appliance.planning import AUTHORITY, Plan
from appliance.planning.request import PlanRequest
from tests.integration._peer import HOSTILE, full_status, serving
from tests.integration._web import RunningWeb, running_web, settings_for
from tests.support.daemon import DaemonProcess, free_port
from web import doctoring, planning
from web.security import MAX_BODY_BYTES, SECURITY_HEADERS

CONFIGS = Path(__file__).parents[1] / "unit/planning/configs"
KIMI = (CONFIGS / "kimi-linear-48b.json").read_text()
RECIPE = {"tp": "2", "align": "16"}


@pytest.fixture(scope="module")
def web() -> Iterator[RunningWeb]:
    with serving(full_status()) as peer, running_web(settings_for(peer.port)) as running:
        running.wait_for_status()
        yield running


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Callable[..., RunningWeb]]:
    """Dashboards beside daemons of a test's own."""
    closing: list[Any] = []

    def make(port: int, **changes: object) -> RunningWeb:
        context = running_web(settings_for(port, **changes))
        closing.append(context)
        return context.__enter__()

    yield make
    for context in reversed(closing):
        context.__exit__(None, None, None)


def api_plan(web: RunningWeb, config: str = KIMI, **options: Any) -> Any:
    return web.client.post("/api/v1/plan", json={"config": json.loads(config), **options})


# --- the plan ----------------------------------------------------------------------------------------------------------


def test_the_api_gives_the_recipes_numbers(web: RunningWeb):
    answer = api_plan(web, tp=2, align=16, model="org/kimi")
    assert answer.status_code == 200
    plan = Plan.model_validate(answer.json())
    assert (plan.block_size, plan.chunk_tokens, plan.max_num_batched_tokens) == (944, 944, 1887)
    assert "--planned-block-size org/kimi=944" in plan.commands.server


@pytest.mark.parametrize(
    ("body", "status", "code", "told"),
    [
        ({"config": {"model_type": "jamba"}}, 422, "unsupported_model", "model_type"),
        ({"config": json.loads(KIMI), "tp": 3}, 422, "plan_refused", "does not divide"),
        ({"config": json.loads(KIMI), "tp": 0}, 422, "invalid_field", "body.tp"),
        ({"config": json.loads(KIMI), "tensor": 2}, 422, "invalid_field", "body.tensor"),
        ({"config": [1]}, 422, "invalid_field", "body.config"),
        ({}, 422, "invalid_field", "body.config"),
    ],
)
def test_the_api_refuses_with_the_field(web: RunningWeb, body: Any, status: int, code: str, told: str):
    answer = web.client.post("/api/v1/plan", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert told in answer.json()["detail"]


def test_a_body_that_is_too_long_is_refused(web: RunningWeb):
    answer = web.client.post("/api/v1/plan", content=b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "message_too_large")


def test_the_empty_page_says_what_to_do(web: RunningWeb):
    html = web.client.get("/plan").text
    assert "Paste the config.json" in html
    assert "/api/v1/plan" in html
    for name, info in PlanRequest.model_fields.items():
        assert f'name="{name}"' in html
        if info.default not in ("", False):
            assert str(getattr(info.default, "value", info.default)) in html


@pytest.mark.parametrize("path", ["/plan", "/fragments/plan"])
def test_a_form_gives_the_plan(web: RunningWeb, path: str):
    answer = web.client.post(path, data={"config": KIMI, "model": "org/kimi", **RECIPE})
    assert answer.status_code == 200
    html = unescape(answer.text)
    assert AUTHORITY in html
    assert "1,887" in html
    assert "--planned-block-size org/kimi=944" in html
    assert ("<!doctype html>" in html) is (path == "/plan")
    if path == "/plan":
        assert 'name="tp" value="2"' in html  # what was entered is still there
        assert '"kda_layers"' in html


def test_a_form_that_cannot_be_planned_names_its_field(web: RunningWeb):
    answer = web.client.post("/plan", data={"config": KIMI, "tp": "3"})
    assert answer.status_code == 422
    html = unescape(answer.text)
    assert "plan_refused" in html
    assert re.search(r'name="tp" value="3"[^>]* aria-invalid="true" aria-describedby="plan-error"', html)
    assert "No configuration was pasted" in web.client.post("/fragments/plan", data={"config": " "}).text
    assert "is not JSON" in web.client.post("/fragments/plan", data={"config": "{"}).text
    deep = web.client.post("/fragments/plan", data={"config": "[" * 50_000})
    assert deep.status_code == 422


def test_what_is_no_form_is_refused(web: RunningWeb):
    answer = web.client.post("/plan", json={"config": {}})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field")
    many = web.client.post("/plan", data={f"field{number}": "x" for number in range(100)})
    assert many.status_code == 422


def test_hostile_text_stays_text(web: RunningWeb):
    config = json.dumps({**json.loads(KIMI), "_name_or_path": HOSTILE, "architectures": [HOSTILE]})
    html = web.client.post("/plan", data={"config": config, "model": HOSTILE[:400]}).text
    assert "<script>alert(1)" not in html
    assert "<img src=x" not in html
    wrong = web.client.post("/plan", data={"config": json.dumps({"model_type": HOSTILE})}).text
    assert "<script>alert(1)" not in wrong
    assert "unsupported_model" in wrong


# --- the doctor ---------------------------------------------------------------------------------------------------------


def test_the_doctor_beside_a_real_daemon(
    make_daemon: Callable[..., DaemonProcess], beside: Callable[..., RunningWeb]
):
    daemon = make_daemon(planned_block_size="8")
    web = beside(daemon.port)
    web.wait_for_status()
    report = Report.model_validate(web.client.get("/api/v1/doctor").json())
    assert report.running
    assert {finding.area for finding in report.findings} >= {"mount", "catalog", "daemon", "engines"}
    assert any(str(daemon.arena_dir) in finding.message for finding in report.findings)
    for path in ("/doctor", "/fragments/doctor"):
        html = unescape(web.client.get(path).text)
        for finding in report.findings:
            assert finding.message in html
            assert finding.severity.value.capitalize() in html


def test_findings_come_with_evidence_and_remedy(web: RunningWeb):
    report = Report.model_validate(web.client.get("/api/v1/doctor").json())
    html = unescape(web.client.get("/doctor").text)
    found = {finding.code: finding for finding in report.findings}
    assert found[Code.LEASES_EXPIRED].severity is Severity.WARNING
    for finding in report.findings:
        if finding.severity is not Severity.OK:
            assert finding.evidence in html
            assert finding.remedy in html
            assert finding.code.value in html


def test_without_a_daemon_that_is_the_finding(beside: Callable[..., RunningWeb]):
    web = beside(free_port())
    report = Report.model_validate(web.client.get("/api/v1/doctor").json())
    assert [finding.code for finding in report.findings] == [Code.DAEMON_UNREACHABLE]
    assert report.worst is Severity.PROBLEM
    assert "pagewarden doctor" in web.client.get("/doctor").text


def test_a_report_serves_everybody_who_asks_meanwhile(web: RunningWeb, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctoring, "KEPT_SECONDS", 3600.0)
    looks = []
    real = doctoring.examine
    monkeypatch.setattr(doctoring, "examine", lambda subject: looks.append(subject) or real(subject))
    answers = [web.client.get("/api/v1/doctor").json() for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert len(looks) <= 1


def test_elsewhere_only_what_the_daemon_says_is_judged(beside: Callable[..., RunningWeb]):
    with serving(full_status()) as peer:
        web = beside(peer.port, daemon_host="127.0.0.1")
        web.wait_for_status()
        here = doctoring._examined(web.state)
        far = settings_for(peer.port, daemon_host="cache.example")
        object.__setattr__(web.state, "settings", far)
        there = doctoring._examined(web.state)
    assert "mount" in {finding.area for finding in here.findings}
    assert {finding.area for finding in there.findings} == {"daemon", "engines"}


# --- both ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/plan", "/doctor", "/fragments/doctor", "/api/v1/doctor"])
def test_headers_and_head(web: RunningWeb, path: str):
    answer = web.client.get(path)
    assert answer.status_code == 200
    for name, value in SECURITY_HEADERS.items():
        assert answer.headers[name] == value
    assert answer.headers["cache-control"] == "no-store"
    head = web.client.head(path)
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("path", ["/plan", "/doctor"])
def test_nothing_inline_that_the_policy_would_block(web: RunningWeb, path: str):
    html = web.client.get(path).text
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bstyle=|\son[a-z]+=|javascript:", html)
    assert 'aria-current="page"' in html


def test_the_overview_leads_to_both(web: RunningWeb):
    html = web.client.get("/").text
    assert 'href="/plan"' in html
    assert 'href="/doctor"' in html


def test_every_route_is_documented_with_a_command():
    text = (Path(__file__).parents[2] / "docs/rest.md").read_text()
    for router in (planning.pages, planning.api, doctoring.pages, doctoring.api):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods:
                assert f"`{method} {route.path}`" in text
    for heading in ("`GET /plan`", "`POST /api/v1/plan`", "`GET /doctor`", "`GET /api/v1/doctor`"):
        section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        assert "curl" in section


def test_the_examples_of_the_api_are_what_it_takes_and_gives(web: RunningWeb):
    schemas = web.client.get("/api/v1/openapi.json").json()["components"]["schemas"]
    [body] = schemas["PlanBody"]["examples"]
    assert web.client.post("/api/v1/plan", json=body).status_code == 200
    [plan] = schemas["Plan"]["examples"]
    assert Plan.model_validate(plan).block_size == 16
    [report] = schemas["Report"]["examples"]
    assert Report.model_validate(report).worst is Severity.WARNING
