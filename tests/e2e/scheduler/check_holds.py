"""Leases, pins and blocks come back on every path, and no path computes on wrong bytes."""

import pytest

from appliance.protocol.client import RequestClient, endpoint_of
from appliance.protocol.status import DaemonStatus
from connector.client import SaveResult
from connector.vllm.requests import Phase
from tests.e2e.harness import prompt
from tests.e2e.processes import Daemon, until
from tests.e2e.scheduler.conftest import StartEngine
from tests.e2e.scheduler.engine import Engine
from tests.e2e.scheduler.geometry import kimi_k3, kimi_linear

SMALL = kimi_linear(8)
CHUNK = SMALL.chunk_tokens


def status(daemon: Daemon) -> DaemonStatus:
    with RequestClient(
        endpoint_of("127.0.0.1", daemon.port), client_name="checks", timeout_seconds=10
    ) as client:
        return client.call("status", {}, DaemonStatus)


def assert_daemon_holds_nothing(daemon: Daemon) -> None:
    """Releases travel behind the engine's back, so they are awaited."""

    def clean() -> bool:
        now = status(daemon)
        return now.leases_total == 0 and now.l1.reserved_bytes == 0

    until(clean, 20, "the end of every lease and reservation")


def stored(engine: Engine, seed: int, chunks: int = 3) -> list[int]:
    """A prompt of whole chunks that the daemon holds and vLLM has forgotten."""
    text = prompt(seed, chunks * CHUNK)
    engine.add(f"stored-{seed}", text)
    engine.run()
    engine.forget_local_cache()
    return text


@pytest.mark.parametrize("overlapped", [False, True], ids=["", "overlapped"])
def test_an_abort_at_any_step_leaves_nothing_behind(
    start_engine: StartEngine, daemon: Daemon, *, overlapped: bool
) -> None:
    engine = start_engine(SMALL, max_num_batched_tokens=CHUNK, async_scheduling=overlapped)
    text = stored(engine, 100 + 50 * overlapped)
    seen = set()
    for steps in range(14):
        name = f"aborted-{steps}"
        engine.add(name, prompt(200 + steps, 5 * CHUNK - 3, after=text), max_tokens=8)
        for _ in range(steps):
            engine.step()
        seen.add(engine.phase_of(name))
        engine.abort(name)
        engine.run()
        engine.assert_nothing_held()
        engine.forget_local_cache()
    # Before its answer or its load ended (which of them it was is a matter of time), while computing, after its end.
    assert {None, Phase.COMPUTING} <= seen
    assert seen & {Phase.LOOKING, Phase.ANSWERED, Phase.LOADING}
    assert_daemon_holds_nothing(daemon)


def test_an_abort_during_a_load_keeps_the_blocks_until_every_rank_has_reported(
    start_engine: StartEngine, daemon: Daemon
) -> None:
    engine = start_engine(SMALL)
    text = stored(engine, 101)
    engine.add("r", prompt(1, 4 * CHUNK, after=text))
    slow = engine.ranks[5]
    slow.silent = True
    while engine.phase_of("r") is not Phase.LOADING:
        engine.step()
    for _ in range(5):
        engine.step()
    engine.abort("r")
    engine.step()
    assert engine.phase_of("r") is Phase.ABANDONED
    assert status(daemon).leases_total == 1
    assert not engine.scheduler.reset_prefix_cache(), "blocks that a rank still writes were given away"
    slow.silent = False
    engine.run()
    engine.assert_nothing_held()
    assert_daemon_holds_nothing(daemon)


def test_requests_that_wait_for_blocks_keep_their_leases_and_an_abort_releases_them(
    start_engine: StartEngine, daemon: Daemon
) -> None:
    engine = start_engine(SMALL, blocks=38, model_tokens=8 * CHUNK)
    text = stored(engine, 102)
    hogs = ["hog-1", "hog-2", "hog-3"]
    for number, hog in enumerate(hogs):
        engine.add(hog, prompt(400 + number, 7 * CHUNK), max_tokens=CHUNK - 1)
    while any(engine.phase_of(hog) is not Phase.COMPUTING for hog in hogs):
        engine.step()
    for name in ("first", "second"):
        engine.add(name, [*text, 1])
    while engine.phase_of("first") is not Phase.ANSWERED:
        engine.step()
    # vLLM looks no further than the first request that finds no blocks, and does not ask for the second any more.
    until(lambda: status(daemon).leases_total == 2, 20, "the second lease")
    engine.step()
    assert engine.phase_of("first") is engine.phase_of("second") is Phase.ANSWERED
    assert len(engine._side._client._held) == 2
    causes = status(daemon).lease_end_causes
    engine.abort("second")
    until(lambda: status(daemon).leases_total == 1, 20, "the end of the second lease")
    engine.abort("first")
    assert_daemon_holds_nothing(daemon)
    # The daemon ends a lease that nobody names, but only later: these were given back.
    released = {**causes, "released": causes.get("released", 0) + 2}
    assert status(daemon).lease_end_causes == released
    assert all(engine.phase_of(hog) is Phase.COMPUTING for hog in hogs)
    engine.run()
    engine.assert_nothing_held()


