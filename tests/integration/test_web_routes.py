"""Every route against a real peer: what it answers, and what stands in its headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.openapi.models import OpenAPI

from appliance.errors import ShuttingDown
from appliance.protocol.status import DaemonStatus
from tests.integration._peer import (
    HOSTILE,
    NS_A,
    degraded_status,
    empty_status,
    full_status,
    hostile_status,
    populating_status,
    serving,
)
from tests.integration._web import RunningWeb, running_web, settings_for
from web.api import StatusDocument, _prefers_text
from web.guard import GuardedRoute
from web.problems import PROBLEM_MEDIA_TYPE
from web.security import SECURITY_HEADERS

DOCS = Path(__file__).parents[2] / "docs"
GET_ROUTES = (
    "/",
    "/fragments/overview",
    "/api/v1/status",
    "/api/v1/openapi.json",
    "/restarts",
    "/api/v1/restarts",
    "/healthz",
    "/readyz",
    "/metrics",
)


def guarded_routes(app: FastAPI) -> list[GuardedRoute]:
    """Every route but the static files."""
    return [route for route in app.routes if isinstance(route, GuardedRoute)]


@pytest.fixture
def full() -> Iterator[RunningWeb]:
    with serving(full_status()) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        yield web


def page_for(status: dict[str, object]) -> tuple[str, str]:
    """The overview page and its fragment for one status."""
    with serving(status) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        return web.client.get("/").text, web.client.get("/fragments/overview").text


# --- pages ---


def test_full_page_shows_every_part(full: RunningWeb) -> None:
    html = full.client.get("/").text
    for text in (
        "91.8 % full",
        "vllm-a-3f9c1e",
        "Rank 1 of 2 has not attached.",
        "max_num_batched_tokens is 512",
        "cache.state_dtype",
        "bfloat16",
        "Recurrent state missing",
        "No engine has computed this part of a prompt",
        "Orphaned",
        "402 GiB",
        "/var/lib/pagewarden/catalog.db",
        NS_A[:12],
    ):
        assert text in html, f"the page lacks {text!r}"


def test_fragment_is_the_changing_part_of_the_page(full: RunningWeb) -> None:
    fragment = full.client.get("/fragments/overview").text
    assert "<html" not in fragment
    assert "vllm-a-3f9c1e" in fragment
    assert fragment.startswith("<title>")


def test_every_section_shows_the_command_that_gives_its_data(full: RunningWeb) -> None:
    html = full.client.get("/").text
    sections = re.findall(r'<section id="([a-z0-9-]+)"', html)
    assert len(sections) >= 7
    commands = re.findall(r'<details class="curl" id="([a-z0-9-]+)-curl">', html)
    assert commands == sections
    bearer = '-H "Authorization: Bearer $PAGEWARDEN_TOKEN"'
    assert f"curl -s {bearer} {full.url}/api/v1/status | jq .engines" in unescape(html)


def test_empty_page_says_what_to_do_next() -> None:
    with serving(empty_status()) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        html = web.client.get("/").text
        port = peer.port
    assert html.count('class="empty"') >= 7
    assert "vllm serve MODEL --kv-transfer-config" in html
    assert f"{{&#34;pagewarden.port&#34;:{port}}}" in html


def test_populating_page_shows_progress() -> None:
    html, _ = page_for(populating_status())
    assert "Populating L1: 12.0 GiB of 64.0 GiB (18.8 %)" in html
    assert "Unpopulated" in html


def test_degraded_page_names_the_trouble() -> None:
    html, _ = page_for(degraded_status())
    assert "The catalog is down: The catalog&#39;s disk is full." in html
    assert "Loop evictor survived 3 errors" in html
    assert "Loop scrubber has not gone round for 2 min 10 s." in html


def test_hostile_names_stay_text() -> None:
    html, fragment = page_for(hostile_status())
    for document in (html, fragment):
        assert "&lt;script&gt;alert(1)" in document
        assert "<script>alert" not in document
        assert "<img src=x" not in document
        assert "\u202e" not in document
        assert "\x00" not in document
        assert "{{7*7}}" in document, "a template in a name would have been evaluated"


@pytest.mark.parametrize(
    "status", [full_status(), empty_status(), hostile_status()], ids=["full", "empty", "hostile"]
)
def test_nothing_inline_that_the_policy_would_block(status: dict[str, object]) -> None:
    for document in page_for(status):
        elements = Elements.of(document)
        assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
        assert not [name for _, attributes in elements for name in attributes if name == "style"]
        assert "style" not in {tag for tag, _ in elements}
        sources = [
            attributes.get("src") for tag, attributes in elements if tag in ("script", "img", "iframe")
        ]
        assert all(str(source).startswith("/static/") for source in sources), "something comes from elsewhere"


class Elements(HTMLParser):
    """Every element of a document with its attributes, as a browser's tokenizer sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    @classmethod
    def of(cls, document: str) -> list[tuple[str, dict[str, str | None]]]:
        parser = cls()
        parser.feed(document)
        parser.close()
        assert parser.found
        return parser.found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_page_works_without_scripts(full: RunningWeb) -> None:
    live, still = full.client.get("/").text, full.client.get("/?live=off").text
    assert re.search(r'<noscript><meta http-equiv="refresh" content="\d+"></noscript>', live)
    assert "http-equiv" not in still
    assert 'href="/?live=off"' in live


