"""Which transport a worker attaches with."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import ArenaUnreachable, AttachmentNotProven, DaemonUnreachable
from appliance.protocol.base import Transport
from appliance.protocol.liveness import is_inline
from appliance.protocol.messages import HelloResult
from connector.client.attachment import Attachment


def hello(directory: Path, bulk_port: int = 5) -> HelloResult:
    return HelloResult(
        version="1",
        protocol=1,
        heartbeat_seconds=1.0,
        session_ttl_seconds=9.0,
        arena_dir=str(directory),
        bulk_port=bulk_port,
    )


def test_shared_where_the_directory_can_be_seen(tmp_path: Path) -> None:
    attachment = Attachment("auto", None)
    args = attachment.begin(hello(tmp_path))
    assert args["transport"] == "shared"
    assert attachment.transport is Transport.SHARED
    assert attachment.lock is not None
    assert not is_inline(args["attach_id"])
    assert attachment.begin(hello(tmp_path)) == args, "the same lock serves the next session"
    attachment.release()
    assert list(tmp_path.iterdir()) == []


def test_inline_where_the_directory_is_missing_and_the_reason_says_so(tmp_path: Path) -> None:
    attachment = Attachment("auto", str(tmp_path / "nowhere"))
    first, second = attachment.begin(hello(tmp_path)), attachment.begin(hello(tmp_path))
    assert first["transport"] == "inline"
    assert is_inline(first["attach_id"])
    assert first["attach_id"] != second["attach_id"]
    assert "nowhere" in attachment.reason
    assert attachment.lock is None


@pytest.mark.parametrize("error", [AttachmentNotProven("no lock seen"), ArenaUnreachable("not mapped")])
def test_inline_where_the_daemon_or_the_mapping_says_no_until_the_next_session(
    tmp_path: Path, error: AttachmentNotProven | ArenaUnreachable
) -> None:
    attachment = Attachment("auto", None)
    attachment.begin(hello(tmp_path))
    attachment.failed(error)
    assert list(tmp_path.iterdir()) == [], "the useless lock is gone"
    assert attachment.begin(hello(tmp_path))["transport"] == "inline"
    assert attachment.reason == str(error)
    attachment.new_session()
    assert attachment.begin(hello(tmp_path))["transport"] == "shared"
    attachment.release()


def test_another_failure_does_not_change_the_transport(tmp_path: Path) -> None:
    attachment = Attachment("auto", None)
    attachment.begin(hello(tmp_path))
    attachment.failed(DaemonUnreachable("away"))
    assert attachment.begin(hello(tmp_path))["transport"] == "shared"
    attachment.release()


def test_what_was_asked_for_is_kept(tmp_path: Path) -> None:
    inline = Attachment("inline", None)
    assert inline.begin(hello(tmp_path))["transport"] == "inline"
    assert "pagewarden.transport" in inline.reason
    inline.new_session()
    assert inline.begin(hello(tmp_path))["transport"] == "inline"
    assert list(tmp_path.iterdir()) == []
    shared = Attachment("shared", str(tmp_path / "nowhere"))
    with pytest.raises(ArenaUnreachable):
        shared.begin(hello(tmp_path))
    seen = Attachment("shared", None)
    args = seen.begin(hello(tmp_path))
    seen.failed(AttachmentNotProven("no lock seen"))
    assert seen.begin(hello(tmp_path)) == args
    seen.release()


def test_a_daemon_without_a_bulk_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArenaUnreachable, match="no bulk socket"):
        Attachment("inline", None).begin(hello(tmp_path, bulk_port=0))
