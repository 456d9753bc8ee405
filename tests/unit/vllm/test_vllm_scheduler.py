"""The scheduler's half: a lease is released on every path, and a pin is given back on every path."""

import pytest
from vllm_stand_ins import CHUNK, RECURRENT, Client, Engine, Request

from connector.client import ClientState
from connector.vllm.options import ConnectorOptions
from connector.vllm.orders import Report
from connector.vllm.scheduler import MAX_FAILED_LOADS

TABLES = ([1, 2, 3, 4, 5], [0, 0, 0, 9, 10])


def hit(engine: Engine, request: Request, chunks: int = 2, lease: int = 7, local_tokens: int = 0) -> int:
    """Ask and be told of a hit; the tokens that vLLM was promised."""
    assert engine.ask(request, local_tokens) == (None, False)
    engine.answer(hit_chunks=chunks, attention_chunks=chunks, lease=lease)
    tokens, asynchronous = engine.ask(request, local_tokens)
    assert tokens is not None
    assert asynchronous
    return tokens


def test_a_hit_is_loaded_and_its_lease_released_when_all_ranks_have_reported() -> None:
    engine, request = Engine(), Request("r", range(20))
    assert hit(engine, request) == 2 * CHUNK
    engine.allocate(request, TABLES, 2 * CHUNK)
    (job,) = engine.step().loads
    assert (job.request_id, job.lease, job.hit_chunks, len(job.keys)) == ("r", 7, 2, 2)
    assert [(item.group, item.chunk, item.block_ids) for item in job.items] == [
        (0, 0, (1, 2)),
        (0, 1, (3, 4)),
        (1, 1, (9,)),
    ]
    engine.allocate(request, TABLES, 0)  # vLLM calls again once the load has ended
    assert engine.client.released == []
    engine.side.worker_news(None, {"r"}, set())
    assert engine.client.released == [7]
    assert engine.step().loads == ()


def test_a_prompt_never_hits_whole() -> None:
    engine, request = Engine(), Request("r", range(2 * CHUNK))
    engine.ask(request)
    assert len(engine.client.lookups[0].asked["keys"]) == 1


@pytest.mark.parametrize("local_tokens", [16, 20])
def test_a_hit_no_deeper_than_the_local_one_is_not_loaded(local_tokens: int) -> None:
    engine, request = Engine(), Request("r", range(30))
    engine.ask(request, local_tokens)
    engine.answer(hit_chunks=2, attention_chunks=2, lease=7)
    assert engine.ask(request, local_tokens) == (0, False)
    assert engine.client.released == [7]


def test_a_discarded_hit_gives_its_lease_back() -> None:
    engine, request = Engine(), Request("r", range(20))
    hit(engine, request)
    engine.allocate(request, TABLES, 0)
    assert engine.client.released == [7]
    assert engine.step().loads == ()


def test_vllm_may_ask_again_before_it_finds_blocks() -> None:
    engine, request = Engine(), Request("r", range(20))
    hit(engine, request)
    assert engine.ask(request, 4) == (12, True)
    assert len(engine.client.lookups) == 1


def test_a_request_that_ends_while_the_daemon_is_asked_cancels_the_lookup() -> None:
    engine, request = Engine(), Request("r", range(20))
    engine.ask(request)
    engine.side.finished(request, TABLES)
    assert engine.client.lookups[0].cancelled


def test_a_request_that_ends_with_an_answer_gives_its_lease_back() -> None:
    engine, request = Engine(), Request("r", range(20))
    hit(engine, request)
    engine.side.finished(request, TABLES)
    assert engine.client.released == [7]


def test_a_request_that_ends_while_it_loads_keeps_its_lease_until_the_report() -> None:
    engine, request = Engine(), Request("r", range(20))
    engine.allocate(request, TABLES, hit(engine, request))
    engine.step()
    engine.side.finished(request, TABLES)
    assert engine.client.released == []
    engine.side.worker_news(None, {"r"}, set())
    assert engine.client.released == [7]