@pytest.mark.parametrize("host", ["a;id", "$(id)", "a&id", "a;rm -rf ~", "a|id"])
def test_host_header_that_a_shell_would_run_stays_out_of_the_commands(full: RunningWeb, host: str) -> None:
    answer = full.client.get("/", headers={"Host": host})
    assert (answer.status_code, answer.json()["code"]) == (421, "host_refused")
    assert host not in unescape(answer.text)
    page = full.client.get("/", headers={"Host": host, "Accept": "text/html"})
    assert page.status_code == 421
    assert host not in unescape(page.text)


# --- the API ---


def test_status_is_the_daemons_document_with_the_web_part(full: RunningWeb) -> None:
    answer = full.client.get("/api/v1/status")
    assert answer.status_code == 200
    document = StatusDocument.model_validate_json(answer.text)
    assert document.web.daemon_reachable
    assert document.web.data_age_seconds >= 0
    ours = DaemonStatus.model_validate(full_status()).model_dump(mode="json")
    theirs = {key: value for key, value in answer.json().items() if key != "web"}
    assert theirs == ours


def test_status_of_a_daemon_that_refuses_is_a_problem_with_its_code() -> None:
    with serving(empty_status()) as peer:
        peer.error = ShuttingDown("The daemon is stopping.")
        with running_web(settings_for(peer.port)) as web:
            web.wait_for_failure()
            answer = web.client.get("/api/v1/status")
    assert answer.status_code == 503
    assert answer.json()["code"] == "shutting_down"


def test_status_that_cannot_be_read_is_said_on_the_page() -> None:
    with serving(empty_status()) as peer:
        peer.raw_result = {"version": 7}
        with running_web(settings_for(peer.port)) as web:
            web.wait_for_failure()
            html = web.client.get("/").text
            answer = web.client.get("/api/v1/status")
    assert "gives no status that can be read" in html
    assert answer.status_code == 422
    assert answer.json()["code"] == "invalid_field"


def test_openapi_is_valid_and_complete(full: RunningWeb) -> None:
    document = full.client.get("/api/v1/openapi.json").json()
    OpenAPI.model_validate(document)
    described = {
        (route.path_format, method.lower())
        for route in guarded_routes(full.app)
        if route.include_in_schema
        for method in route.methods or ()
    }
    operations = {(path, method) for path, item in document["paths"].items() for method in item}
    assert operations == described
    assert {"/api/v1/status", "/api/v1/audit", "/healthz", "/readyz", "/metrics"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    for reference in re.findall(
        r'"#/components/schemas/([^"]+)"', full.client.get("/api/v1/openapi.json").text
    ):
        assert reference in schemas, f"{reference} is referred to and missing"
    identifiers = [
        operation["operationId"] for path in document["paths"].values() for operation in path.values()
    ]
    assert len(set(identifiers)) == len(identifiers)


def test_every_body_and_every_answer_of_the_api_has_an_example(full: RunningWeb) -> None:
    document = full.client.get("/api/v1/openapi.json").json()
    schemas = document["components"]["schemas"]
    old = {"StatusDocument", "HealthDocument", "ReadyDocument"}
    wanted: set[str] = set()
    for path, item in document["paths"].items():
        for operation in item.values():
            parts = [operation.get("requestBody", {}), *operation["responses"].values()]
            for part in parts:
                schema = part.get("content", {}).get("application/json", {}).get("schema", {})
                if "$ref" in schema and path.startswith("/api/v1/"):
                    wanted.add(schema["$ref"].rsplit("/", 1)[1])
    assert len(wanted) > 10
    assert not [name for name in sorted(wanted - old) if not schemas[name].get("examples")]


def test_health_is_a_ping_of_the_loop(full: RunningWeb) -> None:
    answer = full.client.get("/healthz")
    assert answer.status_code == 200
    assert answer.json()["healthy"] is True
    assert answer.json()["phase"] == "ready"


def test_ready_lists_every_gate(full: RunningWeb) -> None:
    answer = full.client.get("/readyz")
    assert answer.status_code == 200
    assert [gate["name"] for gate in answer.json()["gates"]] == ["daemon", "arena", "catalog"]


def test_ready_is_503_while_a_gate_is_closed() -> None:
    with serving(populating_status()) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        answer = web.client.get("/readyz")
        text = web.client.get("/readyz", headers={"Accept": "text/plain"})
    assert answer.status_code == text.status_code == 503
    assert answer.json()["ready"] is False
    assert text.headers["content-type"].startswith("text/plain")
    assert "[-] arena: 12.0 of 64.0 GiB are populated.\n" in text.text
    assert text.text.endswith("not ready\n")


def test_ready_is_503_where_the_daemon_says_so_with_all_gates_open() -> None:
    with (
        serving(empty_status(ready=False, phase="draining")) as peer,
        running_web(settings_for(peer.port)) as web,
    ):
        web.wait_for_status()
        answer = web.client.get("/readyz")
    assert answer.status_code == 503
    assert "draining" in answer.json()["gates"][-1]["reason"]


@pytest.mark.parametrize(
    ("accept", "text"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("text/plain", True),
        ("text/plain;q=0.5, application/json", False),
        ("application/json;q=0.1,text/plain;q=0.9", True),
        ("text/plain;q=nonsense", False),
    ],
)
def test_plain_text_is_given_only_where_it_is_preferred(accept: str, text: bool) -> None:
    assert _prefers_text(accept) is text


# --- errors and headers ---


def test_unknown_path_and_method_are_problems(full: RunningWeb) -> None:
    missing, wrong = full.client.get("/api/v1/nothing"), full.client.post("/api/v1/status")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["code"]) == (405, "unknown_operation")
    assert wrong.headers["allow"] == "GET"
    for answer in (missing, wrong):
        assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
        assert answer.json()["type"] == f"urn:pagewarden:error:{answer.json()['code']}"
        assert answer.json()["status"] == answer.status_code


