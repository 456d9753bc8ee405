"""The Restarts page in a real browser: it fits a phone, breaks no policy, and opens without scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.browser.test_web_page import CHROMIUM, FLAGS
from tests.integration._peer import empty_status, serving, wait_for
from tests.integration._web import running_web, settings_for
from tests.integration.test_web_restarts import COLD, catalog_with, gates, recorded, restart_status

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    pytest.mark.xdist_group("browser"),
]


@pytest.mark.parametrize(("scheme", "width", "scripts"), [("light", 1200, True), ("dark", 360, False)])
def test_every_start_opens_and_fits(tmp_path: Path, scheme: str, width: int, scripts: bool) -> None:
    path = catalog_with(tmp_path / "catalog.db", recorded(2, "cold", COLD, gates("schema", COLD)))
    status = empty_status(restart=restart_status())
    with serving(status) as peer, running_web(settings_for(peer.port, catalog=path), let_in=True) as web:
        web.wait_for_status()
        wait_for(lambda: web.state.history.history().reads > 0, "the catalog is read")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            context = web.access.context(
                browser,
                color_scheme=scheme,
                viewport={"width": width, "height": 800},
                java_script_enabled=scripts,
            )
            page = context.new_page()
            errors: list[str] = []
            page.on("console", lambda message: errors.append(message.text))
            page.goto(f"{web.url}/restarts")
            running, cold = page.locator("details.restart").all()
            expect(running.get_by_text("Table walk")).to_be_visible()
            expect(cold.get_by_text("Table walk")).to_be_hidden()
            cold.locator("summary").click()
            expect(cold.get_by_text("failed", exact=True)).to_be_visible()
            expect(cold.get_by_text("skipped", exact=True)).to_have_count(4)
            main = page.locator("main").bounding_box()
            assert main is not None
            assert main["width"] <= width
            page.get_by_role("link", name="Overview").click()
            expect(page.get_by_role("link", name="Restarts", exact=True)).to_be_visible()
            assert errors == []
            browser.close()
