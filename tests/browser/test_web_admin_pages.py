"""Login, Policies, Audit and Settings in a real browser against a real daemon, its dashboard and an engine at work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.test_web_page import CHROMIUM, CONTRAST, Watched, browser
from tests.integration.conftest import make_daemon
from tests.support.daemon import ADMIN_PASSWORD, DaemonProcess, free_port
from tests.support.engine import Engine
from tests.support.waiting import eventually

__all__ = ["browser", "make_daemon"]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    pytest.mark.xdist_group("browser"),
]

PAGES = ("/login", "/policies", "/audit", "/settings", "/nothing")


@dataclass(frozen=True)
class Site:
    """A daemon with its dashboard."""

    daemon: DaemonProcess
    url: str

    def answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/healthz").status_code == 200
        return False


@pytest.fixture
def site(make_daemon: Callable[..., DaemonProcess]) -> Site:
    port = free_port()
    found = Site(make_daemon(no_web=False, http_port=port), f"http://127.0.0.1:{port}")
    eventually(found.answers, "an answer of the dashboard", seconds=60)
    return found


@pytest.fixture
def engine(site: Site) -> Iterator[Engine]:
    made = Engine(site.daemon.port, engine_id="engine-a")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def watched(browser: Browser, site: Site) -> Iterator[Watched]:
    context = browser.new_context()
    yield Watched.opened(context)
    context.close()


def log_in(page: Page, password: str = ADMIN_PASSWORD) -> None:
    page.get_by_label("User").fill("admin")
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()


def row(page: Page, section: str, text: str) -> Locator:
    return page.locator(f"#{section} tbody tr", has_text=text).first


def test_login_is_asked_for_refused_and_granted(watched: Watched, site: Site) -> None:
    page = watched.page
    page.goto(f"{site.url}/audit")
    expect(page).to_have_url(f"{site.url}/login?next=/audit")
    log_in(page, "not the password")
    expect(page.get_by_role("alert")).to_contain_text("no such user")
    expect(page.get_by_label("User")).to_have_value("admin")
    watched.errors.clear()  # the browser's own note of the 401
    log_in(page)
    expect(page).to_have_url(f"{site.url}/audit")
    expect(row(page, "audit", "login.fail")).to_contain_text("admin")
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(f"{site.url}/login")
    page.goto(site.url)
    expect(page).to_have_url(f"{site.url}/login?next=/")
    assert watched.errors == []
    assert {urlsplit(url).netloc for url in watched.urls} == {urlsplit(site.url).netloc}


def test_a_ttl_changed_here_holds_for_the_next_lookup_is_audited_and_undone(
    watched: Watched, site: Site, engine: Engine
) -> None:
    page = watched.page
    tokens = list(range(engine.chunk_tokens * 3 + 1))
    engine.lookup("first", tokens)
    engine.save(tokens, 1)

    def remaining_seconds(request: str) -> float:
        """The time left of the lease that a new lookup takes."""
        found = eventually(lambda: _leased(engine, request, tokens), "a hit")
        (lease,) = [each for each in site.daemon.status().leases if each.request == request]
        engine.scheduler.release(found)
        return lease.remaining_seconds

    assert remaining_seconds("before") > 77
    page.goto(f"{site.url}/policies")
    log_in(page)
    ttl = row(page, "ttls", "Read lease")
    ttl.get_by_label("Read lease, seconds").fill("77")
    ttl.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status")).to_contain_text("Saved")
    expect(ttl).to_contain_text("77 s")
    expect(ttl).to_contain_text("changed at run time")
    assert 0 < remaining_seconds("changed") <= 77

    page.get_by_role("link", name="Audit").click()
    entry = row(page, "audit", "ttl.set")
    for text in ("admin", "read_lease_ttl_seconds", "300", "77", "127.0.0.1"):
        expect(entry).to_contain_text(text)

    page.get_by_role("link", name="Policies").click()
    row(page, "history", "77 s").get_by_role("button", name=re.compile("^Undo")).click()
    expect(page.get_by_role("status")).to_contain_text("Undone")
    expect(ttl).to_contain_text("300 s")
    expect(ttl).not_to_contain_text("changed at run time")
    assert remaining_seconds("undone") > 77
    page.get_by_role("link", name="Audit").click()
    expect(row(page, "audit", "ttl.reset")).to_contain_text("77")
    assert watched.errors == []


def test_the_eviction_policy_is_compared_and_changed_here(
    watched: Watched, site: Site, engine: Engine
) -> None:
    page = watched.page
    tokens = list(range(engine.chunk_tokens * 3 + 1))
    for request in ("first", "second"):
        found = engine.lookup(request, tokens)
        engine.save(tokens, 1)
        engine.scheduler.release(found.lease)
    page.goto(f"{site.url}/policies")
    log_in(page)
    returns, lru = row(page, "eviction", "chooses snapshots"), row(page, "eviction", "was used last")
    expect(returns).to_contain_text("evicts")
    expect(returns.get_by_role("button", name="Use")).to_have_count(0)
    lru.get_by_role("button", name="Use LRU").click()
    expect(page.get_by_role("status")).to_contain_text("evicts from now on")
    expect(lru).to_contain_text("evicts")
    assert site.daemon.status().l1.policy == "LRU"
    # The first one may have come before anything was stored that tells the sizes of entries.
    eventually(
        lambda: {shadow.prompts for shadow in site.daemon.status().retention.policies} in ({1}, {2}),
        "the prompts in every shadow",
    )
    page.reload()
    expect(returns).to_contain_text("%")
    expect(row(page, "eviction", "recurrent")).to_contain_text("of stored")
    page.get_by_role("link", name="Audit").click()
    entry = row(page, "audit", "policy.set")
    for text in ("RETURNS", "LRU", "admin"):
        expect(entry).to_contain_text(text)
    assert watched.errors == []


def _leased(engine: Engine, request: str, tokens: list[int]) -> int:
    return engine.lookup(request, tokens).lease


def test_a_change_from_an_old_page_is_refused_and_keeps_what_was_typed(watched: Watched, site: Site) -> None:
    page = watched.page
    page.goto(f"{site.url}/policies")
    log_in(page)
    expect(page.locator("#ttls")).to_contain_text("Write")
    answer = httpx.put(
        f"{site.url}/api/v1/policies/ttls/session_ttl_seconds",
        json={"value_seconds": 500},
        headers={**site.daemon.web_headers(), "If-Match": "*"},
    )
    assert answer.status_code == 200
    typed = row(page, "ttls", "Write").get_by_label("Write, seconds")
    typed.fill("123")
    row(page, "ttls", "Write").get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("changed since they were read")
    expect(typed).to_have_value("123")
    expect(row(page, "ttls", "Write")).to_contain_text("600 s")
    row(page, "ttls", "Write").get_by_role("button", name="Save").click()
    expect(row(page, "ttls", "Write")).to_contain_text("123 s")


def test_a_namespaces_ttl(watched: Watched, site: Site, engine: Engine) -> None:
    page = watched.page
    headers = site.daemon.web_headers()

    def known() -> bool:
        return bool(httpx.get(f"{site.url}/api/v1/status", headers=headers).json()["namespaces"])

    eventually(known, "the namespace on the dashboard")
    page.goto(f"{site.url}/policies")
    log_in(page)
    form = page.locator("#ttls form.wide")
    form.get_by_label("TTL").select_option(label="Write")
    form.get_by_label("Seconds").fill("55")
    form.get_by_role("button", name="Set").click()
    expect(page.get_by_role("status")).to_contain_text("Saved")
    namespace = site.daemon.status().namespaces[0]
    assert namespace.write_ttl_seconds == 55
    row(page, "ttls", namespace.namespace[:12]).get_by_role("button", name="Follow the global value").click()
    expect(page.locator("#ttls tbody tr")).to_have_count(3)
    assert site.daemon.status().namespaces[0].write_ttl_seconds == 600


def test_users_tokens_and_logins(watched: Watched, site: Site, browser: Browser) -> None:
    page = watched.page
    page.goto(f"{site.url}/settings")
    log_in(page)
    form = page.locator("#users form.wide")
    form.get_by_label("Name").fill("ada")
    form.get_by_label("Password").fill("ada's password")
    form.get_by_role("button", name="Add").click()
    expect(page.get_by_role("status")).to_contain_text("can log in now")
    form.get_by_label("Name").fill("ada")
    form.get_by_label("Password").fill("ada's password")
    form.get_by_role("button", name="Add").click()
    expect(page.get_by_role("alert")).to_contain_text("There is a user 'ada'")
    watched.errors.clear()  # the browser's own note of the 409
    row(page, "users", "ada").get_by_label("Role of ada").select_option("operator")
    row(page, "users", "ada").get_by_role("button", name="Save ada").click()
    expect(row(page, "users", "ada")).to_contain_text("operator")

    form = page.locator("#tokens form.wide")
    form.get_by_label("For what").fill("prometheus")
    form.get_by_label("Scope").select_option("status:read")
    form.get_by_role("button", name="Add").click()
    token = page.locator("#issued-token").inner_text()
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{site.url}/api/v1/status", headers=headers).status_code == 200
    assert httpx.get(f"{site.url}/api/v1/settings", headers=headers).status_code == 403
    expect(page.get_by_role("link", name="Settings")).to_have_attribute("aria-current", "page")
    page.goto(f"{site.url}/settings")
    expect(page.locator("body")).not_to_contain_text(token)
    row(page, "tokens", "prometheus").get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("status")).to_contain_text("revoked")
    assert httpx.get(f"{site.url}/api/v1/status", headers=headers).status_code == 401

    other = browser.new_context()
    second = other.new_page()
    second.goto(f"{site.url}/policies")
    log_in(second)
    expect(second).to_have_url(f"{site.url}/policies")
    page.reload()
    expect(page.locator("#logins tbody tr")).to_have_count(2)
    page.locator("#logins tbody tr", has_not_text="this one").get_by_role("button", name="End").click()
    expect(page.locator("#logins tbody tr")).to_have_count(1)
    second.goto(f"{site.url}/policies")
    expect(second).to_have_url(f"{site.url}/login?next=/policies")
    other.close()
    row(page, "users", "ada").get_by_role("button", name="Remove ada").click()
    expect(page.locator("#users tbody tr")).to_have_count(1)
    assert watched.errors == []


def test_everything_works_without_scripts(browser: Browser, site: Site) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site.url}/policies")
    log_in(page)
    ttl = row(page, "ttls", "Write")
    ttl.get_by_label("Write, seconds").fill("321")
    ttl.get_by_role("button", name="Save").click()
    expect(ttl).to_contain_text("321 s")
    page.get_by_role("link", name="Audit").click()
    page.get_by_label("What").select_option("ttl.set")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("#audit tbody tr")).to_have_count(1)
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_every_width_and_can_be_read(browser: Browser, site: Site, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
    watched = Watched.opened(context)
    page = watched.page
    page.goto(f"{site.url}/login")
    log_in(page)
    expect(page.locator("#overview")).to_be_visible()
    for path in PAGES:
        page.goto(site.url + path)
        for details in page.locator("details.curl").all():
            details.evaluate("element => element.open = true")
        for width in (320, 390, 768, 1061, 1440):
            page.set_viewport_size({"width": width, "height": 800})
            overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert overflow <= 0, f"{path}: {overflow} px have to be scrolled sideways at a width of {width}"
        assert page.evaluate(CONTRAST) == [], f"{path}: text below the ratio of 4.5 that WCAG AA asks for"
    watched.errors = [error for error in watched.errors if "404" not in error]
    assert watched.errors == []
    context.close()
