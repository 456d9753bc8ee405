"""Two tensor-parallel ranks: each state is stored in two shards, each attention page once."""

import os
from pathlib import Path

import pytest

from tests.e2e.families import FAMILIES
from tests.e2e.harness import Batch, Job, assert_same_answers, chunks_below, prompt, run_engine
from tests.e2e.processes import Daemon

FAMILY = FAMILIES["qwen3_next"]
RANKS = 2
CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.all_cores
@pytest.mark.skipif(len(CORES) < RANKS, reason="vLLM binds each rank to a core of its own")
def test_two_ranks_load_what_two_ranks_stored(checkpoints: Path, daemon: Daemon, tmp_path: Path) -> None:
    model, text = checkpoints / FAMILY.name, prompt(500, FAMILY.prompt_tokens)
    llm = {"tensor_parallel_size": RANKS, "block_size": FAMILY.block_tokens}
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in CORES[:RANKS])}
    again = Batch([text], reset_local_cache=True)

    def job(batches: list[Batch], connector: dict[str, object] | None = None) -> Job:
        return Job(model, batches, connector, llm=llm, environment=cores)

    computed, resumed = run_engine(tmp_path, job([Batch([text]), Batch([text])])).batches
    # vLLM's ranks spin while they wait for each other, and on two cores nothing else may run for many seconds.
    waits = ("lookup", "settle", "save", "load")
    connector = daemon.connector(**{f"{wait}_timeout_seconds": 60.0 for wait in waits})
    stored, loaded = run_engine(tmp_path, job([Batch([text]), again], connector)).batches
    (fresh,) = run_engine(tmp_path, job([Batch([text])], connector)).batches
    assert_same_answers(stored.answers, computed.answers)
    for batch in (loaded, fresh):
        assert batch.external_hit_tokens == chunks_below(FAMILY.prompt_tokens, FAMILY.chunk_tokens)
        assert_same_answers(batch.answers, resumed.answers)

    groups = daemon.status()["groups"]
    shape = {group["kind"]: (group["shards"], group["replicas"], group["objects"]) for group in groups}
    chunks = FAMILY.prompt_tokens // FAMILY.chunk_tokens
    assert shape == {"recurrent": (RANKS, 1, RANKS), "attention": (1, RANKS, chunks)}
