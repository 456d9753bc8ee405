"""What every message is built on: strictness, the words that stand in fields, and parsing with a sentence for what is wrong."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.errors import InvalidField


class Message(BaseModel):
    """Strict and closed: a field of another type or another name is refused, never coerced or ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Lenient(BaseModel):
    """A result as the client reads it: fields that a newer daemon added are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Role(StrEnum):
    """What a session may do."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    ADMIN = "admin"


class Transport(StrEnum):
    """How a worker's page bytes travel."""

    SHARED = "shared"
    INLINE = "inline"


class Grant(IntEnum):
    """What a reservation asked for one object got."""

    GRANTED = 0
    EXISTS = 1
    PENDING = 2
    OUT_OF_SPACE = 3
    OVER_LIMIT = 4
    WARMING = 5


class MissReason(StrEnum):
    """Why a lookup fell short of the longest hit its prompt could have had."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    RECURRENT_MISSING = "recurrent_missing"
    RANK_MISSING = "rank_missing"
    WRITE_EXPIRED = "write_expired"
    REFUSED_FINGERPRINT = "refused_fingerprint"
    QUARANTINED = "quarantined"
    TOO_SHORT = "too_short"
    REGISTERING = "registering"


class LoadFailure(StrEnum):
    """Why a worker could not use an object it had located."""

    CHECKSUM = "checksum"
    GENERATION = "generation"
    TIMEOUT = "timeout"
    ERROR = "error"


_M = TypeVar("_M", bound=BaseModel)


def parse(model: type[_M], values: dict[str, Any]) -> _M:
    """``values`` as ``model``.

    Raises:
        InvalidField: one sentence that names the field, its value and what is wrong with it.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "args"
        shown = repr(first.get("input"))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise InvalidField(f"The field '{field}' is {shown}: {first['msg']}.", field=field) from None
