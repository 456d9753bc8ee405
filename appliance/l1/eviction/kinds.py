"""Classes of boundaries: what is known of one when a life begins, and says how soon prompts will come back to it."""

from __future__ import annotations

_MOST_RETURNS = 3
_MOST_TURNS = 3
_NOVELTIES = 4

TAILS = 8
"""Boundaries before a prompt's last at which a later prompt may part: 1, 2, 4 ... chunks before it."""

_ENDS = (_MOST_TURNS + 1) * _NOVELTIES * (_MOST_RETURNS + 1)
_PASSED = _ENDS
_FORKS = _PASSED + _MOST_RETURNS + 1
_OFFERED = _FORKS + _MOST_RETURNS + 1
_TAILS = _OFFERED + 1

KINDS = _TAILS + TAILS


def end_of_prompt(turns: int, novelty: int, returns: int) -> int:
    """The last boundary of a prompt, by how many ends of earlier prompts it continues and how much of it is new."""
    turns, returns = min(turns, _MOST_TURNS), min(returns, _MOST_RETURNS)
    return (turns * _NOVELTIES + novelty) * (_MOST_RETURNS + 1) + returns


def novelty_of(new_chunks: int) -> int:
    """How much of a prompt was never seen before: at most 1, 4, 16 chunks, or more."""
    return 0 if new_chunks <= 1 else 1 if new_chunks <= 4 else 2 if new_chunks <= 16 else 3


def passed_end(returns: int) -> int:
    """The end of a prompt that a longer one has continued."""
    return _PASSED + min(returns, _MOST_RETURNS)


def fork(returns: int) -> int:
    """Where prompts part, and none has ended."""
    return _FORKS + min(returns, _MOST_RETURNS)


def offered() -> int:
    """A state that an engine stored without being asked: the end of a generation, say."""
    return _OFFERED


def tail(step: int) -> int:
    """``2**step`` chunks before the end of a prompt; ``step`` from 0 on."""
    return _TAILS + step