def test_failed_chunks_are_not_offered_again() -> None:
    engine, request = Engine(world_size=2), Request("r", range(20))
    engine.allocate(request, TABLES, hit(engine, request))
    engine.step()
    engine.side.worker_news(Report(failed_chunks={"r": frozenset({1})}), set(), set())
    engine.side.worker_news(None, {"r"}, {"r"})
    assert engine.client.released == [7]
    engine.ask(request)
    assert engine.client.lookups[-1].asked["refused_chunks"] == [1]


def test_a_load_that_failed_as_a_whole_gives_up_its_deepest_boundary() -> None:
    engine, request = Engine(), Request("r", range(20))
    engine.allocate(request, TABLES, hit(engine, request))
    engine.step()
    engine.side.worker_news(Report(failed_chunks={"r": frozenset()}), {"r"}, {"r"})
    engine.ask(request)
    assert engine.client.lookups[-1].asked["refused_chunks"] == [1]


def test_a_request_whose_loads_keep_failing_is_computed() -> None:
    engine, request = Engine(), Request("r", range(80))
    tables = (list(range(1, 21)), list(range(21, 41)))
    for failure in range(MAX_FAILED_LOADS):
        chunks = MAX_FAILED_LOADS + 1 - failure
        engine.allocate(request, tables, hit(engine, request, chunks=chunks))
        engine.step()
        engine.side.worker_news(None, {"r"}, {"r"})
    assert engine.ask(request) == (0, False)
    assert len(engine.client.lookups) == MAX_FAILED_LOADS


def test_a_table_without_a_state_block_fails_the_load_on_every_rank() -> None:
    engine, request = Engine(), Request("r", range(20))
    engine.allocate(request, ([1, 2, 3, 4], [0, 0, 0, 0]), hit(engine, request))
    orders = engine.step()
    assert orders.loads == ()
    assert orders.broken_loads == ("r",)


def test_a_preempted_request_asks_again() -> None:
    engine, request = Engine(), Request("r", range(20))
    engine.admit(request, TABLES)
    engine.step(preempted=["r"])
    assert engine.ask(request) == (None, False)
    assert len(engine.client.lookups) == 2


def test_a_request_started_over_without_a_step_asks_again() -> None:
    engine, request = Engine(), Request("r", range(20))
    engine.admit(request, TABLES)
    assert engine.ask(request) == (None, False)


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_requests_wait_for_the_registration_but_not_for_ever() -> None:
    clock = Clock()
    options = ConnectorOptions(settle_timeout_seconds=3)
    engine = Engine(options=options, clock=clock, client=Client(chunk_tokens=None))
    request = Request("r", range(20))
    assert engine.ask(request) == (None, False)
    clock.now = 2.9
    assert engine.ask(request) == (None, False)
    clock.now = 3.0
    assert engine.ask(request) == (0, False)


def test_a_refused_engine_does_not_wait() -> None:
    engine = Engine(client=Client(chunk_tokens=None, state=ClientState.REFUSED))
    assert engine.ask(Request("r", range(20))) == (0, False)


def test_chunks_are_saved_as_they_fill_and_pinned_until_every_rank_reports() -> None:
    engine, request = Engine(world_size=2), Request("r", range(20))
    engine.admit(request, TABLES)
    (order,) = engine.compute(request, 10, TABLES).saves
    assert [(item.group, item.chunk, item.block_ids) for item in order.items] == [(0, 0, (1, 2))]
    assert engine.pool.held == {1, 2}
    assert engine.side.saves_pending
    engine.side.worker_news(Report({order.job_id: 1}), set(), set())
    assert engine.pool.held == {1, 2}
    engine.side.worker_news(Report({order.job_id: 1}), set(), set())
    assert engine.pool.held == set()
    assert not engine.side.saves_pending


