"""One minute of the soak: engines killed, stopped and starved of memory must find no wrong byte and leave no hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.soak import Soak, run, table


@pytest.mark.timeout(420)
def test_a_minute_of_kills_stops_aborts_and_evictions(tmp_path: Path):
    outcome = run(Soak(tmp_path, seconds=45, engines=8, seed=3))
    assert outcome.faults == [], table(outcome)
    assert outcome.events["SIGKILL"] > 0
    assert outcome.events["SIGSTOP"] > 0
    assert outcome.events["checks"] > 1
    assert outcome.figures["objects loaded and compared"] > 0
    assert outcome.figures["entries evicted"].get("evicted", 0) > 0
    assert outcome.figures["wrong pages"] == 0
