"""One simulated request on its way, and the blocks that requests share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from appliance.protocol.messages import LookupResult
from connector.client import PendingLookup, SaveItem


class Phase(Enum):
    """Where a simulated request stands."""

    LOOKING_UP = auto()
    WAITING_FOR_BLOCKS = auto()
    LOADING = auto()
    SAVING = auto()
    DONE = auto()


class Abort(Enum):
    """Where a request will be given up by its user."""

    NEVER = auto()
    BEFORE_LOAD = auto()
    DURING_LOAD = auto()


@dataclass(slots=True)
class Running:
    """One request; ``refused`` are chunks that failed to load for it, ``blocks`` those its load writes to."""

    request_id: str
    prompt_tokens: int
    chunk_tokens: int
    keys: list[bytes]
    parents: list[bytes]
    abort: Abort
    phase: Phase = Phase.LOOKING_UP
    pending: PendingLookup | None = None
    began_at: float = 0.0
    attempts: int = 0
    refused: set[int] = field(default_factory=set)
    found: LookupResult | None = None
    lease: int = 0
    blocks: list[int] = field(default_factory=list)
    ranks_loading: int = 0
    load_reasons: set[str] = field(default_factory=set)
    to_save: deque[list[tuple[int, int]]] = field(default_factory=deque)
    jobs: int = 0

    @property
    def whole_chunks(self) -> int:
        """Chunks that the prompt fills."""
        return len(self.keys)


@dataclass(slots=True)
class SaveUnderWay:
    """A save job whose blocks are kept until every rank has reported it."""

    running: Running
    items: tuple[SaveItem, ...]
    blocks: list[int]
    ranks_left: int


class BlockPool:
    """Manager blocks that are free; one that is handed out belongs to one load or save until it is given back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))

    def take(self, count: int) -> list[int] | None:
        """So many blocks, or ``None`` while there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Nobody reads or writes these any more."""
        self._free.extend(blocks)
