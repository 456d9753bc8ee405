"""The guard over every route of the application: who is let in, from where, and under which name."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.routing import Mount

from appliance.access import UserRole, permissions_of
from appliance.catalog.accounts import LoginChanged, TokenChanged, UserChanged
from appliance.credentials import Issued, issue_login, issue_token
from tests.integration._peer import empty_status, serving, wait_for
from tests.integration._web import RunningWeb, running_web, settings_for
from tests.support.access import ROLES, Access, password_hash, write
from web.app import create_app
from web.guard import SAFE_METHODS, GuardedRoute, Rule
from web.settings import WebSettings

PLACES = {
    "name": "read_lease_ttl_seconds",
    "change_id": "1",
    "token_id": "0f1e2d3c4b5a",
    "login_id": "0f1e2d3c4b5a",
}
ROUTES = [route for route in create_app(WebSettings()).routes if isinstance(route, GuardedRoute)]
MUTATING = [
    (method, re.sub(r"\{(\w+)\}", lambda found: PLACES[found[1]], route.path_format), route.rule)
    for route in ROUTES
    for method in sorted(route.methods or ())
    if method not in SAFE_METHODS
]
GUARDED = [each for each in MUTATING if not each[2].public]
OPEN_PATHS = {"/login", "/api/v1/login", "/healthz", "/readyz", "/metrics"}


def named(case: tuple[str, str, Rule]) -> str:
    return f"{case[0]} {case[1]}"


@pytest.fixture(scope="module")
def web() -> Iterator[RunningWeb]:
    with (
        tempfile.TemporaryDirectory() as empty,
        serving(empty_status()) as peer,
        running_web(replace(settings_for(peer.port), run_dir=empty)) as running,
    ):
        running.wait_for_status()
        yield running


@pytest.fixture(scope="module")
def anonymous(web: RunningWeb) -> Iterator[httpx.Client]:
    with web.anonymous() as client:
        yield client


def code_of(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text[:200]
    return answer.status_code, answer.json()["code"]


# --- every route ---


def test_every_route_is_guarded_and_only_these_are_open(web: RunningWeb) -> None:
    others = [route for route in web.app.routes if not isinstance(route, GuardedRoute)]
    assert [route.path for route in others if isinstance(route, Mount)] == ["/static"]
    assert len(others) == 1
    assert {route.path for route in ROUTES if route.rule.public} == OPEN_PATHS
    assert len(GUARDED) > 15


def test_a_route_that_says_not_who_may_use_it_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="open to everybody"):
        GuardedRoute("/everybody", lambda: None)


@pytest.mark.parametrize("case", GUARDED, ids=named)
def test_a_change_without_a_token_is_401(anonymous: httpx.Client, case: tuple[str, str, Rule]) -> None:
    method, path, _ = case
    for headers in ({}, {"Authorization": "Bearer pgw_0_0"}, {"Authorization": "Basic YTpi"}):
        answer = anonymous.request(method, path, headers=headers, content=b"{")
        assert code_of(answer) == (401, "not_authenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "case", [each for each in GUARDED if each[2].permission and each[2].changes], ids=named
)
def test_a_change_with_a_viewers_token_is_403(
    web: RunningWeb, anonymous: httpx.Client, case: tuple[str, str, Rule]
) -> None:
    method, path, rule = case
    assert rule.permission not in permissions_of(UserRole.VIEWER), "a viewer could change something"
    answer = anonymous.request(method, path, headers=web.access.headers("viewer"), content=b"{")
    assert code_of(answer) == (403, "forbidden")
    assert answer.json()["details"]["permission"] == rule.permission


@pytest.mark.parametrize("case", MUTATING, ids=named)
@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1"},
    ],
    ids=["cross-site", "same-site", "origin", "null", "both"],
)
def test_a_change_from_another_site_is_403_even_for_an_admin(
    web: RunningWeb, case: tuple[str, str, Rule], headers: dict[str, str]
) -> None:
    method, path, _ = case
    assert code_of(web.client.request(method, path, headers=headers, content=b"{")) == (403, "cross_site")


@pytest.mark.parametrize("case", [each for each in GUARDED if not each[2].own and each[2].changes], ids=named)
def test_a_change_on_a_read_only_dashboard_is_403(read_only: RunningWeb, case: tuple[str, str, Rule]) -> None:
    method, path, _ = case
    assert code_of(read_only.client.request(method, path, content=b"{")) == (403, "read_only")


@pytest.fixture(scope="module")
def read_only() -> Iterator[RunningWeb]:
    with (
        serving(empty_status()) as peer,
        running_web(replace(settings_for(peer.port), read_only=True)) as running,
    ):
        running.wait_for_status()
        yield running


def test_a_read_only_dashboard_shows_no_controls(read_only: RunningWeb) -> None:
    for path in ("/policies", "/settings"):
        html = read_only.client.get(path).text
        assert "--read-only" in html
        assert [action for action in re.findall(r'action="([^"]+)"', html) if action != "/logout"] == []


@pytest.mark.parametrize("route", [r for r in ROUTES if "GET" in (r.methods or ())], ids=lambda r: r.path)
def test_who_may_read_what(web: RunningWeb, anonymous: httpx.Client, route: GuardedRoute) -> None:
    if route.rule.public:
        assert anonymous.get(route.path).status_code in (200, 503)
        return
    assert code_of(anonymous.get(route.path)) == (401, "not_authenticated")
    for role in ROLES:
        answer = anonymous.get(route.path, headers=web.access.headers(role))
        may = route.rule.permission is None or route.rule.permission in permissions_of(UserRole(role))
        assert answer.status_code == (200 if may else 403), f"{role}: {answer.text[:200]}"


# --- pages ---


def test_a_browser_without_a_login_is_sent_to_the_form_and_back(anonymous: httpx.Client) -> None:
    answer = anonymous.get("/audit?action=ttl.set", headers={"Accept": "text/html"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/login?next=/audit%3Faction%3Dttl.set"
    form = anonymous.get(answer.headers["location"])
    assert 'name="next" value="/audit?action=ttl.set"' in form.text


def test_a_login_form_leads_nowhere_else(anonymous: httpx.Client) -> None:
    assert 'name="next" value="/"' in anonymous.get("/login?next=https://evil.example").text


def test_a_page_that_refreshes_itself_is_sent_to_the_form(anonymous: httpx.Client) -> None:
    answer = anonymous.get("/fragments/overview", headers={"HX-Request": "true"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/login")


def test_a_person_is_told_in_a_page_and_a_program_in_a_problem(web: RunningWeb) -> None:
    headers = web.access.headers("viewer")
    page = web.client.get("/audit", headers={**headers, "Accept": "text/html"})
    assert page.status_code == 403
    assert "audit:read" in page.text
    assert page.headers["content-type"].startswith("text/html")
    assert code_of(web.client.get("/audit", headers=headers)) == (403, "forbidden")
    api = web.client.get("/api/v1/audit", headers={**headers, "Accept": "text/html"})
    assert code_of(api) == (403, "forbidden")


def test_navigation_has_what_the_role_may_see(web: RunningWeb) -> None:
    for role, pages in (
        ("viewer", ["/", "/policies", "/restarts", "/plan", "/doctor", "/settings"]),
        ("operator", None),
        ("admin", None),
    ):
        html = web.client.get("/policies", headers=web.access.headers(role)).text
        shown = re.findall(r'<nav aria-label="Pages">(.*?)</nav>', html, flags=re.DOTALL)[0]
        assert re.findall(r'href="([^"]+)"', shown) == (
            pages or ["/", "/policies", "/restarts", "/audit", "/plan", "/doctor", "/settings"]
        )


# --- hosts ---


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200),
        ("[::1]:6580", 200),
        ("192.0.2.7", 200),
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("cache.example", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
        ("2130706433", 421),
    ],
)
def test_only_known_names_are_served(named_web: RunningWeb, host: str, status: int) -> None:
    for path in ("/api/v1/status", "/login"):
        assert named_web.client.get(path, headers={"Host": host}).status_code == status
    assert named_web.client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.fixture(scope="module")
def named_web() -> Iterator[RunningWeb]:
    with (
        serving(empty_status()) as peer,
        running_web(replace(settings_for(peer.port), http_names="cache.example, other")) as running,
    ):
        running.wait_for_status()
        yield running


def test_a_body_that_is_too_long_is_refused(web: RunningWeb) -> None:
    answer = web.client.put("/api/v1/policies/ttls/write_ttl_seconds", content=b" " * 300_000)
    assert code_of(answer) == (413, "message_too_large")


# --- tokens and logins in the catalog ---


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[RunningWeb, Path]]:
    catalog = tmp_path / "catalog.db"
    Access.made_in(catalog)
    with serving(empty_status()) as peer, running_web(settings_for(peer.port, catalog=catalog)) as running:
        running.wait_for_status()
        yield running, catalog


def token_row(issued: Issued, **changes: object) -> TokenChanged:
    row = TokenChanged(issued.public_id, "ci", "admin", "admin", (), issued.secret_hash, time.time(), "tests")
    return replace(row, **changes)  # type: ignore[arg-type]


def login_row(issued: Issued, **changes: object) -> LoginChanged:
    now = time.time()
    row = LoginChanged(issued.public_id, "admin", issued.secret_hash, "", "", now, now + 60.0, now)
    return replace(row, **changes)  # type: ignore[arg-type]


def test_a_revoked_or_expired_token_is_out_at_once(own: tuple[RunningWeb, Path]) -> None:
    web, catalog = own
    issued = issue_token()
    headers = {"Authorization": f"Bearer {issued.text}"}
    for changes, status in (
        ({}, 200),
        ({"revoked_unix": time.time()}, 401),
        ({"expires_unix": time.time() - 1}, 401),
        ({"expires_unix": time.time() + 60}, 200),
        ({"owner": "nobody"}, 401),
    ):
        write(catalog, token_row(issued, **changes))
        assert web.client.get("/api/v1/me", headers=headers).status_code == status, changes
    write(catalog, token_row(issued))
    wrong = {"Authorization": f"Bearer {issued.text[:-1]}{'0' if issued.text[-1] != '0' else '1'}"}
    assert web.client.get("/api/v1/me", headers=wrong).status_code == 401


def test_an_ended_or_expired_login_is_out_at_once(own: tuple[RunningWeb, Path]) -> None:
    web, catalog = own
    issued = issue_login()
    cookie = {"Cookie": f"{web.state.settings.cookie_name}={issued.text}"}
    for changes, status in (
        ({}, 200),
        ({"ended_unix": time.time(), "end_cause": "logged out"}, 401),
        ({"expires_unix": time.time() - 1}, 401),
    ):
        write(catalog, login_row(issued, **changes))
        assert web.client.get("/api/v1/me", headers=cookie).status_code == status, changes


def test_a_token_does_what_role_owner_and_scopes_all_allow(own: tuple[RunningWeb, Path]) -> None:
    web, catalog = own
    issued = issue_token()
    headers = {"Authorization": f"Bearer {issued.text}"}

    def permissions(**changes: object) -> set[str]:
        write(catalog, token_row(issued, **changes))
        return set(web.client.get("/api/v1/me", headers=headers).json()["permissions"])

    assert permissions() == permissions_of(UserRole.ADMIN)
    assert permissions(role="viewer") == permissions_of(UserRole.VIEWER)
    assert permissions(owner="viewer") == permissions_of(UserRole.VIEWER)
    assert permissions(scopes=("audit:read", "accounts:write"), owner="operator") == {"audit:read"}
    now = time.time()
    write(catalog, UserChanged("admin", "viewer", password_hash(), now, "tests", now))
    assert permissions() == permissions_of(UserRole.VIEWER), "a demoted owner's token is demoted too"


def test_a_catalog_that_cannot_be_read_keeps_those_in_who_were(own: tuple[RunningWeb, Path]) -> None:
    web, catalog = own
    known, stranger = issue_token(), issue_token()
    write(catalog, token_row(known), token_row(stranger))
    headers = {"Authorization": f"Bearer {known.text}"}
    assert web.client.get("/", headers=headers).status_code == 200
    for path in catalog.parent.iterdir():
        path.unlink()
    assert web.client.get("/", headers=headers).status_code == 200
    other = web.client.get("/api/v1/me", headers={"Authorization": f"Bearer {stranger.text}"})
    assert code_of(other) == (503, "catalog_unavailable")
    page = web.client.get("/policies", headers={**headers, "Accept": "text/html"})
    assert page.status_code == 200
    assert "The history cannot be read" in page.text


def test_a_process_without_a_catalog_lets_nobody_in() -> None:
    with serving(empty_status()) as peer, running_web(settings_for(peer.port, catalog="")) as web:
        assert web.client.get("/login").status_code == 200
        answer = web.client.get("/api/v1/me", headers={"Authorization": "Bearer pgw_0_0"})
        assert code_of(answer) == (503, "catalog_unavailable")
        assert web.client.get("/healthz").status_code == 200


def test_a_change_while_the_daemon_cannot_be_asked_says_so(web: RunningWeb) -> None:
    """The peer stands for a daemon whose secret this process cannot read."""
    answer = web.client.delete("/api/v1/users/viewer")
    assert code_of(answer) == (503, "daemon_unreachable")
    assert "--run-dir" in answer.json()["remedy"]


def test_the_use_of_a_token_is_noted_once_a_minute(web: RunningWeb) -> None:
    identities = web.state.identities
    web.client.get("/api/v1/me")
    wait_for(lambda: not identities._unnoted, "the note")
    web.client.get("/api/v1/me")
    assert not identities._unnoted
