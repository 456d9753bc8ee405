"""docs/catalog.md names every table and column, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from appliance.catalog.health import CatalogState
from appliance.catalog.models import Base

TEXT = (Path(__file__).parents[3] / "docs" / "catalog.md").read_text()


def _documented() -> dict[str, list[str]]:
    sections = re.split(r"^### `(\w+)`$", TEXT, flags=re.MULTILINE)
    return {
        name: re.findall(r"^\| `(\w+)` \| \S", section.split("\n## ")[0], flags=re.MULTILINE)
        for name, section in zip(sections[1::2], sections[2::2], strict=True)
    }


def test_every_table_and_column_is_documented_in_order():
    described = {
        name: [column.name for column in table.columns] for name, table in Base.metadata.tables.items()
    }
    assert _documented() == described


def test_every_state_is_documented():
    for state in CatalogState:
        assert f"| `{state}` |" in TEXT
