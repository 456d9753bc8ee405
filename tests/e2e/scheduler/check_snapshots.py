"""Snapshots land on the boundaries that were asked for, and hits are offered at them."""

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.e2e.harness import prompt
from tests.e2e.scheduler.conftest import StartEngine
from tests.e2e.scheduler.geometry import Geometry, kimi_k3, kimi_linear

GEOMETRIES = [kimi_linear(1), kimi_linear(2), kimi_linear(8), kimi_k3(), kimi_k3(decode_context=8)]


def test_the_geometries_are_those_of_the_published_models() -> None:
    blocks = {geometry.name: geometry.block_tokens for geometry in GEOMETRIES}
    assert list(blocks.values()) == [1920, 1024, 256, 768, 1536], blocks


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
@pytest.mark.parametrize("share", [0.6, 1.5, 4.0], ids=["below-N", "N-to-2N", "above-2N"])
@pytest.mark.parametrize("overlapped", [False, True], ids=["", "overlapped"])
def test_a_wished_and_the_last_boundary_are_stored_and_hit(
    start_engine: StartEngine, geometry: Geometry, share: float, *, overlapped: bool
) -> None:
    chunk, seed = geometry.chunk_tokens, int(share * 10) + 5000 * overlapped
    engine = start_engine(
        geometry, max_num_batched_tokens=int(geometry.block_tokens * share), async_scheduling=overlapped
    )
    assert type(engine.scheduler) is (AsyncScheduler if overlapped else Scheduler)
    assert engine._side._client.chunk_tokens in (None, chunk)
    first = prompt(seed, 4 * chunk + 70)
    second, third = (prompt(seed + other, 4 * chunk + 70, after=first[: 2 * chunk + 5]) for other in (1, 2))

    engine.add("first", first)
    engine.run()
    assert engine._side._client.chunk_tokens == chunk
    assert engine.hits == {}
    assert engine.states_of("first") == {4 * chunk}

    # Only attention reaches the boundary after two chunks: nothing can be hit, and a snapshot is wished there.
    engine.forget_local_cache()
    engine.add("second", second)
    engine.run()
    assert engine.hits == {}
    assert engine.states_of("second") == {2 * chunk, 4 * chunk}

    engine.forget_local_cache()
    engine.add("third", third)
    engine.add("again", first)
    engine.run()
    assert engine.hits == {"third": 2 * chunk, "again": 4 * chunk}
    assert engine.states_of("third") == {4 * chunk}
    engine.assert_nothing_held()


def test_context_ranks_are_offered_no_common_boundary_unless_it_is_asked_for(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States every 1536 tokens, latents every 12288: what vLLM keeps by itself is the last 1536."""
    monkeypatch.setattr("connector.vllm.scheduler.aim", lambda *_, **__: None)
    geometry = kimi_k3(decode_context=8)
    engine = start_engine(geometry, max_num_batched_tokens=4 * geometry.block_tokens)
    engine.add("r", prompt(50, 3 * geometry.chunk_tokens + 4 * geometry.block_tokens + 70))
    engine.run()
    assert engine.states_of("r") == set()
    engine.assert_nothing_held()
