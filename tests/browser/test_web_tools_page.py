"""The Plan and Doctor pages in a real browser: with scripts, without, narrow, and with a keyboard."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.integration._peer import full_status, serving
from tests.integration._web import RunningWeb, running_web, settings_for

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
KIMI = (Path(__file__).parents[1] / "unit/planning/configs/kimi-linear-48b.json").read_text()

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def web() -> Iterator[RunningWeb]:
    with serving(full_status()) as peer, running_web(settings_for(peer.port)) as running:
        running.wait_for_status()
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*FLAGS, "--disable-sync", "--no-first-run"]
        )
        yield launched
        launched.close()


@pytest.fixture(params=[True, False], ids=["scripts", "no-scripts"])
def page(browser: Browser, web: RunningWeb, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page that must meet no error and leave the server for nowhere."""
    context = web.access.context(browser, base_url=web.url, java_script_enabled=request.param)
    opened = context.new_page()
    errors: list[str] = []
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on(
        "request",
        lambda asked: errors.append(asked.url) if not asked.url.startswith((web.url, "data:")) else None,
    )
    yield opened
    context.close()
    # A refused form is a 422, which Chromium reports as a failed resource.
    assert not [error for error in errors if "422" not in error]


def test_a_plan_is_made_corrected_and_made_again(page: Page):
    page.goto("/plan")
    expect(page.get_by_text("Paste the config.json of a model")).to_be_visible()
    page.get_by_label("The model's config.json").fill(KIMI)
    page.get_by_label("TP", exact=True).fill("3")
    page.get_by_role("button", name="Plan").click()
    expect(page.get_by_role("alert")).to_contain_text("does not divide 32")
    page.get_by_label("TP", exact=True).fill("2")
    page.get_by_label("Align N to").fill("16")
    page.keyboard.press("Enter")
    expect(page.get_by_text("--max-num-batched-tokens 1887")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_label("The model's config.json")).to_have_value(re.compile("kda_layers"))


def test_the_doctor_looks_again(page: Page):
    page.goto("/doctor")
    expect(page.get_by_role("heading", name="Doctor")).to_be_visible()
    expect(page.get_by_text("Leases ended before their engine released them.")).to_be_visible()
    page.get_by_role("link", name="Look again").click()
    expect(page.get_by_text("leases_expired")).to_be_visible()


@pytest.mark.parametrize("path", ["/plan", "/doctor"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(browser: Browser, web: RunningWeb, path: str, width: int):
    context = web.access.context(browser, base_url=web.url, viewport={"width": width, "height": 800})
    opened = context.new_page()
    opened.goto(path)
    if path == "/plan":
        opened.get_by_label("The model's config.json").fill(KIMI)
        opened.get_by_role("button", name="Plan").click()
        expect(opened.get_by_text("--max-num-batched-tokens")).to_be_visible()
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
