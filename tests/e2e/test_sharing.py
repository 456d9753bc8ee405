"""Engines that share one daemon: at once on the same prompts, and with fingerprints that must not share."""

from pathlib import Path

from tests.e2e.families import FAMILIES
from tests.e2e.harness import Batch, Engine, Job, assert_same_answers, chunks_below, prompt, run_engine
from tests.e2e.processes import Daemon, until

FAMILY = FAMILIES["qwen3_next"]
PROMPTS = 4


def test_two_engines_at_once_store_each_object_once(
    checkpoints: Path, daemon: Daemon, tmp_path: Path
) -> None:
    prompts = [prompt(100 + number, FAMILY.prompt_tokens) for number in range(PROMPTS)]
    model = checkpoints / FAMILY.name
    begin = tmp_path / "begin"
    engines = []
    for number in range(2):
        ready = tmp_path / f"ready-{number}"
        together = Batch(prompts, announce_file=str(ready), await_file=str(begin))
        again = Batch(prompts, reset_local_cache=True)
        engines.append((Engine(tmp_path, Job(model, [together, again], daemon.connector())), ready))
    before = daemon.status()["counters"].get("objects_stored", 0)
    try:
        for engine, _ in engines:
            engine.start()
        for engine, ready in engines:
            until(lambda: ready.exists() or not engine.running, 180, f"start of {engine.name}")  # noqa: B023
        begin.touch()
        results = [engine.result() for engine, _ in engines]
    finally:
        for engine, _ in engines:
            engine.stop()

    expected = run_engine(tmp_path, Job(model, [Batch(prompts), Batch(prompts)])).batches
    for result in results:
        assert_same_answers(result.batches[0].answers, expected[0].answers)
        assert_same_answers(result.batches[1].answers, expected[1].answers)
        whole = chunks_below(FAMILY.prompt_tokens, FAMILY.chunk_tokens)
        assert result.batches[1].external_hit_tokens == PROMPTS * whole

    status = daemon.status()
    chunks = FAMILY.prompt_tokens // FAMILY.chunk_tokens
    each_prompt = (
        chunks + FAMILY.recurrent_groups
    )  # attention of every chunk, the states of the last boundary
    assert status["counters"]["objects_stored"] - before == PROMPTS * each_prompt
    assert sum(group["objects"] for group in status["groups"]) == status["l1"]["objects"]


def test_another_state_dtype_shares_nothing_and_says_why(
    checkpoints: Path, daemon: Daemon, tmp_path: Path
) -> None:
    model = checkpoints / FAMILY.name
    seen = tmp_path / "seen"
    stay = Batch([FAMILY.second], announce_file=str(seen), await_file=str(tmp_path / "leave"))
    run_engine(tmp_path, Job(model, [Batch([FAMILY.first])], daemon.connector()))
    other = Engine(
        tmp_path,
        Job(
            model,
            [Batch([FAMILY.first]), stay],
            daemon.connector(),
            llm={"mamba_ssm_cache_dtype": "bfloat16"},
        ),
    )
    try:
        other.start()
        until(lambda: seen.exists() or not other.running, 180, "the other engine's first batch")
        status = daemon.status()
        (tmp_path / "leave").touch()
        result = other.result()
    finally:
        other.stop()
    assert set(result.block_sizes) == {384}
    assert [batch.external_hit_tokens for batch in result.batches] == [0, 0]
    mine = {engine["engine_id"]: engine for engine in status["engines"]}
    refusals = [refusal for refusal in status["refusals"] if refusal["engine_id"] in mine]
    assert refusals, status["refusals"]
    differences = {entry["field"]: entry for entry in refusals[0]["differences"]}
    field = differences["cache.mamba_ssm_cache_dtype"]
    assert {field["ours"], field["theirs"]} == {"bfloat16", "float32"}
