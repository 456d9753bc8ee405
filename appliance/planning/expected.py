"""The block size that was planned, kept by the daemon: an engine that registers with another one is pointed out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.geometry import MAX_CHUNK_TOKENS, ObjectGroup


@dataclass(frozen=True, slots=True)
class PlannedBlocks:
    """Planned N in tokens: for models by name, and for every other one (0: nothing was planned)."""

    by_model: dict[str, int] = field(default_factory=dict)
    otherwise: int = 0

    @classmethod
    def of(cls, text: str) -> PlannedBlocks:
        """From ``944``, ``MODEL=944`` or several of them with commas between.

        Raises:
            ValueError: naming the part that cannot be read.
        """
        by_model: dict[str, int] = {}
        otherwise = 0
        for part in (each.strip() for each in text.split(",") if each.strip()):
            model, _, digits = part.rpartition("=")
            tokens = int(digits) if digits.isascii() and digits.isdigit() else 0
            if not 1 <= tokens <= MAX_CHUNK_TOKENS:
                raise ValueError(
                    f"'{part}' has no number of tokens from 1 to {MAX_CHUNK_TOKENS}; say 944 or MODEL=944"
                )
            if model:
                by_model[model] = tokens
            else:
                otherwise = tokens
        return cls(by_model, otherwise)

    def for_model(self, model: str) -> int:
        """What was planned for a model as its engine names it; a path and a hub name meet in their last part."""
        if model in self.by_model:
            return self.by_model[model]
        last = model.rsplit("/", 1)[-1]
        same = [
            tokens for name, tokens in self.by_model.items() if name.rstrip("/").rsplit("/", 1)[-1] == last
        ]
        return same[0] if same else self.otherwise


def registered_block_tokens(groups: Iterable[ObjectGroup]) -> int:
    """An engine's N as its log gives it: the block size of the group with the smallest one."""
    return min(group.block_tokens for group in groups)


def deviation(planned: int, registered: int) -> str:
    """What an admin should know where an engine's N is not the planned one; empty where it is, or none was planned."""
    if not planned or planned == registered:
        return ""
    return (
        f"The engine registered with a block size N of {registered}, planned were {planned}: parallel sizes, types, "
        "attention backend or vLLM version are not those of the plan. What follows from N (token budget, L1 size) was "
        "planned for another engine; plan again, or correct the engine."
    )