def test_a_hit_that_the_scheduler_discards_gives_its_lease_back(
    start_engine: StartEngine, daemon: Daemon
) -> None:
    engine = start_engine(SMALL)
    text = stored(engine, 103)
    # vLLM's own reason to discard a hit: it is no longer than what would be computed again anyway.
    engine.scheduler.prefix_replay_tokens = 4 * CHUNK
    engine.add("r", [*text, 1], max_tokens=50)
    while engine.phase_of("r") is not Phase.COMPUTING:
        engine.step()
    assert engine.hits == {}
    assert engine._side._client._held == set()
    assert_daemon_holds_nothing(daemon)
    engine.run()
    engine.assert_nothing_held()


@pytest.mark.parametrize(("extra_tokens", "hit_chunks"), [(0, 2), (1, 3)])
def test_a_hit_leaves_a_token_to_compute(
    start_engine: StartEngine, extra_tokens: int, hit_chunks: int
) -> None:
    engine = start_engine(SMALL)
    text = stored(engine, 104 + extra_tokens)
    assert engine.states_of(f"stored-{104 + extra_tokens}") == {2 * CHUNK, 3 * CHUNK}
    engine.add("again", [*text, 7][: 3 * CHUNK + extra_tokens])
    engine.run()
    assert engine.hits == {"again": hit_chunks * CHUNK}
    engine.assert_nothing_held()


def test_preempted_requests_resume_and_leave_nothing_behind(
    start_engine: StartEngine, daemon: Daemon
) -> None:
    engine = start_engine(SMALL, blocks=26, model_tokens=5 * CHUNK)
    text = stored(engine, 106, chunks=1)
    for number in range(4):
        engine.add(f"r{number}", prompt(300 + number, 2 * CHUNK - 4, after=text), max_tokens=CHUNK)
    engine.run()
    assert engine.preempted, "the pool was large enough for all: nothing was shown"
    engine.assert_nothing_held()
    assert_daemon_holds_nothing(daemon)


def test_a_load_that_one_rank_fails_is_computed_by_all(start_engine: StartEngine, daemon: Daemon) -> None:
    engine = start_engine(kimi_k3(), max_num_batched_tokens=4096)
    chunk = engine.geometry.chunk_tokens
    text = prompt(107, 3 * chunk)
    engine.add("stored", text)
    engine.run()
    engine.forget_local_cache()
    worker = engine.ranks[6].connector._worker
    assert worker is not None
    worker._client._fail_loads = 1
    engine.add("r", [*text, 1])
    engine.run()
    assert engine._side.counters.loads_failed == 1
    assert engine.hits == {"r": 3 * chunk}
    engine.assert_nothing_held()
    assert_daemon_holds_nothing(daemon)


def test_what_one_rank_did_not_store_is_no_hit(start_engine: StartEngine, daemon: Daemon) -> None:
    engine = start_engine(SMALL)
    engine.settle()
    worker = engine.ranks[3].connector._worker
    assert worker is not None
    client, save = worker._client, worker._client.save
    client.save = lambda job: client._saves_done.append(SaveResult(job.job_id, 0, 0, len(job.items), 0))
    before = status(daemon).miss_reasons.get("rank_missing", 0)
    text = stored(engine, 108)
    client.save = save
    engine.add("again", [*text, 1])
    engine.run()
    assert engine.hits == {}
    assert status(daemon).miss_reasons["rank_missing"] == before + 1
    # The other shards are there: the one that was missing completes the set.
    engine.forget_local_cache()
    engine.add("third", [*text, 2])
    engine.run()
    assert engine.hits == {"third": 3 * CHUNK}
    engine.assert_nothing_held()
