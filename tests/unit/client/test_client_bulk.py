"""Credits, batches and the staging buffer of an inline client."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from appliance.errors import DaemonUnreachable
from appliance.protocol.messages import ReserveResult
from connector.client import inline
from connector.client.bulk import BulkAddress, Window
from connector.client.inline import Staging, batches
from kernels import Direction, StreamRuns, finish, reference_backend


def test_a_window_never_lets_more_out_than_its_credits() -> None:
    window = Window(2)
    assert window.open
    first = window.next_id
    window.sent("a")
    second = window.next_id
    window.sent("b")
    assert not window.open
    assert window.outstanding == 2
    with pytest.raises(AssertionError):
        window.sent("c")
    assert window.answered(second) == "b"
    assert window.answered(second) is None, "an answer counts once"
    assert window.answered(999) is None
    assert window.open
    third = window.next_id
    window.sent("c")
    assert len({first, second, third}) == 3
    assert not window.open
    assert window.answered(first) == "a"
    assert window.answered(third) == "c"
    assert window.outstanding == 0


def stream(*pieces: tuple[np.ndarray, int]) -> StreamRuns:
    return StreamRuns(
        np.array([piece.ctypes.data for piece, _ in pieces], dtype=np.uint64),
        np.array([len(piece) for piece, _ in pieces], dtype=np.uint64),
        np.array([offset for _, offset in pieces], dtype=np.uint64),
    )


def of_size(length: int) -> StreamRuns:
    return stream((np.zeros(length, dtype=np.uint8), 0))


def test_batches_hold_every_stream_once_and_stay_within_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline, "STAGING_BYTES", 3 * 4096)
    sizes = [1, 4096, 4097, 4096, 5 * 4096, 10, 10, 10, 10]
    runs = [of_size(size) for size in sizes]
    cut = list(batches(runs))
    assert [position for batch in cut for position in range(*batch.indices(len(runs)))] == list(range(9))
    for batch in cut:
        pages = sum(-(-size // 4096) for size in sizes[batch])
        assert pages <= 3 or batch.stop - batch.start == 1
    assert [batch.stop for batch in cut] == [2, 4, 5, 8, 9]
    assert list(batches([])) == []


def test_a_stream_in_the_buffer_is_what_the_arena_would_hold() -> None:
    rng = np.random.default_rng(3)
    backend = reference_backend()
    staging = Staging()
    first, second, third = (rng.integers(0, 256, size, dtype=np.uint8) for size in (100, 70, 5000))
    runs = [stream((first, 0), (second, 128)), stream((third, 0))]
    for _ in range(2):  # the second time the buffer holds old bytes
        spans, streams = staging.plan(runs)
        sums = backend.copy_spans_checksummed(spans, Direction.STORE, 2)
        expected = first.tobytes() + bytes(28) + second.tobytes()
        assert bytes(streams[0]) == expected, "padding carries nothing"
        assert bytes(streams[1]) == third.tobytes()
        whole = backend.checksum_bytes(expected, [(0, 100), (128, 70)])
        assert int(finish(sums, [198, 5000])[0]) == int(finish([whole], [198])[0])
        staging.plan([of_size(9000)])[1][0][:] = np.full(9000, 255, dtype=np.uint8).data


def test_a_forgotten_buffer_is_never_written_again() -> None:
    staging = Staging()
    _, [old] = staging.plan([of_size(4096)])
    staging.forget()
    _, [new] = staging.plan([of_size(4096)])
    new[:] = bytes(range(256)) * 16
    assert bytes(old) == bytes(4096)


def test_a_save_that_finds_nobody_ends_in_time_and_drops_its_connection_with_its_buffer() -> None:
    page = np.arange(4096, dtype=np.uint64).astype(np.uint8)
    carrier = inline.InlineCarrier(reference_backend(), patience_seconds=0.2)
    granted = ReserveResult(
        grants=[0], reservations=[5], segments=[0], words=[2], run_counts=[1], runs=bytes(8)
    )
    with pytest.raises(DaemonUnreachable):
        carrier.store(granted, [stream((page, 0))])
    with socket.socket() as nobody:  # bound and not listening: the port stays ours, and refuses
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        carrier.address = BulkAddress(endpoint, b"b" * 16, b"s" * 16, 1024, 2)
        before = carrier._out_staging.plan([stream((page, 0))])[1][0]
        with pytest.raises(DaemonUnreachable):
            carrier.store(granted, [stream((page, 0))])
        after = carrier._out_staging.plan([stream((page, 0))])[1][0]
        after[:] = bytes(4096)
        assert bytes(before) == page.tobytes(), "a connection that failed may still be sending from it"
        assert carrier._out._socket is None
    carrier.close()
