"""What may be written, and what may be acknowledged as stopped."""

from connector.client.writing import Writing


def test_what_is_being_written_is_acknowledged_only_after_its_copy() -> None:
    writing = Writing()
    assert writing.begin([1, 2], writing.session)
    assert not writing.revoke([1])
    assert writing.take_stopped() == []
    assert writing.end([1, 2])
    assert writing.take_stopped() == [1]
    assert writing.take_stopped() == []


def test_what_was_acknowledged_can_never_be_written() -> None:
    writing = Writing()
    assert writing.revoke([7])
    assert writing.take_stopped() == [7]
    assert not writing.begin([6, 7], writing.session)
    assert writing.idle
    assert writing.begin([6], writing.session)


def test_what_an_earlier_session_was_granted_can_never_be_written() -> None:
    writing = Writing()
    session = writing.session
    writing.new_session()
    assert not writing.begin([1], session)
    assert writing.begin([1], writing.session)


def test_a_copy_of_an_earlier_session_still_counts_as_in_flight() -> None:
    writing = Writing()
    writing.begin([1], writing.session)
    writing.new_session()
    assert not writing.idle
    assert not writing.end([1])
    assert writing.idle


def test_a_revocation_that_is_repeated_is_acknowledged_again() -> None:
    writing = Writing()
    writing.revoke([3])
    assert writing.take_stopped() == [3]
    writing.revoke([3])
    assert writing.take_stopped() == [3]
