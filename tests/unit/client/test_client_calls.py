"""A call is completed once, and what a late reply grants is undone."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.errors import DaemonUnreachable, NotRegistered
from connector.client.calls import Call


def test_a_reply_is_returned_and_an_error_raised() -> None:
    call = Call("lookup", {}, 5.0)
    call.complete({"lease": 1})
    call.complete({"lease": 2})
    assert call.wait() == {"lease": 1}
    failed = Call("reserve", {}, 5.0)
    failed.complete(None, NotRegistered("not yet"))
    with pytest.raises(NotRegistered):
        failed.wait()


def test_a_late_reply_is_undone_whichever_comes_first() -> None:
    undone: list[dict[str, Any]] = []
    late = Call("lookup", {}, 5.0, on_unwanted=undone.append)
    late.give_up()
    late.complete({"lease": 1})
    early = Call("lookup", {}, 5.0, on_unwanted=undone.append)
    early.complete({"lease": 2})
    early.give_up()
    assert undone == [{"lease": 1}, {"lease": 2}]


def test_a_wait_ends_at_the_deadline() -> None:
    undone: list[dict[str, Any]] = []
    call = Call("locate", {}, 0.01, on_unwanted=undone.append)
    with pytest.raises(DaemonUnreachable):
        call.wait()
    call.complete({"lease": 3})
    assert undone == [{"lease": 3}]
