"""The overview page in a real browser, over a real socket."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from appliance.protocol.status import DaemonStatus
from tests.integration._peer import (
    Peer,
    degraded_status,
    empty_status,
    engine,
    full_status,
    hostile_status,
    populating_status,
    serving,
    wait_for,
)
from tests.integration._web import RunningWeb, running_web, settings_for

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*FLAGS, "--disable-sync", "--no-first-run"]
        )
        yield launched
        launched.close()


@dataclass
class Watched:
    """A page, and what went wrong on it or left it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    @classmethod
    def opened(cls, context: BrowserContext) -> Watched:
        watched = cls(context.new_page())
        watched.page.on("console", lambda message: watched.errors.append(message.text))
        watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
        watched.page.on("dialog", lambda dialog: watched.errors.append(f"dialog {dialog.message}"))
        watched.page.on("request", lambda request: watched.urls.append(request.url))
        return watched

    def fragments(self) -> int:
        return sum("/fragments/" in url for url in self.urls)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with serving(full_status()) as running:
        yield running


@pytest.fixture
def web(peer: Peer) -> Iterator[RunningWeb]:
    with running_web(settings_for(peer.port)) as running:
        running.wait_for_status()
        yield running


@pytest.fixture
def watched(browser: Browser, web: RunningWeb) -> Iterator[Watched]:
    context = web.access.context(browser)
    opened = Watched.opened(context)
    opened.page.goto(web.url)
    yield opened
    context.close()


def test_loads_without_an_error_and_asks_no_other_host(watched: Watched, web: RunningWeb) -> None:
    expect(watched.page.locator("#engines")).to_contain_text("vllm-a-3f9c1e")
    watched.page.wait_for_event("requestfinished", lambda request: "/fragments/" in request.url)
    assert watched.errors == []
    assert {urlsplit(url).netloc for url in watched.urls} == {urlsplit(web.url).netloc}
    assert watched.page.evaluate("getComputedStyle(document.querySelector('.top')).position") == "sticky"


def test_refreshes_in_place(watched: Watched, peer: Peer) -> None:
    watched.page.evaluate("window.sameDocument = true")
    watched.page.locator("#engines-curl summary").click()
    peer.status = empty_status(engines=[engine("a-new-engine")])
    expect(watched.page.locator("#engines")).to_contain_text("a-new-engine", timeout=15_000)
    expect(watched.page.locator("#engines-curl pre")).to_be_visible()
    assert watched.page.evaluate("window.sameDocument"), "the page was loaded anew"
    assert watched.errors == []


def test_title_follows_the_state(watched: Watched, peer: Peer) -> None:
    expect(watched.page).to_have_title(re.compile("^Warning "))
    peer.status = empty_status()
    expect(watched.page).to_have_title(re.compile("^OK "), timeout=15_000)


def test_pause_stops_the_refresh_and_resume_brings_it_back_at_once(watched: Watched, peer: Peer) -> None:
    button = watched.page.get_by_role("button", name="Pause")
    button.click()
    resume = watched.page.get_by_role("button", name="Resume")
    expect(resume).to_have_attribute("aria-pressed", "true")
    watched.page.wait_for_timeout(300)
    before = watched.fragments()
    peer.status = empty_status(engines=[engine("while-paused")])
    watched.page.wait_for_timeout(5_000)
    assert watched.fragments() == before
    expect(watched.page.locator("#engines")).not_to_contain_text("while-paused")
    resume.click()
    expect(watched.page.locator("#engines")).to_contain_text("while-paused", timeout=15_000)


def test_says_that_the_data_path_is_stuck(watched: Watched, peer: Peer) -> None:
    peer.silent = True
    headline = watched.page.locator("#health-title")
    expect(headline).to_contain_text("The data path does not answer since", timeout=20_000)
    expect(watched.page.locator("#engines")).to_contain_text("vllm-a-3f9c1e")
    peer.silent = False
    expect(headline).to_contain_text("Ready.", timeout=20_000)


def test_says_that_its_own_process_is_gone(browser: Browser, peer: Peer) -> None:
    with running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        context = web.access.context(browser)
        watched = Watched.opened(context)
        watched.page.goto(web.url)
        expect(watched.page.locator("#lost")).to_be_hidden()
    expect(watched.page.locator("#lost")).to_be_visible(timeout=20_000)
    expect(watched.page.locator("#engines")).to_contain_text("vllm-a-3f9c1e")
    context.close()


def test_works_without_scripts(browser: Browser, web: RunningWeb, peer: Peer) -> None:
    context = web.access.context(browser, java_script_enabled=False)
    page = context.new_page()
    page.goto(web.url)
    expect(page.locator("#engines")).to_contain_text("vllm-a-3f9c1e")
    expect(page.locator("#pause")).to_be_hidden()
    peer.status = empty_status(engines=[engine("after-a-reload")])
    expect(page.locator("#engines")).to_contain_text("after-a-reload", timeout=20_000)
    page.get_by_role("link", name="Stop").click()
    expect(page).to_have_url(f"{web.url}/?live=off")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "status",
    [full_status(), empty_status(), populating_status(), degraded_status(), hostile_status()],
    ids=["full", "empty", "populating", "degraded", "hostile"],
)
def test_fits_every_width_and_runs_nothing_foreign(
    browser: Browser, web: RunningWeb, peer: Peer, status: dict[str, object], scheme: str
) -> None:
    peer.status = status
    wanted = DaemonStatus.model_validate(status)
    wait_for(lambda: web.state.poller.snapshot().status == wanted, "the status to look at")
    context = web.access.context(browser, color_scheme=scheme)  # type: ignore[arg-type]
    watched = Watched.opened(context)
    watched.page.goto(web.url)
    for width in (320, 390, 768, 1061, 1440):
        watched.page.set_viewport_size({"width": width, "height": 800})
        overflow = watched.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert overflow <= 0, f"{overflow} px have to be scrolled sideways at a width of {width}"
    assert watched.errors == []
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser: Browser, web: RunningWeb, scheme: str) -> None:
    context = web.access.context(browser, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(web.url)
    page.wait_for_load_state("networkidle")
    weak = page.evaluate(CONTRAST)
    assert weak == [], "text below the ratio of 4.5 that WCAG AA asks for"
    context.close()


CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const weak = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("svg, noscript, .skip, .hidden")) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(background(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) weak.push(`${ratio.toFixed(2)} ${element.className} ${element.textContent.trim().slice(0, 40)}`);
  }
  return weak;
}"""
