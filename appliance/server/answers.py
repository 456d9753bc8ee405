"""What a handler gives back to the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel

from appliance.catalog.events import ControlRow


def nothing_to_undo() -> None:
    """The reply granted nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, and what takes back all that it grants if it cannot be delivered."""

    result: BaseModel
    undo: Callable[[], None] = nothing_to_undo


@dataclass(frozen=True, slots=True)
class Durable:
    """A reply that waits until the catalog has ``row`` on disk; in memory it holds already.

    ``undo`` takes the change back where it can be, if the catalog refuses the row.
    """

    result: BaseModel
    row: ControlRow
    undo: Callable[[], None] = nothing_to_undo
