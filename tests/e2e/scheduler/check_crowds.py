"""Many requests that share prefixes, in a pool too small for them, aborted and failing at random: no wrong byte, no leak."""

import random
from dataclasses import replace

import pytest

from tests.e2e.harness import prompt
from tests.e2e.processes import Daemon, until
from tests.e2e.scheduler.check_holds import assert_daemon_holds_nothing, status
from tests.e2e.scheduler.conftest import StartEngine
from tests.e2e.scheduler.geometry import Geometry, kimi, kimi_linear, windowed

STEPS = 400
GEOMETRIES = [
    kimi_linear(8),
    replace(kimi("staged", states=3, latents=1, heads=32, tensor=4), pipeline=2),
    windowed(100),
    windowed(600),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
@pytest.mark.parametrize("overlapped", [False, True], ids=["", "overlapped"])
def test_a_crowd_reads_only_what_was_computed(
    start_engine: StartEngine, daemon: Daemon, geometry: Geometry, *, overlapped: bool
) -> None:
    source, chunk = random.Random(geometry.name), geometry.chunk_tokens
    units = chunk // min(geometry.block_tokens, chunk)
    engine = start_engine(
        geometry,
        blocks=34 * units,
        model_tokens=6 * chunk,
        max_num_batched_tokens=geometry.block_tokens * 3 // 2,
        async_scheduling=overlapped,
    )
    engine.settle()
    texts = [prompt(1300 + number + 10 * overlapped, 6 * chunk) for number in range(3)]
    alive: list[str] = []
    for step in range(STEPS):
        if len(alive) < 6 and source.random() < 0.15:
            shared = source.choice(texts)[: source.randrange(4 * chunk)]
            length = min(5 * chunk, len(shared) + source.randrange(1, chunk))
            alive.append(f"r{step}")
            engine.add(
                alive[-1], prompt(step, length, after=shared[:length]), max_tokens=source.randrange(1, 40)
            )
        if alive and source.random() < 0.03:
            engine.abort(alive.pop(source.randrange(len(alive))))
        if source.random() < 0.02:
            worker = source.choice(engine.ranks).connector._worker
            assert worker is not None
            worker._client._fail_loads = 1
        rank = source.choice(engine.ranks)
        rank.silent = source.random() < 0.3
        engine.step()
        rank.silent = False
        alive = [name for name in alive if name in engine.scheduler.requests]
    engine.run()
    assert engine.hits, "nothing was loaded: nothing was shown"
    engine.assert_nothing_held()
    assert_daemon_holds_nothing(daemon)
    until(lambda: status(daemon).l1.leased_bytes == 0, 20, "the end of every hold")
