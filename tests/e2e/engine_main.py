"""One vLLM process of a scenario. Runs inside the vLLM environment: `python engine_main.py JOB.json RESULT.json`.

The job names a model, the arguments of `LLM` and the batches to run one after the other; see `harness.Job` for
its fields. The result holds, for each request, its tokens, the top logprobs of each and the cached prompt tokens,
and for each batch how many prompt tokens came from the engine's own cache and from the connector.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams

LOCAL_HITS = "vllm:prefix_cache_hits"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
PREEMPTIONS = "vllm:num_preemptions"
DRAIN_SECONDS = 20.0
POLL_SECONDS = 0.05


def counters(llm: LLM) -> dict[str, int]:
    """The engine's cumulative counters by name."""
    totals = {LOCAL_HITS: 0, EXTERNAL_HITS: 0, PREEMPTIONS: 0}
    for metric in llm.get_metrics():
        if metric.name in totals:
            totals[metric.name] += int(metric.value)
    return totals


def wait_for(path: str, seconds: float) -> None:
    """Wait until the scenario has made `path`; a scenario that died must not leave this process behind."""
    deadline = time.monotonic() + seconds
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the scenario did not make {path}")
        time.sleep(POLL_SECONDS)


def drain(llm: LLM) -> None:
    """Step the engine until saves under way have been reported, as a serving engine would."""
    engine = llm.llm_engine
    core = engine.engine_core
    scheduler = core.engine_core.scheduler
    deadline = time.monotonic() + DRAIN_SECONDS
    while scheduler.has_requests() and time.monotonic() < deadline:
        engine.step()


def run_and_abort(llm: LLM, prompts: list[list[int]], sampling: SamplingParams, steps: list[int]) -> None:
    """Add every prompt and abort request i after `steps[i]` engine steps, wherever it then stands."""
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(f"aborted-{number}", {"prompt_token_ids": prompt}, sampling)
    for step in range(max(steps) + 1):
        engine.abort_request([f"aborted-{number}" for number, last in enumerate(steps) if last == step])
        engine.step()


def batch_prompts(batch: dict[str, Any], earlier: list[dict[str, Any]]) -> list[list[int]]:
    """The batch's own prompts, or the next turn of the conversation that the batch before it began."""
    if batch.get("next_turn") is None:
        return [list(prompt) for prompt in batch["prompts"]]
    before = earlier[-1]
    return [
        [*prompt, *request["tokens"], *batch["next_turn"]]
        for prompt, request in zip(before["prompts"], before["requests"], strict=True)
    ]


def run_batch(llm: LLM, batch: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """Run one batch of prompts to the end and describe what came out."""
    if batch.get("reset_local_cache"):
        assert llm.reset_prefix_cache(), (
            "a block is still held, so the next batch would hit the engine's own cache"
        )
    if batch.get("announce_file"):
        Path(batch["announce_file"]).touch()
    if batch.get("await_file"):
        wait_for(batch["await_file"], batch["await_seconds"])
    before = counters(llm)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=batch["max_tokens"], ignore_eos=True, logprobs=5, detokenize=False
    )
    prompts = batch_prompts(batch, earlier)
    started = time.monotonic()
    outputs = []
    if batch.get("abort_after_steps") is not None:
        run_and_abort(llm, prompts, sampling, batch["abort_after_steps"])
    else:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    elapsed = time.monotonic() - started
    drain(llm)
    after = counters(llm)
    return {
        "prompts": prompts,
        "seconds": elapsed,
        "local_hit_tokens": after[LOCAL_HITS] - before[LOCAL_HITS],
        "external_hit_tokens": after[EXTERNAL_HITS] - before[EXTERNAL_HITS],
        "preemptions": after[PREEMPTIONS] - before[PREEMPTIONS],
        "requests": [describe(output) for output in outputs],
    }


def describe(output: Any) -> dict[str, Any]:
    """One request's tokens, top logprobs by token id, and cached prompt tokens."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            {str(token): entry.logprob for token, entry in position.items()}
            for position in completion.logprobs
        ],
        "cached_tokens": output.num_cached_tokens,
        "finish_reason": completion.finish_reason,
    }


def block_size(llm: LLM) -> list[int]:
    """Tokens a block of each cache group."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]


def main(job_path: Path, result_path: Path) -> None:
    """Run the job and write its result at once, so that a reader never sees half of it."""
    job = json.loads(job_path.read_text())
    started = time.monotonic()
    llm = LLM(**job["llm"])
    result: dict[str, Any] = {
        "startup_seconds": time.monotonic() - started,
        "block_sizes": block_size(llm),
        "batches": [],
    }
    for batch in job["batches"]:
        result["batches"].append(run_batch(llm, batch, result["batches"]))
    partial = result_path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(result_path)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
