"""Which parts of the arena the device can access directly: registered piece by piece in the background.

Registering pins memory, which takes long, and a piece that has no memory yet would be given some behind the daemon's
back. So a piece is registered when the daemon has populated it, one after the other, on a thread of its own; until
then copies of it go through a bounce buffer. A segment stays mapped until its last piece is unregistered, and a piece
is unregistered only when no copy uses it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from connector.client.device.runtime import DeviceRuntime, RegistrationFailed
from kernels import Spans

logger = logging.getLogger("vllm.pagewarden")

PIECE_BYTES = 64 << 20
"""One registration. Small, because the driver may hold the process's memory map locked meanwhile."""
SETTLE_SECONDS = 1.0
"""A populated length is believed when it was read twice this far apart: the daemon populates in steps."""
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0


class Segment(Protocol):
    """A mapped segment of the arena, see :class:`connector.client.mapping.MappedSegment`."""

    @property
    def data_address(self) -> int:
        """Where its data is mapped in this process, a multiple of 4096."""

    @property
    def data_bytes(self) -> int:
        """Length of its data."""

    def populated_bytes(self) -> int:
        """How much of the data, from its beginning, has memory; -1 if that cannot be found out."""


class PieceState(Enum):
    """The state of one piece.

    ::

        waiting ──populated──► registering ──► registered ──retired, unused──► unregistering ──► released
           ▲ └──────────retired──────┼─────────────────────────────────────────────────────────────▲
           └──────────refused────────┘
    """

    WAITING = "waiting"
    REGISTERING = "registering"
    REGISTERED = "registered"
    UNREGISTERING = "unregistering"
    RELEASED = "released"


TRANSITIONS: dict[PieceState, frozenset[PieceState]] = {
    PieceState.WAITING: frozenset({PieceState.REGISTERING, PieceState.RELEASED}),
    PieceState.REGISTERING: frozenset({PieceState.REGISTERED, PieceState.WAITING}),
    PieceState.REGISTERED: frozenset({PieceState.UNREGISTERING}),
    PieceState.UNREGISTERING: frozenset({PieceState.RELEASED}),
    PieceState.RELEASED: frozenset(),
}


@dataclass(eq=False)
class _Piece:
    """`device_offset` is what to add to a host address to get the device's; known while registered."""

    address: int
    length_bytes: int
    state: PieceState = PieceState.WAITING
    device_offset: int = 0

    def move(self, state: PieceState) -> None:
        assert state in TRANSITIONS[self.state], (
            f"a piece would be {state} after {self.state}: used while unmapped"
        )
        self.state = state


@dataclass(eq=False)
class _Adopted:
    """A segment and its pieces. Holding `segment` keeps it mapped."""

    segment: Segment
    pieces: list[_Piece]
    piece_bytes: int
    users: int = 0
    retired: bool = False
    populated: int = -1
    settled: int = 0
    read_at: float = field(default=float("-inf"))

    @property
    def start(self) -> int:
        return self.segment.data_address

    @property
    def end(self) -> int:
        return self.segment.data_address + self.segment.data_bytes


@dataclass(frozen=True)
class Routed:
    """Spans cut where pieces end. `direct` and `device_address` are a row a span: whether the device can access the
    arena's side itself, and under which address; 0 where it cannot."""

    spans: Spans
    direct: NDArray[np.bool_]
    device_address: NDArray[np.uint64]