def test_invalid_parameter_is_a_problem(full: RunningWeb) -> None:
    answer = full.client.get("/?live=perhaps")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field")
    assert "query.live" in answer.json()["detail"]


def test_bug_is_a_problem_that_says_nothing_of_its_cause(full: RunningWeb) -> None:
    async def broken() -> None:
        raise RuntimeError("the secret of the cause")

    full.app.add_api_route("/broken", broken)
    answer = full.client.get("/broken")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "secret" not in answer.text
    assert_secure(answer.headers)


def assert_secure(headers: object) -> None:
    for name, value in SECURITY_HEADERS.items():
        assert headers[name] == value, f"{name} is missing"  # type: ignore[index]


def test_security_headers_stand_on_every_response(full: RunningWeb) -> None:
    static = re.findall(r'(?:href|src)="(/static/[^"]+)"', full.client.get("/").text)
    assert len(static) >= 5
    for path in (*GET_ROUTES, *static, "/nothing", "/static/nothing", "/?live=perhaps"):
        assert_secure(full.client.get(path).headers)
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_static_files_are_cached_for_good_and_pages_never(full: RunningWeb) -> None:
    html = full.client.get("/").text
    for path in re.findall(r'(?:href|src)="(/static/[^"]+)"', html):
        answer = full.client.get(path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert full.client.get("/").headers["cache-control"] == "no-store"
    assert full.client.get("/static/nothing?v=1").headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", GET_ROUTES)
def test_head_answers_like_get_without_a_body(full: RunningWeb, path: str) -> None:
    head = full.client.head(path)
    assert head.status_code == full.client.get(path).status_code
    assert head.content == b""


# --- documentation ---


def test_every_route_is_documented_with_a_command(full: RunningWeb) -> None:
    text = (DOCS / "rest.md").read_text("utf-8")
    for route in guarded_routes(full.app):
        for method in route.methods or ():
            heading = f"## `{method} {route.path_format}`\n"
            if not route.path.startswith("/api/") and method == "POST":
                continue  # forms of pages: each has its twin in the API
            assert heading in text, f"docs/rest.md lacks {method} {route.path_format}"
            section = text.split(heading, 1)[1].split("\n## ", 1)[0]
            path = re.sub(r"\\\{\w+\\\}", "[^ ]+", re.escape(route.path_format))
            assert re.search(rf"curl -s [^\n]*http://127\.0\.0\.1:6580{path}[?'\s]", section), heading


def test_every_permission_of_a_route_is_documented(full: RunningWeb) -> None:
    text = (DOCS / "rest.md").read_text("utf-8")
    for route in guarded_routes(full.app):
        if route.rule.permission is None or not route.path.startswith("/api/"):
            continue
        for method in route.methods or ():
            section = text.split(f"## `{method} {route.path_format}`\n", 1)[1].split("\n## ", 1)[0]
            assert f"`{route.rule.permission}`" in section, f"{method} {route.path_format}"


def test_every_field_of_the_status_is_documented() -> None:
    text = (DOCS / "rest.md").read_text("utf-8")
    section = text.split("## `GET /api/v1/status`", 1)[1].split("\n## ", 1)[0]
    names = [
        *DaemonStatus.model_fields,
        *(f"web.{name}" for name in StatusDocument.model_fields["web"].annotation.model_fields),
    ]  # type: ignore[union-attr]
    missing = [name for name in names if f"`{name}`" not in section]
    assert not missing


def test_hostile_text_is_what_the_tests_think_it_is() -> None:
    assert "<script>" in HOSTILE
    assert "\u202e" in HOSTILE
