"""The control rows that the daemon applies at start."""

from __future__ import annotations

import sqlite3

import pytest

from appliance.catalog.apply import apply_control
from appliance.catalog.connections import write_transaction
from appliance.catalog.database import open_for_daemon
from appliance.catalog.recovery import ControlMemory, ControlState, load_control_state
from appliance.errors import CatalogUnreadable
from tests.unit.catalog.samples import NAMESPACE, clear, setting


@pytest.fixture
def path(tmp_path):
    return tmp_path / "catalog.db"


def _write(path, *rows):
    engine = open_for_daemon(path)
    with engine.connect() as connection, write_transaction(connection, durable=True):
        for row in rows:
            apply_control(connection, row)


def test_a_new_catalog_has_nothing_in_force(path):
    _write(path)
    assert load_control_state(path) == ControlState()
    assert load_control_state(path).highest_epoch == 0


def test_the_values_in_force_and_the_newest_clears_come_back(path):
    _write(
        path,
        setting(60, at=1.0),
        setting(90, at=2.0),
        setting([1, "two"], name="odd", at=3.0),
        setting(5, scope=NAMESPACE, at=4.0),
        setting(None, name="odd", at=5.0),
        clear(1),
        clear(3, namespace=NAMESPACE),
        clear(2),
    )
    state = load_control_state(path)
    assert state.settings == (setting(90, at=2.0), setting(5, scope=NAMESPACE, at=4.0))
    assert set(state.clears) == {clear(2), clear(3, namespace=NAMESPACE)}
    assert state.highest_epoch == 3


def test_what_cannot_be_read_is_refused_at_start(path):
    with pytest.raises(CatalogUnreadable):
        load_control_state(path)
    _write(path, setting(60))
    raw = sqlite3.connect(path)
    raw.execute("UPDATE settings SET value = 'nonsense'")
    raw.commit()
    raw.close()
    with pytest.raises(CatalogUnreadable, match="settings and clears"):
        load_control_state(path)


def test_memory_knows_what_a_file_lacks():
    memory = ControlMemory(ControlState((setting(60),), (clear(1),)))
    memory.remember(setting(5, scope=NAMESPACE))
    memory.remember(clear(4))
    memory.remember(clear(2))  # late news changes nothing
    memory.remember(setting(1, name="gone"))
    memory.remember(setting(None, name="gone"))
    everything = [setting(60), setting(5, scope=NAMESPACE), clear(4)]
    assert memory.missing_from(ControlState()) == everything
    assert memory.missing_from(ControlState((setting(61),), (clear(9),))) == everything[:2]
    assert memory.missing_from(ControlState((setting(60), setting(5, scope=NAMESPACE)), (clear(4),))) == []
