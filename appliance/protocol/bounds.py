"""Bounds of what a message may hold: nothing that a peer sends makes the daemon count, recurse or allocate without end."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from appliance.geometry import MAX_GROUPS
from appliance.hashing import KEY_BYTES

MAX_KEYS = 65_536
MAX_ITEMS = 65_536
MAX_LEASES_NAMED = 65_536
MAX_RANKS = 4096
MAX_TOKENS = 2**32
MAX_OBJECT_BYTES = 2**40
MAX_FACTS_DEPTH = 16

U64 = Annotated[int, Field(ge=0, le=2**64 - 1)]
U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
GroupIndex = Annotated[int, Field(ge=0, lt=MAX_GROUPS)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Bytes = Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Keys = Annotated[bytes, Field(max_length=MAX_KEYS * KEY_BYTES)]


def _can_be_walked(facts: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [facts]
    for _ in range(MAX_FACTS_DEPTH):
        if any(isinstance(each, dict) and not all(isinstance(key, str) for key in each) for each in level):
            raise ValueError("its maps must have string keys")
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return facts
    raise ValueError(f"it is nested deeper than {MAX_FACTS_DEPTH} levels")


Facts = Annotated[dict[str, Any], AfterValidator(_can_be_walked)]
"""A part of a fingerprint: maps with string keys, nested no deeper than any real record is."""
