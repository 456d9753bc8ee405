"""The third-party files are the ones that were taken in, and the page asks browsers to check that."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from appliance.protocol.base import MissReason
from web.assets import STATIC_DIR, asset, vendored
from web.explain import EVICTION_CAUSES, LEASE_END_CAUSES, MISS_REASONS, ORDERLY_LEASE_ENDS, miss_reason
from web.templating import TEMPLATES_DIR


@pytest.mark.parametrize("entry", vendored(), ids=lambda entry: str(entry["file"]))
def test_vendored_file_has_its_recorded_hash(entry: dict[str, str]) -> None:
    content = (STATIC_DIR / "vendor" / entry["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    assert entry["version"] in entry["file"]
    assert entry["license"]


def test_every_vendored_file_is_recorded() -> None:
    present = {path.name for path in (STATIC_DIR / "vendor").iterdir()} - {"vendor.json"}
    assert present == {entry["file"] for entry in vendored()}


def test_htmx_is_a_2_0() -> None:
    versions = {entry["package"]: entry["version"] for entry in vendored()}
    assert versions["htmx.org"].startswith("2.0.")
    assert f'version:"{versions["htmx.org"]}"' in (STATIC_DIR / asset_file("htmx.org")).read_text("utf-8")


def asset_file(package: str) -> str:
    return next(f"vendor/{entry['file']}" for entry in vendored() if entry["package"] == package)


def test_page_asks_for_the_recorded_hashes() -> None:
    page = (TEMPLATES_DIR / "overview.html").read_text("utf-8")
    for entry in vendored():
        name = f"vendor/{entry['file']}"
        assert f"'{name}'" in page
        digest = base64.b64decode(asset(name).integrity.removeprefix("sha256-"))
        assert digest == hashlib.sha256((STATIC_DIR / name).read_bytes()).digest()
    assert "integrity=" in page


def test_htmx_is_configured_for_the_policy() -> None:
    page = (TEMPLATES_DIR / "overview.html").read_text("utf-8")
    found = re.search(r"name=\"htmx-config\" content='([^']+)'", page)
    assert found is not None
    config = json.loads(found[1])
    assert config["disableInheritance"] is True
    assert config["allowEval"] is False
    assert config["includeIndicatorStyles"] is False
    assert config["selfRequestsOnly"] is True


def test_no_file_of_the_page_names_another_host() -> None:
    files = [*TEMPLATES_DIR.rglob("*.html"), *STATIC_DIR.glob("*.css"), *STATIC_DIR.glob("*.js")]
    assert len(files) > 10
    for path in files:
        assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", path.read_text("utf-8")), path.name


def test_an_address_changes_with_the_content() -> None:
    assert asset("base.css").url.startswith("/static/base.css?v=")
    assert asset("base.css").url != asset("live.js").url.replace("live.js", "base.css")


def test_every_miss_reason_is_explained() -> None:
    assert set(MISS_REASONS) == set(MissReason)
    assert all(entry.meaning and entry.action for entry in MISS_REASONS.values())
    assert miss_reason("a_new_reason").title == "A new reason"


def test_causes_are_explained_in_sentences() -> None:
    for text in (*LEASE_END_CAUSES.values(), *EVICTION_CAUSES.values()):
        assert text.endswith(".")
    assert LEASE_END_CAUSES.keys() >= ORDERLY_LEASE_ENDS