def test_a_key_chain_is_the_same_for_save_and_lookup() -> None:
    engine, first, second = Engine(), Request("a", range(20)), Request("b", range(20))
    engine.admit(first, TABLES)
    saved = [item.key for order in engine.compute(first, 20, TABLES).saves for item in order.items]
    engine.ask(second)
    assert engine.client.lookups[-1].asked["keys"] == saved


def test_states_are_saved_at_wanted_boundaries_only() -> None:
    engine, request = Engine(), Request("r", range(30))
    engine.ask(request)
    engine.answer(hit_chunks=0, attention_chunks=2, snapshots=[2])
    assert engine.ask(request) == (0, False)
    assert request.shared_prefix_boundary == 2 * CHUNK
    table = (list(range(1, 9)), list(range(11, 19)))
    engine.allocate(request, table, 0)
    offers = {"r": [(1, 12, CHUNK), (1, 14, 2 * CHUNK), (1, 16, 3 * CHUNK), (1, 17, 28)]}
    (order,) = engine.compute(request, 30, table, offers=offers).saves
    states = [(item.chunk, item.block_ids) for item in order.items if item.group == RECURRENT.index]
    assert states == [(1, (14,)), (2, (16,))]
    # The daemon has the attention of the first two chunks.
    assert [item.chunk for item in order.items if item.group == 0] == [2]


def test_a_null_block_is_never_saved_as_a_state() -> None:
    engine, request = Engine(), Request("r", range(20))
    engine.admit(request, TABLES)
    orders = engine.compute(request, 20, TABLES, offers={"r": [(1, 0, 2 * CHUNK)]})
    assert {item.group for order in orders.saves for item in order.items} == {0}


@pytest.mark.parametrize(
    ("holders", "block_hash", "tokens", "saved"),
    [
        (0, "kept", 2 * CHUNK, True),
        (1, "kept", 2 * CHUNK, False),
        (0, None, None, False),
        (0, "another", CHUNK, False),
    ],
)
def test_an_offered_block_that_the_request_has_lost_is_saved_only_while_vllm_keeps_it(
    holders: int, block_hash: str | None, tokens: int | None, saved: bool
) -> None:
    engine, request = Engine(), Request("r", range(20))
    engine.admit(request, TABLES)
    block = engine.pool.blocks[30]
    block.ref_cnt, block.block_hash, block.block_hash_num_tokens = holders, block_hash, tokens
    (order,) = engine.compute(request, 20, TABLES, offers={"r": [(1, 30, 2 * CHUNK)]}).saves
    assert [item.block_ids for item in order.items if item.group == RECURRENT.index] == [(30,)] * saved


