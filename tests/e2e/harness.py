"""Jobs for engine processes and what came out of them. Imports no vLLM: it runs in the test environment."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.processes import ENGINE_MAIN, VLLM_ENVIRONMENT, VLLM_PYTHON, LoggedProcess

ENGINE_SECONDS = 240.0
PLACES = 5
"""Decimal places to which logprobs of a loaded prefix equal those of a computed one."""


@dataclass
class Batch:
    """Prompts that the engine gets at once, as token ids.

    With `abort_after_steps`, request i is aborted after that many engine steps and the batch has no answers.
    With `next_turn`, the prompts are those of the batch before it, each with its answer and then these tokens.
    `announce_file` is made when the batch is next; it then starts once `await_file`, if named, exists.
    """

    prompts: list[list[int]] = field(default_factory=list)
    next_turn: list[int] | None = None
    max_tokens: int = 8
    abort_after_steps: list[int] | None = None
    reset_local_cache: bool = False
    announce_file: str | None = None
    await_file: str | None = None
    await_seconds: float = 90.0


@dataclass
class Job:
    """One engine process: its model, what differs from the usual arguments of `LLM`, and its batches in order."""

    model: Path
    batches: list[Batch]
    connector: dict[str, Any] | None = None
    llm: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The job as engine_main.py reads it."""
        llm: dict[str, Any] = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            # Left to itself it depends on the CPU's instructions, and the block size on it.
            "mamba_ssm_cache_dtype": "float32",
            **self.llm,
        }
        if self.connector is not None:
            llm["kv_transfer_config"] = self.connector
        return {"llm": llm, "batches": [asdict(batch) for batch in self.batches]}


@dataclass(frozen=True)
class Answer:
    """What one request got."""

    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class BatchResult:
    """The answers to a batch, and the prompt tokens that came from each cache."""

    prompts: list[list[int]]
    answers: list[Answer]
    local_hit_tokens: int
    external_hit_tokens: int
    preemptions: int
    seconds: float


@dataclass(frozen=True)
class EngineResult:
    """Everything an engine process reported."""

    batches: list[BatchResult]
    block_sizes: list[int]
    log: str


class Engine(LoggedProcess):
    """A process that runs one job."""

    _numbers = itertools.count(1)

    def __init__(self, directory: Path, job: Job) -> None:
        self.number = next(self._numbers)
        super().__init__(f"engine {self.number}", directory / f"engine-{self.number}.log")
        self._job = job
        self._job_file = directory / f"engine-{self.number}.job.json"
        self._result_file = directory / f"engine-{self.number}.result.json"

    def start(self) -> None:
        """Start the process; several may run at once."""
        self._job_file.write_text(json.dumps(self._job.document()))
        command = [VLLM_PYTHON, ENGINE_MAIN, self._job_file, self._result_file]
        self.spawn(command, {**VLLM_ENVIRONMENT, **self._job.environment})

    def result(self, seconds: float = ENGINE_SECONDS) -> EngineResult:
        """Wait for the end and give what the process reported."""
        code = self.wait(seconds)
        assert code == 0, f"{self.name} ended with {code}\n{self.tail()}"
        document = json.loads(self._result_file.read_text())
        return EngineResult(
            batches=[
                BatchResult(
                    prompts=batch["prompts"],
                    answers=[Answer(**request) for request in batch["requests"]],
                    local_hit_tokens=batch["local_hit_tokens"],
                    external_hit_tokens=batch["external_hit_tokens"],
                    preemptions=batch["preemptions"],
                    seconds=batch["seconds"],
                )
                for batch in document["batches"]
            ],
            block_sizes=document["block_sizes"],
            log=self.log.read_text(errors="replace"),
        )


def run_engine(directory: Path, job: Job) -> EngineResult:
    """Run one job in a fresh process to its end."""
    engine = Engine(directory, job)
    try:
        engine.start()
        return engine.result()
    finally:
        engine.stop()


def prompt(seed: int, tokens: int, *, after: Sequence[int] = ()) -> list[int]:
    """`after` continued with random bytes up to `tokens` tokens; the same for the same seed."""
    source = random.Random(seed)
    return [*after, *(source.randrange(256) for _ in range(tokens - len(after)))]


def chunks_below(tokens: int, chunk_tokens: int) -> int:
    """Tokens of a prompt that can come from a cache: whole chunks, with at least one token left to compute."""
    return (tokens - 1) // chunk_tokens * chunk_tokens


def assert_same_answers(actual: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Tokens equal, and the logprob of every token that both rank among their best equal to five places.

    Tokens alone would not do: an engine that lost its recurrent state often still picks the same ones.
    """
    assert len(actual) == len(expected)
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours.tokens == theirs.tokens, f"request {number}: tokens differ"
        for position, (mine, reference) in enumerate(zip(ours.logprobs, theirs.logprobs, strict=True)):
            assert mine.keys() == reference.keys(), f"request {number}: other best tokens at {position}"
            for token, value in mine.items():
                assert math.isclose(value, reference[token], rel_tol=0, abs_tol=0.5 * 10**-PLACES), (
                    f"request {number}: logprob of {token} at {position} is {value}, expected {reference[token]}"
                )
