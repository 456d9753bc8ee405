"""Requests: from a public trace, or conversations made up with shared system prompts and growing histories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TRACE_BLOCK_TOKENS = 512
_VOCABULARY = 2**31
Tokens = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes, in seconds after the start."""

    at_seconds: float
    prompt: Tokens


def trace_tokens(hash_ids: list[int], input_length: int) -> Tokens:
    """The prompt of a trace's line: equal ids give equal tokens, different ids have none in common."""
    starts = np.array(hash_ids, dtype=np.uint64)[:, None] * np.uint64(TRACE_BLOCK_TOKENS)
    tokens = (starts + np.arange(TRACE_BLOCK_TOKENS, dtype=np.uint64)).ravel() % _VOCABULARY
    return tokens[:input_length].astype(np.uint32)


def read_trace(path: Path, *, engine: int, engines: int, most_tokens: int) -> Iterator[Arrival]:
    """Every ``engines``-th request of a trace file in the form of the Mooncake release, cut to ``most_tokens``.

    Raises:
        ValueError: naming the line that is no request.
    """
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number % engines != engine:
                continue
            try:
                row = json.loads(line)
                length = min(int(row["input_length"]), most_tokens)
                yield Arrival(float(row["timestamp"]) / 1000, trace_tokens(row["hash_ids"], length))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number + 1} is no request: {error}") from None


@dataclass(frozen=True, slots=True)
class Conversations:
    """Multi-turn conversations; lengths follow ``unit_tokens``, the size at which caching begins to matter.

    Engines with the same ``seed`` hold the same conversations, so that what one computed another one can load.
    """

    unit_tokens: int
    most_tokens: int
    requests_per_second: float
    seed: int = 0
    systems: int = 4
    open_conversations: int = 24
    turns: int = 6

    def arrivals(self, engine_seed: int) -> Iterator[Arrival]:
        """Requests without end: the next turn of some conversation, or the first of a new one."""
        random = np.random.default_rng((self.seed, engine_seed, 1))
        now = 0.0
        turn_of: dict[int, int] = {}
        newest = self.open_conversations
        while True:
            now += float(random.exponential(1 / self.requests_per_second))
            conversation = int(random.integers(newest - self.open_conversations, newest))
            turn = turn_of.get(conversation, 0) + 1
            turn_of[conversation] = turn
            if turn >= self.turns:
                turn_of.pop(conversation)
                newest += 1
            yield Arrival(now, self.prompt(conversation, turn))

    def prompt(self, conversation: int, turns: int) -> Tokens:
        """The system prompt and everything said in a conversation so far."""
        system = conversation % self.systems
        parts = [self._said(system, 0, 1.2, 3.0)]
        parts += [self._said(self.systems + conversation, turn, 0.2, 1.5) for turn in range(1, turns + 1)]
        return np.concatenate(parts)[: self.most_tokens]

    def _said(self, speaker: int, turn: int, least: float, most: float) -> Tokens:
        random = np.random.default_rng((self.seed, speaker, turn))
        length = int(random.uniform(least, most) * self.unit_tokens)
        return random.integers(0, _VOCABULARY, max(1, length), dtype=np.uint32)
