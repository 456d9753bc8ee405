"""The models under test, their prompts, and the answers of an engine that has no connector."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.harness import Answer, Batch, Job, prompt, run_engine

TURN_ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Family:
    """A checkpoint with the lengths, in tokens, that make its prompts end and part at useful places.

    `chunk_tokens` is what is negotiated when 256 is asked. A prompt's last block boundary is also its last chunk
    boundary, so that an engine without the connector resumes where one with it does. `turn_tokens` lies just below a
    boundary: the first turn's answer crosses it. `split_invariant` says whether the model's bits are the same wherever a
    prefill is cut; LFM2's on a CPU are not.
    """

    name: str
    block_tokens: int
    chunk_tokens: int
    prompt_tokens: int
    shared_tokens: int
    turn_tokens: int
    recurrent_groups: int
    split_invariant: bool = True
    reference_llm: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> list[int]:
        """The prompt that is computed once."""
        return prompt(1, self.prompt_tokens)

    @property
    def second(self) -> list[int]:
        """Shares only its beginning with the first."""
        return prompt(2, self.prompt_tokens, after=self.first[: self.shared_tokens])

    @property
    def third(self) -> list[int]:
        """Shares only its beginning with the first and the second."""
        return prompt(3, self.prompt_tokens, after=self.first[: self.shared_tokens])

    @property
    def turn(self) -> list[int]:
        """The first turn of a conversation."""
        return prompt(4, self.turn_tokens)

    def turn_batches(self, *, reset_local_cache: bool) -> list[Batch]:
        """Two turns of a conversation; between them the engine's own cache may be emptied."""
        return [
            Batch([self.turn], max_tokens=TURN_ANSWER_TOKENS),
            Batch(next_turn=prompt(5, 50), reset_local_cache=reset_local_cache),
        ]


EVERY_BOUNDARY = {"prefix_cache_retention_interval": 640, "max_num_batched_tokens": 1279}
"""Makes vLLM by itself keep the state at every boundary, in generated text too, so that a reference can resume there."""

FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3_next", 640, 640, 1500, 700, 1270, recurrent_groups=3, reference_llm=EVERY_BOUNDARY),
        Family("lfm2", 128, 256, 600, 300, 500, recurrent_groups=2, split_invariant=False),
        Family("llama", 128, 256, 600, 300, 500, recurrent_groups=0),
    )
}


@dataclass(frozen=True)
class Reference:
    """Answers without a connector: to each prompt computed whole, and resumed from the engine's own cache.

    Resumed answers are computed over the same chunk splits as those of an engine that loads the prefix.
    """

    first: Answer
    second: Answer
    third_resumed: Answer
    first_resumed: Answer
    turn: Answer
    next_turn: Answer


def make_reference(family: Family, checkpoints: Path, directory: Path) -> Reference:
    """Run the family's prompts in one engine without a connector."""
    prompts = [family.first, family.second, family.third, family.first]
    batches = [*(Batch([tokens]) for tokens in prompts), *family.turn_batches(reset_local_cache=False)]
    result = run_engine(directory, Job(checkpoints / family.name, batches, llm=family.reference_llm))
    first, second, third, again, turn, following = (batch.answers[0] for batch in result.batches)
    assert third.cached_tokens == family.shared_tokens // family.chunk_tokens * family.chunk_tokens
    assert again.cached_tokens == (family.prompt_tokens - 1) // family.chunk_tokens * family.chunk_tokens
    if family.split_invariant:
        assert following.cached_tokens > family.turn_tokens, "a state computed by prefill has other last bits"
    return Reference(first, second, third, again, turn, following)
