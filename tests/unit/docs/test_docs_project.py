"""The pages hang together: links, reachability, commands, dependencies, and nothing of the machine they were written on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from docs_reader import DOCS, ROOT, first_words, headings, links, pages, rows, section, slug, text_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = text_of("README.md")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in headings(page.read_text())}


def local_links(page: Path) -> list[str]:
    return [target for target in links(page.read_text()) if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path):
    for target in local_links(page):
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        assert place.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert place.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(place), f"{target}: no such heading"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_two_headings_of_a_page_have_one_anchor(page: Path):
    found = [slug(heading) for heading in headings(page.read_text())]
    linked = {target.partition("#")[2] for target in local_links(page) if target.startswith("#")}
    assert not {anchor for anchor in found if found.count(anchor) > 1} & linked


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        for target in local_links(page):
            place = (page.parent / target.partition("#")[0]).resolve()
            if place.suffix == ".md" and place.exists():
                waiting.append(place)
    assert set(DOCS.rglob("*.md")) <= reached


def test_the_readme_starts_with_exactly_two_commands():
    blocks = re.findall(r"^```sh\n(.*?)^```$", section(README, "## Start"), flags=re.MULTILINE | re.DOTALL)
    assert blocks == ["make run\nmake test\n"]
    assert set(re.findall(r"\bmake [a-z0-9-]+", README)) == {"make run", "make test"}


def test_contributing_has_every_target_of_the_makefile():
    targets = re.findall(r"^([a-z0-9-]+):.*?## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    documented = first_words(section(text_of("CONTRIBUTING.md"), "## Everyday commands"))
    assert {f"make {target}" for target in targets} - {"make help"} <= set(documented)
    assert {command.removeprefix("make ") for command in documented} <= set(targets)


def names_of(requirements: list[str]) -> list[str]:
    return sorted(
        re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower() for requirement in requirements
    )


def test_every_dependency_is_justified():
    text = text_of("docs/dependencies.md")
    groups = {
        "## Runtime": PROJECT["project"]["dependencies"],
        "## Build": PROJECT["build-system"]["requires"],
        **{
            f"## Extra `{extra}`": requirements
            for extra, requirements in PROJECT["project"]["optional-dependencies"].items()
        },
    }
    for heading, requirements in groups.items():
        found = rows(section(text, heading))
        assert sorted(row[0].strip("`") for row in found) == names_of(requirements), heading
        assert all(len(row[1].split()) >= 3 for row in found), heading


def test_every_vendored_package_is_justified():
    import json

    vendored = json.loads((ROOT / "web/static/vendor/vendor.json").read_text())
    text = section(text_of("docs/dependencies.md"), "## Vendored")
    for entry in vendored:
        assert entry["package"].removesuffix(".org") in text, entry["package"]


def test_the_changelog_has_the_version_or_what_is_unreleased():
    text = text_of("CHANGELOG.md")
    version = PROJECT["project"]["version"]
    assert "## [Unreleased]" in text or f"## [{version}]" in text


def checked_files() -> list[Path]:
    return [*pages(), ROOT / "Makefile", ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("*.sh"))]


@pytest.mark.parametrize("page", checked_files(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_nothing_names_the_machine_it_was_written_on(page: Path):
    text = page.read_text()
    assert str(ROOT) not in text
    assert not re.search(r"/(home|Users|root)/", text)
    home = str(Path.home())
    assert len(home) < 3 or f"{home}/" not in text


def test_the_ci_script_runs_the_two_suites_and_nothing_else():
    text = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^step (.*)$", text, flags=re.MULTILINE) == ["make test", "make e2e"]
