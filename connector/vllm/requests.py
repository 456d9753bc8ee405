"""One request as the scheduler side follows it: its phase, its keys, its lease and its snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from appliance.hashing import ChunkHasher, PromptIdentity

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from appliance.protocol.messages import LookupResult
    from connector.client import PendingLookup


class Phase(Enum):
    """Where a request stands between vLLM and the appliance."""

    NEW = auto()
    """Not asked yet, or to be asked again after a preemption or a failed load."""
    LOOKING = auto()
    """The daemon has been asked."""
    ANSWERED = auto()
    """The answer is known, and a lease may be held; vLLM has not allocated blocks yet."""
    LOADING = auto()
    """The workers copy; every rank will report exactly once."""
    COMPUTING = auto()
    """vLLM computes; whole chunks are saved as they fill."""
    ABANDONED = auto()
    """The request ended while the workers copy: the lease stays until their report."""
    ENDED = auto()


class Event(Enum):
    """What moves a request on."""

    ASKED = auto()
    ANSWER = auto()
    NOT_SERVED = auto()
    LOAD_ALLOCATED = auto()
    COMPUTE_ALLOCATED = auto()
    LOADED = auto()
    LOAD_FAILED = auto()
    PREEMPTED = auto()
    FINISHED = auto()


TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.NEW, Event.ASKED): Phase.LOOKING,
    (Phase.NEW, Event.NOT_SERVED): Phase.ANSWERED,
    (Phase.LOOKING, Event.ANSWER): Phase.ANSWERED,
    (Phase.ANSWERED, Event.LOAD_ALLOCATED): Phase.LOADING,
    (Phase.ANSWERED, Event.COMPUTE_ALLOCATED): Phase.COMPUTING,
    (Phase.LOADING, Event.LOADED): Phase.COMPUTING,
    (Phase.LOADING, Event.LOAD_FAILED): Phase.NEW,
    (Phase.COMPUTING, Event.PREEMPTED): Phase.NEW,
    (Phase.NEW, Event.FINISHED): Phase.ENDED,
    (Phase.LOOKING, Event.FINISHED): Phase.ENDED,
    (Phase.ANSWERED, Event.FINISHED): Phase.ENDED,
    (Phase.COMPUTING, Event.FINISHED): Phase.ENDED,
    (Phase.LOADING, Event.FINISHED): Phase.ABANDONED,
    (Phase.ABANDONED, Event.LOADED): Phase.ENDED,
    (Phase.ABANDONED, Event.LOAD_FAILED): Phase.ENDED,
}


class UnexpectedEvent(Exception):
    """vLLM called in an order that the transition table does not have."""


@dataclass
class TrackedRequest:
    """Everything the scheduler side knows about one request.

    `local_tokens` is the local hit that vLLM named last. `lost_chunks` are those that ranks reported for the
    load under way, `refused_chunks` those of failed loads, never offered to this request again. `next_chunk` is the first
    chunk whose attention pages have not been handed to a save. `saved_states` holds (group, chunk) of the states handed to one. `wanted` are the boundaries,
    in tokens, at which a snapshot is to be stored. `held_states` are pinned states of generated text, by group:
    (boundary in tokens, block id); the last one is stored when the request ends. `left_blocks` are pinned blocks that a
    sliding window has left, by (group, place in the table).
    """

    request: Request
    identity: PromptIdentity | None
    salt_label: bytes
    phase: Phase = Phase.NEW
    hasher: ChunkHasher | None = None
    chunk_tokens: int = 0
    pending: PendingLookup | None = None
    answer: LookupResult | None = None
    lease: int = 0
    local_tokens: int = 0
    refused_chunks: set[int] = field(default_factory=set)
    lost_chunks: set[int] = field(default_factory=set)
    failed_loads: int = 0
    next_chunk: int = 0
    saved_states: set[tuple[int, int]] = field(default_factory=set)
    wanted: set[int] = field(default_factory=set)
    held_states: dict[int, tuple[int, int]] = field(default_factory=dict)
    left_blocks: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """vLLM's id of the request."""
        return str(self.request.request_id)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to the request here."""
        return self.phase is Phase.ENDED

    def move(self, event: Event) -> None:
        """Take the transition that `event` causes.

        Raises:
            UnexpectedEvent: if the table has none; the phase is unchanged.
        """
        following = TRANSITIONS.get((self.phase, event))
        if following is None:
            raise UnexpectedEvent(f"request {self.request_id}: {event.name} in phase {self.phase.name}")
        self.phase = following

    def keys_for(self, chunk_tokens: int, chunks: int) -> list[bytes]:
        """Keys of the first `chunks` whole chunks of the tokens known by now.

        The daemon may have come back with another chunk size: then every chunk counts as not yet saved.
        """
        assert self.identity is not None, "a request without an identity must never reach the cache"
        if self.hasher is None or self.chunk_tokens != chunk_tokens:
            self.hasher = ChunkHasher(chunk_tokens, self.identity)
            self.chunk_tokens = chunk_tokens
            self.next_chunk = 0
            self.saved_states.clear()
        return self.hasher.keys(self.request.all_token_ids, chunks)
