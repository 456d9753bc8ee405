"""Sliding windows: the last window of a prompt is stored and loaded, and never a chunk that the window has left."""

import pytest

from appliance.geometry import GroupKind
from tests.e2e.harness import prompt
from tests.e2e.scheduler.conftest import StartEngine
from tests.e2e.scheduler.engine import Engine
from tests.e2e.scheduler.geometry import windowed

CHUNK = 256
CHUNKS = 8
WINDOWS = [100, 257, 300, 600, 1024]
"""In tokens: within a chunk, just a chunk, and over two, three and four of them."""


def window_chunks(engine: Engine, name: str) -> set[int]:
    """The chunks whose window pages a request handed to saves."""
    (sliding,) = [group.index for group in engine.groups if group.kind is GroupKind.SLIDING]
    return {chunk for group, chunk in engine.saved.get(name, ()) if group == sliding}


@pytest.mark.parametrize("budget", [192, 320, 4096])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_long_prompt_is_hit_at_its_end(start_engine: StartEngine, window: int, budget: int) -> None:
    engine = start_engine(windowed(window), max_num_batched_tokens=budget, model_tokens=16_384)
    text = prompt(800 + window + budget, CHUNKS * CHUNK + 30)
    engine.add("first", text)
    engine.run()
    needed = -(-(window - 1) // CHUNK)
    assert set(range(CHUNKS - needed, CHUNKS)) <= window_chunks(engine, "first")
    engine.forget_local_cache()
    engine.add("again", text)
    engine.add("longer", prompt(9, (CHUNKS + 3) * CHUNK, after=text))
    engine.run()
    assert engine.hits == {"again": CHUNKS * CHUNK, "longer": CHUNKS * CHUNK}
    engine.assert_nothing_held()
    # What was loaded can be continued from, with the window reaching back into loaded chunks.
    engine.forget_local_cache()
    engine.add(
        "continued", prompt(10, (CHUNKS + 4) * CHUNK, after=prompt(9, (CHUNKS + 3) * CHUNK, after=text))
    )
    engine.run()
    assert engine.hits["continued"] == (CHUNKS + 3) * CHUNK
    engine.assert_nothing_held()


@pytest.mark.parametrize("window", WINDOWS)
def test_a_hit_that_extends_a_local_one_has_its_whole_window(start_engine: StartEngine, window: int) -> None:
    """The checks of every step compare the pages that the window reads: see `Engine`."""
    engine = start_engine(windowed(window), model_tokens=16_384)
    text = prompt(900 + window, CHUNKS * CHUNK + 30)
    engine.add("first", text)
    engine.run()
    for local_tokens in (64, 300, 2 * CHUNK, 7 * CHUNK + 70):
        engine.forget_local_cache()
        engine.hits.clear()
        engine.add(f"local-{local_tokens}", text[:local_tokens], max_tokens=1)
        engine.run()
        engine.add(f"again-{local_tokens}", text)
        engine.run()
        assert engine.hits.get(f"again-{local_tokens}") == CHUNKS * CHUNK
        engine.assert_nothing_held()


@pytest.mark.parametrize("window", WINDOWS)
def test_generated_text_is_hit_at_its_end(start_engine: StartEngine, window: int) -> None:
    """A window shorter than a chunk has left its beginning long before the last token of it is there."""
    engine = start_engine(windowed(window), model_tokens=16_384)
    request = engine.add("first", prompt(1000 + window, 2 * CHUNK + 30), max_tokens=2 * CHUNK)
    engine.run()
    engine.forget_local_cache()
    engine.add("next-turn", [*request.all_token_ids, *prompt(11, 20)])
    engine.run()
    assert engine.hits == {"next-turn": 4 * CHUNK}
    engine.assert_nothing_held()


def test_what_a_window_has_left_is_given_back_on_abort_and_preemption(start_engine: StartEngine) -> None:
    engine = start_engine(windowed(100), blocks=120, model_tokens=1024)
    engine.settle()
    for number in range(5):
        engine.add(f"r{number}", prompt(1100 + number, CHUNK - 20), max_tokens=3 * CHUNK)
    kept = [engine.step() or all(t.left_blocks for t in engine._side._requests.values()) for _ in range(210)]
    assert kept[-1], "nothing was kept: nothing was shown"
    engine.abort("r0")
    scheduler = engine.scheduler
    scheduler._preempt_request(scheduler.running.pop(), timestamp=0.0)
    engine.step()
    assert engine.preempted == ["r4"]
    assert not engine._side._requests["r4"].left_blocks
    for number in range(1, 5):
        engine.abort(f"r{number}")
    engine.run()
    engine.assert_nothing_held()
