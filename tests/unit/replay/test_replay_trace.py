"""Recorded traces are read whole or refused with the line and the field."""

from __future__ import annotations

import json

import pytest

from appliance.errors import InvalidTrace
from appliance.replay.trace import read_trace
from tests.support.small_trace import SMALL_TRACE, small_trace


def line(timestamp=0, input_length=1024, hash_ids=(1, 2), **more) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": input_length, "hash_ids": list(hash_ids), **more}
    )


@pytest.fixture
def written(tmp_path):
    def write(*lines: str):
        path = tmp_path / "some.jsonl"
        path.write_text("\n".join(lines))
        return path

    return write


def test_the_trace_under_data_is_the_one_its_generator_makes():
    assert SMALL_TRACE.read_text() == small_trace()


def test_whole_chunks_only(written):
    trace = read_trace(
        written(
            line(0, 1200, (7, 8, 9)), "", line(1500, 511, (5,)), line(1500, 1024, (7, 8), output_length=3)
        )
    )
    assert trace.name == "some"
    assert [len(request.keys) for request in trace.requests] == [2, 0, 2]
    assert [request.at_seconds for request in trace.requests] == [0.0, 1.5, 1.5]
    assert trace.requests[0].keys == trace.requests[2].keys
    assert (trace.asked_chunks, trace.unique_chunks, trace.seen_chunks) == (4, 2, 2)


def test_halves_are_traces_of_their_own():
    trace = read_trace(SMALL_TRACE)
    first, second = trace.half("first"), trace.half("second")
    assert [*first.requests, *second.requests] == trace.requests
    assert len(first.requests) == len(second.requests)
    assert first.name == "small_trace.first"
    assert second.asked_chunks + first.asked_chunks == trace.asked_chunks
    assert first.unique_chunks + second.unique_chunks > trace.unique_chunks


@pytest.mark.parametrize(
    ("lines", "number", "field"),
    [
        ([line(), "{"], 2, "the line"),
        (['{"timestamp": 1, "input_length": 5}'], 1, "hash_ids"),
        ([line(timestamp=-1)], 1, "timestamp"),
        ([line(timestamp=9), line(timestamp=8)], 2, "timestamp"),
        ([line(input_length=0)], 1, "input_length"),
        ([line(input_length="1024")], 1, "input_length"),
        ([line(hash_ids=("a",))], 1, "hash_ids.0"),
        ([line(hash_ids=(-1, 2))], 1, "hash_ids"),
        ([line(hash_ids=(1 << 63, 2))], 1, "hash_ids"),
        ([line(input_length=2048)], 1, "hash_ids"),
        ([line(hash_ids=(1, 2)), line(hash_ids=(3, 2))], 2, "hash_ids"),
        ([line(hash_ids=(1, 1))], 1, "hash_ids"),
    ],
)
def test_a_bad_line_is_named(written, lines, number, field):
    with pytest.raises(InvalidTrace) as caught:
        read_trace(written(*lines))
    assert caught.value.details == {"line": number, "field": field}
    assert f"Line {number} of the trace, {field}: " in str(caught.value)


def test_a_file_without_requests_is_refused(written, tmp_path):
    with pytest.raises(InvalidTrace, match="no request with a whole chunk"):
        read_trace(written(line(0, 100, (1,))))
    with pytest.raises(InvalidTrace, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