class PinnedArena:
    """The pieces of all segments. Any thread may adopt, retire and use; one thread registers and unregisters."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        *,
        piece_bytes: int = PIECE_BYTES,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        assert piece_bytes % 4096 == 0, "a piece would begin inside a page that another one pins"
        self._runtime = runtime
        self._piece_bytes = piece_bytes
        self._settle_seconds = settle_seconds
        self._changed = threading.Condition()
        self._adopted: list[_Adopted] = []
        self._stuck: list[_Adopted] = []
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._complaint = ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pagewarden-pinning", daemon=True)

    # --- any thread ------------------------------------------------------------------------------------------------

    def adopt(self, segment: Segment) -> None:
        """Begin to register a segment, in the background."""
        pieces = [
            _Piece(segment.data_address + start, min(self._piece_bytes, segment.data_bytes - start))
            for start in range(0, segment.data_bytes, self._piece_bytes)
        ]
        with self._changed:
            if self._closing:
                return
            self._adopted.append(_Adopted(segment, pieces, self._piece_bytes))
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    def retire(self, segment: Segment) -> None:
        """Unregister a segment as soon as no copy uses it, in the background; it stays mapped until then."""
        with self._changed:
            for adopted in self._adopted:
                if adopted.segment is segment:
                    self._retire(adopted)
            self._changed.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Unregister everything, bounded; whether that was done in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._closing = True
            for adopted in self._adopted:
                self._retire(adopted)
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def settle(self, seconds: float) -> None:
        """From now on believe a populated length after so long."""
        with self._changed:
            self._settle_seconds = seconds
            self._changed.notify_all()

    @property
    def registered_bytes(self) -> int:
        """Bytes that the device can access now."""
        return self._bytes({PieceState.REGISTERED})

    @property
    def waiting_bytes(self) -> int:
        """Bytes of segments in use that are not registered yet."""
        return self._bytes({PieceState.WAITING, PieceState.REGISTERING})

    def _bytes(self, states: set[PieceState]) -> int:
        with self._changed:
            pieces = [piece for adopted in self._adopted for piece in adopted.pieces]
            return sum(piece.length_bytes for piece in pieces if piece.state in states)

    @contextmanager
    def use(self, spans: Spans) -> Iterator[Routed]:
        """Say how each span's arena side is reached; what is reached directly stays registered meanwhile."""
        with self._changed:
            adopted = list(self._adopted)
            for each in adopted:
                spans = _cut(spans, each)
            direct = np.zeros(len(spans), dtype=np.bool_)
            device_address = np.zeros(len(spans), dtype=np.uint64)
            used = []
            for each in adopted:
                found = _reach(spans, each, direct, device_address)
                if found:
                    each.users += 1
                    used.append(each)
        try:
            yield Routed(spans, direct, device_address)
        finally:
            with self._changed:
                for each in used:
                    each.users -= 1
                self._changed.notify_all()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception:
                logger.exception("Pagewarden's pinning thread failed and goes on")
                time.sleep(FIRST_RETRY_SECONDS)

    def _turn(self) -> bool:
        """One registration or its undoing, or a wait for one; whether there may be more."""
        with self._changed:
            self._drop_released()
            if self._closing and not self._adopted:
                return False
            leaving = self._next_leaving()
            coming = None if leaving else self._next_coming()
            if leaving is not None:
                leaving[1].move(PieceState.UNREGISTERING)
            elif coming is not None:
                coming[1].move(PieceState.REGISTERING)
            else:
                self._changed.wait(self._settle_seconds)
        # Unlocked: the driver takes long, and copies must find out what they may use.
        if leaving is not None:
            self._unregister(*leaving)
        elif coming is not None:
            self._register(*coming)
        return True

    def _register(self, adopted: _Adopted, piece: _Piece) -> None:
        try:
            seen_at = self._runtime.register(piece.address, piece.length_bytes)
        except RegistrationFailed as error:
            with self._changed:
                piece.move(PieceState.WAITING)
                if adopted.retired:
                    piece.move(PieceState.RELEASED)
                self._retry_at = time.monotonic() + self._retry_seconds
                self._retry_seconds = min(2 * self._retry_seconds, LONGEST_RETRY_SECONDS)
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning(
                    "Pagewarden cannot pin a piece of the arena and copies it through a buffer, slower: %s",
                    self._complaint,
                )
            return
        with self._changed:
            self._retry_seconds = FIRST_RETRY_SECONDS
            piece.device_offset = seen_at - piece.address
            piece.move(PieceState.REGISTERED)

    def _unregister(self, adopted: _Adopted, piece: _Piece) -> None:
        try:
            self._runtime.unregister(piece.address)
        except RegistrationFailed as error:
            # Still pinned, so it must stay mapped: for the rest of this process's life.
            self._stuck.append(adopted)
            logger.warning("Pagewarden cannot unpin a piece of the arena and keeps it mapped: %s", str(error))
        with self._changed:
            piece.move(PieceState.RELEASED)

    def _retire(self, adopted: _Adopted) -> None:
        adopted.retired = True
        for piece in adopted.pieces:
            if piece.state is PieceState.WAITING:
                piece.move(PieceState.RELEASED)

    def _drop_released(self) -> None:
        self._adopted = [
            adopted
            for adopted in self._adopted
            if not adopted.retired or any(piece.state is not PieceState.RELEASED for piece in adopted.pieces)
        ]

    def _next_leaving(self) -> tuple[_Adopted, _Piece] | None:
        for adopted in self._adopted:
            if adopted.retired and not adopted.users:
                for piece in adopted.pieces:
                    if piece.state is PieceState.REGISTERED:
                        return adopted, piece
        return None

    def _next_coming(self) -> tuple[_Adopted, _Piece] | None:
        if time.monotonic() < self._retry_at:
            return None
        for adopted in self._adopted:
            if not adopted.retired:
                piece = next((each for each in adopted.pieces if each.state is PieceState.WAITING), None)
                if piece is not None and piece.address + piece.length_bytes <= self._settled_end(adopted):
                    return adopted, piece
        return None

    def _settled_end(self, adopted: _Adopted) -> int:
        """Where the part ends that surely has memory."""
        now = time.monotonic()
        if now - adopted.read_at >= self._settle_seconds:
            populated = adopted.segment.populated_bytes()
            # While it grows, the last step may still be undone; what was there before that step may not.
            adopted.settled = max(adopted.settled, min(adopted.populated, populated))
            adopted.populated, adopted.read_at = populated, now
        return adopted.start + adopted.settled


