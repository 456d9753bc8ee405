"""The figures for vLLM's metrics are counted once and documented."""

import re
from pathlib import Path

from connector.vllm.figures import FIGURES, Tally

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_what_was_counted_is_taken_once() -> None:
    tally = Tally()
    tally.add(lookups=1, lookup_hits=0)
    tally.add(lookups=2)
    assert tally.take() == {"lookups": 3}
    assert tally.take() == {}


def test_every_figure_is_documented() -> None:
    rows = re.findall(
        r"^\| `vllm:pagewarden_(\w+)` \| counter \| (.+) \|$", DOCS.read_text("utf-8"), re.MULTILINE
    )
    assert dict(rows) == FIGURES
