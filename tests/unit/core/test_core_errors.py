"""The error tree: stable codes that survive the wire."""

from __future__ import annotations

import re

import msgpack
import pytest

from appliance.errors import PagewardenError, StartupError, all_errors, from_wire

TREE = all_errors()


def test_codes_are_unique_words():
    assert len(TREE) == len(set(TREE.values()))
    assert all(re.fullmatch(r"[a-z][a-z_]*", code) for code in TREE)
    assert all(cls.code == code for code, cls in TREE.items())


def test_every_class_has_a_code_of_its_own():
    assert [cls for cls in TREE.values() if cls is not PagewardenError and "code" not in vars(cls)] == []


@pytest.mark.parametrize("cls", TREE.values(), ids=lambda cls: cls.code)
def test_round_trip(cls):
    error = cls("It failed.", remedy="Try this.", field="x", count=3, chunks=[1, 2])
    wire = msgpack.unpackb(msgpack.packb(error.to_wire()))
    back = from_wire(wire)
    assert type(back) is cls
    assert str(back) == "It failed. Try this."
    assert (back.message, back.remedy) == ("It failed.", "Try this.")
    assert back.details == {"field": "x", "count": 3, "chunks": [1, 2]}
    assert wire["retryable"] is cls.retryable
    assert back.to_wire() == error.to_wire()


def test_unknown_codes_and_hostile_maps_become_the_root():
    for wire in ({}, {"code": "from_the_future"}, {"code": 7, "message": 3, "details": "x"}):
        assert type(from_wire(wire)) is PagewardenError
    back = from_wire({"code": "protocol", "details": {"message": 1, "remedy": 2, "self": 3, 4: 5}})
    assert back.code == "protocol"
    assert back.details == {"message": 1, "remedy": 2, "self": 3, "4": 5}


def test_startup_errors_have_exit_statuses_of_their_own():
    found = [cls for cls in TREE.values() if issubclass(cls, StartupError)]
    statuses = [cls.exit_status for cls in found]
    assert len(set(statuses)) == len(statuses)
    assert all(0 < status < 126 for status in statuses)
