"""Recorded request traces: one JSON object a line, as in the public Mooncake release (FAST 2025).

======================== ===============================================================================
``timestamp``            milliseconds, never falling
``input_length``         tokens of the prompt
``hash_ids``             one number per 512-token block of the prompt, the last usually partial; a number
                         stands for its block and everything before it
======================== ===============================================================================

Other fields are passed over. Only whole blocks count: each is one chunk of the replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.errors import InvalidTrace
from appliance.hashing import KEY_BYTES

CHUNK_TOKENS = 512
HALVES = ("first", "second")

_MOST_CHUNKS = 1 << 20


class _Line(BaseModel):
    """One line as the file has it."""

    model_config = ConfigDict(strict=True, frozen=True)

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: int = Field(ge=1, le=_MOST_CHUNKS * CHUNK_TOKENS)
    hash_ids: list[int] = Field(max_length=_MOST_CHUNKS)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: when it came, in seconds, and the keys of its whole chunks."""

    at_seconds: float
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded trace; ``requests`` without a whole chunk are kept, since they count as traffic."""

    name: str
    requests: Sequence[Request]

    @property
    def asked_chunks(self) -> int:
        """Whole chunks of all prompts."""
        return sum(len(request.keys) for request in self.requests)

    @property
    def unique_chunks(self) -> int:
        """Distinct chunks: what a cache without a limit would hold in the end."""
        return len({key for request in self.requests for key in request.keys})

    @property
    def seen_chunks(self) -> int:
        """Chunks asked that an earlier prompt had asked: what a cache without a limit, and with every state, would hit."""
        seen: set[bytes] = set()
        count = 0
        for request in self.requests:
            count += sum(key in seen for key in request.keys)
            seen.update(request.keys)
        return count

    def half(self, which: str) -> Trace:
        """The first or the second half of the requests, as a trace of its own."""
        middle = len(self.requests) // 2
        part = self.requests[:middle] if which == "first" else self.requests[middle:]
        return replace(self, name=f"{self.name}.{which}", requests=part)


def read_trace(path: Path) -> Trace:
    """Read and check a trace.

    Raises:
        InvalidTrace: naming the line and the field, or that the file cannot be read or holds no request.
    """
    try:
        with path.open("rb") as lines:
            requests = list(_requests_of(lines))
    except OSError as error:
        raise InvalidTrace(f"The trace {path} cannot be read: {error.strerror}.") from None
    if not any(request.keys for request in requests):
        raise InvalidTrace(
            f"The trace {path} has no request with a whole chunk of {CHUNK_TOKENS} tokens.",
            remedy="Give a file with one JSON object a line, each with timestamp, input_length and hash_ids.",
        )
    return Trace(path.name.removesuffix(".jsonl"), requests)


def _requests_of(lines: Iterator[bytes]) -> Iterator[Request]:
    """Requests line by line; a block's number must always stand behind the same one."""
    keys: dict[int, bytes] = {}
    parents: dict[int, int] = {}
    before = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        parsed = _parse(number, line)
        if parsed.timestamp < before:
            raise _invalid(number, "timestamp", f"{parsed.timestamp:g} is before that of the line above")
        before = parsed.timestamp
        blocks = parsed.hash_ids[: parsed.input_length // CHUNK_TOKENS]
        if len(blocks) < parsed.input_length // CHUNK_TOKENS:
            raise _invalid(
                number,
                "hash_ids",
                f"{len(blocks)} blocks are fewer than the whole ones of {parsed.input_length} tokens",
            )
        parent = -1
        for block in blocks:
            known = parents.setdefault(block, parent)
            if known != parent:
                raise _invalid(
                    number, "hash_ids", f"{block} follows {_named(parent)} here and {_named(known)} elsewhere"
                )
            parent = block
        yield Request(
            parsed.timestamp / 1000, [keys.get(b) or keys.setdefault(b, _key_of(b)) for b in blocks]
        )


def _parse(number: int, line: bytes) -> _Line:
    try:
        parsed = _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the line"
        raise _invalid(number, field, first["msg"]) from None
    if any(not 0 <= block < 1 << 63 for block in parsed.hash_ids):
        raise _invalid(number, "hash_ids", "a number is negative or needs more than 63 bits")
    return parsed


def _invalid(number: int, field: str, what: str) -> InvalidTrace:
    return InvalidTrace(f"Line {number} of the trace, {field}: {what}.", line=number, field=field)


def _named(block: int) -> str:
    return str(block) if block >= 0 else "nothing"


def _key_of(block: int) -> bytes:
    """Little-endian, since the index spreads keys by their first byte."""
    return block.to_bytes(KEY_BYTES, "little")