def test_of_generated_states_the_last_is_saved_when_the_request_ends() -> None:
    engine, request = Engine(), Request("r", range(7))
    table = (list(range(1, 9)), list(range(11, 19)))
    engine.admit(request, table)
    engine.compute(request, 7, table)
    saved = []
    for token in range(18):
        request.all_token_ids.append(token)
        boundary = request.num_computed_tokens + 1
        offers = {"r": [(1, 10 + boundary // 4, boundary)]} if boundary % CHUNK == 0 else {}
        saved += engine.compute(request, 1, table, offers=offers).saves
    states = [item for order in saved for item in order.items if item.group == RECURRENT.index]
    assert states == []
    engine.side.finished(request, table)
    (last,) = engine.step().saves
    assert [(item.group, item.chunk, item.block_ids) for item in last.items] == [(1, 2, (16,))]
    for order in [*saved, last]:
        engine.side.worker_news(Report({order.job_id: 1}), set(), set())
    assert engine.pool.held == set()


def test_generated_text_is_not_stored_where_the_operator_says_so() -> None:
    engine, request = Engine(options=ConnectorOptions(store_generated=False)), Request("r", range(7))
    table = (list(range(1, 9)), list(range(11, 19)))
    engine.admit(request, table)
    engine.compute(request, 7, table)
    request.all_token_ids += range(10)
    orders = engine.compute(request, 10, table, offers={"r": [(1, 12, CHUNK)]})
    engine.side.finished(request, table)
    assert orders.saves == engine.step().saves == ()
    assert engine.pool.held == set()


def test_held_states_are_given_back_on_preemption() -> None:
    engine, request = Engine(), Request("r", range(7))
    table = (list(range(1, 9)), list(range(11, 19)))
    engine.admit(request, table)
    request.all_token_ids += range(3)
    orders = engine.compute(request, 9, table, offers={"r": [(1, 12, CHUNK)]})
    assert 12 in engine.pool.held
    engine.step(preempted=["r"])
    for order in orders.saves:
        engine.side.worker_news(Report({order.job_id: 1}), set(), set())
    assert engine.pool.held == set()


def test_a_pool_with_too_many_pins_defers_the_save() -> None:
    engine = Engine()
    engine.pool = type(engine.pool)(12)
    engine.side.bind_block_pool(engine.pool)
    request = Request("r", range(20))
    engine.admit(request, TABLES)
    (order,) = engine.compute(request, 20, TABLES).saves
    assert [item.chunk for item in order.items] == [0]
    engine.side.worker_news(Report({order.job_id: 1}), set(), set())
    request.all_token_ids.append(0)
    (later,) = engine.compute(request, 1, TABLES).saves
    assert [item.chunk for item in later.items] == [1]


def test_a_daemon_that_comes_back_with_other_chunks_gets_everything_anew() -> None:
    engine, request = Engine(), Request("r", range(40))
    table = (list(range(1, 11)), list(range(11, 21)))
    engine.admit(request, table)
    engine.compute(request, 20, table)
    engine.client.chunk_tokens = 2 * CHUNK
    (order,) = engine.compute(request, 20, table).saves
    assert [(item.chunk, item.block_ids) for item in order.items] == [(0, (1, 2, 3, 4)), (1, (5, 6, 7, 8))]


def test_after_a_reset_nothing_is_shared() -> None:
    engine = Engine()
    engine.ask(Request("a", range(20)))
    engine.side.forget_stored()
    engine.ask(Request("b", range(20)))
    before, after = (set(lookup.asked["keys"]) for lookup in engine.client.lookups)
    assert not before & after


def test_salts_separate_and_equal_salts_share() -> None:
    engine = Engine()
    keys = []
    for number, salt in enumerate([None, "tenant", "tenant", "other"]):
        request = Request(str(number), range(20))
        request.cache_salt = salt
        engine.ask(request)
        keys.append(tuple(engine.client.lookups[-1].asked["keys"]))
    assert keys[1] == keys[2]
    assert len({keys[0], keys[1], keys[3]}) == 3


def test_a_request_that_cannot_be_named_is_neither_looked_up_nor_stored() -> None:
    engine, request = Engine(), Request("r", range(20))
    request.prompt_embeds = object()  # type: ignore[assignment]
    assert engine.ask(request) == (0, False)
    engine.allocate(request, TABLES, 0)
    assert engine.compute(request, 20, TABLES).saves == ()
    engine.side.finished(request, TABLES)
    assert engine.client.lookups == []


def test_an_unexpected_call_costs_caching_and_not_the_engine() -> None:
    engine, request = Engine(), Request("r", range(20))
    engine.allocate(request, TABLES, hit(engine, request))
    engine.side.finished(request, TABLES)
    engine.side.finished(request, TABLES)
    assert engine.side.counters.unexpected_events == 1
    engine.side.worker_news(None, {"r"}, set())
    assert engine.client.released == [7]


def test_stop_releases_what_is_held() -> None:
    engine, request = Engine(), Request("r", range(20))
    hit(engine, request)
    engine.side.stop()
    assert engine.client.released == [7]
    assert engine.client.stopped
