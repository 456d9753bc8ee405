"""Blocks that a window leaves before their chunk is full are kept for the save, and given back on every path."""

from vllm_stand_ins import ATTENTION, CHUNK, Engine, Request

from appliance.geometry import GroupKind, ObjectGroup
from connector.vllm.orders import Report

SHORT = ObjectGroup(1, "sliding-1", GroupKind.SLIDING, 2, shards=1, replicas=1, window_tokens=3)
"""A window of three tokens, blocks of two, in chunks of eight."""


def generating() -> tuple[Engine, Request]:
    """A request that has computed seven of eight tokens; its window has left two blocks of four."""
    engine, request = Engine(groups=(ATTENTION, SHORT)), Request("r", range(5))
    engine.admit(request, ([1, 2], [11, 12, 13]))
    engine.compute(request, 5, ([1, 2], [11, 12, 13]))
    for token in range(2):
        request.all_token_ids.append(token)
        # vLLM has given back what the window had left before this step.
        engine.compute(request, 1, ([1, 2], [0, 12 * (token == 0), 13, 14]))
    return engine, request


def test_a_chunk_is_stored_with_the_blocks_that_its_window_has_left() -> None:
    engine, request = generating()
    assert engine.pool.held == {11, 12}
    request.all_token_ids.append(9)
    (order,) = engine.compute(request, 1, ([1, 2], [0, 0, 13, 14])).saves
    assert [(item.group, item.chunk, item.block_ids) for item in order.items] == [
        (0, 0, (1, 2)),
        (1, 0, (11, 12, 13, 14)),
    ]
    assert engine.pool.held == {1, 2, 11, 12, 13, 14}
    engine.side.worker_news(Report({order.job_id: 1}), set(), set())
    assert engine.pool.held == set()


def test_they_are_given_back_when_the_request_ends() -> None:
    engine, request = generating()
    engine.side.finished(request, ([1, 2], [0, 0, 13, 14]))
    assert engine.pool.held == set()


def test_they_are_given_back_on_preemption() -> None:
    engine, request = generating()
    engine.step(preempted=["r"])
    assert engine.pool.held == set()
    assert request.num_computed_tokens < CHUNK


def test_a_chunk_that_lacks_a_block_is_not_stored_and_its_pins_go_back() -> None:
    engine, request = generating()
    request.all_token_ids.append(9)
    (order,) = engine.compute(request, 1, ([1, 2], [0, 0, 0, 14])).saves
    assert [item.group for item in order.items] == [0]
    assert engine.pool.held == {1, 2}
