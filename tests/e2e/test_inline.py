"""Real vLLM without shared memory: what one engine stores inline another loads, inline or mapped, with the same logprobs."""

from pathlib import Path

from tests.e2e.families import FAMILIES
from tests.e2e.harness import Batch, Job, assert_same_answers, chunks_below, run_engine
from tests.e2e.processes import Daemon

FAMILY = FAMILIES["qwen3_next"]


def test_a_prompt_stored_inline_is_loaded_inline_and_mapped(
    checkpoints: Path, daemon: Daemon, tmp_path: Path
) -> None:
    model = checkpoints / FAMILY.name
    whole = chunks_below(FAMILY.prompt_tokens, FAMILY.chunk_tokens)
    inline = daemon.connector(transport="inline")
    unmounted = daemon.connector(arena_dir=str(tmp_path / "not mounted"))

    storing = run_engine(
        tmp_path, Job(model, [Batch([FAMILY.first]), Batch([FAMILY.first], reset_local_cache=True)], inline)
    )
    computed, loaded = storing.batches
    assert [computed.external_hit_tokens, loaded.external_hit_tokens] == [0, whole]
    assert_same_answers(loaded.answers, computed.answers)
    sent = daemon.status()["inline"]
    assert sent["bytes_in"] == daemon.status()["counters"]["bytes_stored"] > 0
    assert sent["bytes_out"] == daemon.status()["counters"]["bytes_loaded"] > 0
    assert sent["refusals"] == 0

    for connector in (unmounted, daemon.connector()):
        again = run_engine(tmp_path, Job(model, [Batch([FAMILY.first])], connector)).batches[0]
        assert again.external_hit_tokens == whole
        assert_same_answers(again.answers, computed.answers)
    status = daemon.status()
    assert status["inline"]["bytes_out"] == 2 * sent["bytes_out"], "the third engine mapped the arena"
    assert status["counters"]["bytes_loaded"] == 3 * sent["bytes_out"]
    assert status["leases_total"] == 0
    assert set(status["lease_end_causes"]) == {"released"}
