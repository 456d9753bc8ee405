"""What fails beside a running engine costs a recompute, never a wrong answer and never the engine."""

from pathlib import Path

from tests.e2e.families import FAMILIES, Reference
from tests.e2e.harness import Batch, Engine, Job, assert_same_answers, chunks_below, prompt, run_engine
from tests.e2e.processes import Daemon, until

FAMILY = FAMILIES["qwen3_next"]
MANY = 16


def test_a_failed_load_is_computed_again(
    checkpoints: Path, references: dict[str, Reference], daemon: Daemon, tmp_path: Path
) -> None:
    reference = references[FAMILY.name]
    model, connector = checkpoints / FAMILY.name, daemon.connector()
    run_engine(tmp_path, Job(model, [Batch([FAMILY.first])], connector))
    failing = Job(
        model,
        [Batch([FAMILY.first]), Batch([FAMILY.first], reset_local_cache=True)],
        connector,
        environment={"PAGEWARDEN_TEST_FAIL_LOADS": "1"},
    )
    result = run_engine(tmp_path, failing)
    failed, loaded = result.batches
    assert "PAGEWARDEN_TEST_FAIL_LOADS is set" in result.log
    assert_same_answers(failed.answers, [reference.first])
    assert loaded.external_hit_tokens == chunks_below(FAMILY.prompt_tokens, FAMILY.chunk_tokens)
    assert_same_answers(loaded.answers, [reference.first_resumed])
    assert daemon.status()["leases_total"] == 0


def test_requests_are_aborted_at_every_stage(
    checkpoints: Path, references: dict[str, Reference], daemon: Daemon, tmp_path: Path
) -> None:
    """While the lookup is out, while it loads, while it computes, and in generated text that crosses a boundary."""
    reference = references[FAMILY.name]
    stages = 40
    stored = [prompt(300, FAMILY.turn_tokens), prompt(301, FAMILY.prompt_tokens)]
    fresh = [prompt(302 + number, FAMILY.turn_tokens) for number in range(2)]
    storing = Batch(stored)
    aborting = [
        Batch([text] * stages, max_tokens=40, reset_local_cache=True, abort_after_steps=list(range(stages)))
        for text in (*stored, *fresh)
    ]
    # Emptying the engine's own cache fails while any block is still pinned.
    after = Batch([FAMILY.first], reset_local_cache=True)
    job = Job(
        checkpoints / FAMILY.name, [storing, *aborting, after], daemon.connector(), llm={"max_num_seqs": 8}
    )
    result = run_engine(tmp_path, job)
    assert_same_answers(result.batches[-1].answers, [reference.first])
    status = daemon.status()
    assert status["leases_total"] == 0
    assert (status["l1"]["reserved_bytes"], status["l1"]["leased_bytes"]) == (0, 0)


def test_preempted_requests_answer_the_same(checkpoints: Path, daemon: Daemon, tmp_path: Path) -> None:
    """An engine short of blocks preempts; the requests then load what was stored of them and go on."""
    llama = FAMILIES["llama"]
    beginning = prompt(400, llama.shared_tokens)
    prompts = [prompt(401 + number, 500 + 20 * number, after=beginning) for number in range(10)]
    crowd = Batch(prompts, max_tokens=150)
    short_of_blocks = {"num_gpu_blocks_override": 24, "max_model_len": 1024, "max_num_seqs": 6}
    model = checkpoints / llama.name
    expected = run_engine(tmp_path, Job(model, [crowd], llm=short_of_blocks)).batches[0]
    result = run_engine(tmp_path, Job(model, [crowd, crowd], daemon.connector(), llm=short_of_blocks))
    for batch in result.batches:
        assert batch.preemptions > 0
        assert_same_answers(batch.answers, expected.answers)
    assert result.batches[1].external_hit_tokens > 0


def test_the_daemon_is_killed_while_requests_run_and_comes_back(
    checkpoints: Path, daemon: Daemon, tmp_path: Path
) -> None:
    prompts = [prompt(200 + number, FAMILY.prompt_tokens) for number in range(MANY)]
    model = checkpoints / FAMILY.name
    running, back = tmp_path / "running", tmp_path / "back"
    batches = [
        Batch(prompts, max_tokens=24),
        Batch(prompts, max_tokens=24, reset_local_cache=True, announce_file=str(running)),
        Batch(prompts, max_tokens=24, reset_local_cache=True, await_file=str(back)),
        Batch(prompts, max_tokens=24, reset_local_cache=True),
    ]
    connector = daemon.connector(lookup_timeout_seconds=0.5)
    engine = Engine(tmp_path, Job(model, batches, connector, llm={"max_num_seqs": 2}))
    try:
        engine.start()
        until(lambda: running.exists() or not engine.running, 180, "the batch that loads")
        loads_before = sum(entry["loads"] for entry in daemon.status()["engines"])
        until(
            lambda: sum(entry["loads"] for entry in daemon.status()["engines"]) > loads_before,
            30,
            "a load in that batch",
        )
        daemon.kill()
        first_boot_log = len(daemon.log.read_bytes())
        daemon.start()
        until(
            lambda: any(entry["state"] == "ready" for entry in daemon.status()["engines"]),
            60,
            "the engine's return to the new daemon",
        )
        back.touch()
        result = engine.result()
    finally:
        engine.stop()
    expected = run_engine(tmp_path, Job(model, [Batch(prompts, max_tokens=24)], llm={"max_num_seqs": 2}))
    for batch in result.batches:
        assert_same_answers(batch.answers, expected.batches[0].answers)
    whole = MANY * chunks_below(FAMILY.prompt_tokens, FAMILY.chunk_tokens)
    assert result.batches[1].external_hit_tokens > 0, "no load can have been under way"
    assert result.batches[3].external_hit_tokens == whole, "the returned daemon serves what was stored in it"
    assert first_boot_log < len(daemon.log.read_bytes())