def _cut(spans: Spans, adopted: _Adopted) -> Spans:
    """Cut spans that lie in more than one piece of a segment."""
    step = np.uint64(adopted.piece_bytes)
    start, end = np.uint64(adopted.start), np.uint64(adopted.end)
    inside = (spans.arena_address >= start) & (spans.arena_address < end)
    offset = np.where(inside, spans.arena_address - start, np.uint64(0))
    first = offset // step
    last = np.where(inside, (offset + spans.length_bytes - np.uint64(1)) // step, first)
    parts = (last - first + np.uint64(1)).astype(np.int64)
    if not len(spans) or int(parts.max()) == 1:
        return spans
    row = np.repeat(np.arange(len(spans)), parts)
    number = (np.arange(len(row)) - (np.cumsum(parts) - parts)[row]).astype(np.uint64)
    whole_end = offset[row] + spans.length_bytes[row]
    cut = (parts > 1)[row]
    begin = np.where(cut, np.maximum(offset[row], (first[row] + number) * step), offset[row])
    stop = np.where(cut, np.minimum(whole_end, (first[row] + number + np.uint64(1)) * step), whole_end)
    moved = begin - offset[row]
    return Spans(
        engine_address=spans.engine_address[row] + moved,
        arena_address=spans.arena_address[row] + moved,
        length_bytes=stop - begin,
        stream_offset=spans.stream_offset[row] + moved,
        object_index=spans.object_index[row],
    )


def _reach(
    spans: Spans, adopted: _Adopted, direct: NDArray[np.bool_], device_address: NDArray[np.uint64]
) -> bool:
    """Fill in the rows of `spans` whose piece is registered; whether there is one. A retiring segment gives none."""
    if adopted.retired or not len(spans):
        return False
    usable = np.array([piece.state is PieceState.REGISTERED for piece in adopted.pieces], dtype=np.bool_)
    offsets = np.array([piece.device_offset for piece in adopted.pieces], dtype=np.int64)
    start, end = np.uint64(adopted.start), np.uint64(adopted.end)
    rows = np.flatnonzero((spans.arena_address >= start) & (spans.arena_address < end))
    piece = ((spans.arena_address[rows] - start) // np.uint64(adopted.piece_bytes)).astype(np.int64)
    rows, piece = rows[usable[piece]], piece[usable[piece]]
    direct[rows] = True
    # Wraps where the device's address is the lower one, as it should.
    device_address[rows] = spans.arena_address[rows] + offsets[piece].view(np.uint64)
    return bool(len(rows))
