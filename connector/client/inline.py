"""Page bytes through a socket, for a worker that shares no memory with the daemon.

Pages are gathered into a staging buffer, laid out as the objects' streams, by the same kernels and with the same checksum
as into the arena, and sent in frames. A load is the reverse. Batches bound the buffer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import zmq
from numpy.typing import NDArray

from appliance.errors import DaemonUnreachable, LeaseEnded, PagewardenError
from appliance.protocol.base import LoadFailure
from appliance.protocol.bulk import Get, Put
from appliance.protocol.messages import LocateResult, ReserveResult
from connector.client.bulk import BulkAddress, BulkConnection, Frame
from connector.client.carrier import stream_lengths
from connector.client.jobs import LoadItem
from kernels import Backend, Direction, Spans, StreamRuns, finish, plan_object

STAGING_BYTES = 64 * 1024 * 1024
"""Streams are moved in batches of at most this size, or one at a time where one is larger."""

PAGE_BYTES = 4096


class Staging:
    """A buffer that takes the arena's place in a plan; each stream begins at a page."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._bytes: NDArray[np.uint8] = self._memory

    def forget(self) -> None:
        """Take fresh memory next time: a connection that failed may still be sending from this."""
        self._bytes = self._memory = np.zeros(0, dtype=np.uint8)

    def plan(self, runs: Sequence[StreamRuns]) -> tuple[Spans, list[memoryview]]:
        """Spans between pages and buffer for a batch, and each stream's place in the buffer."""
        sizes = [_pages(run.stream_bytes) for run in runs]
        self._ensure(sum(sizes) * PAGE_BYTES)
        base = int(self._bytes.ctypes.data)
        limit = len(self._bytes) // PAGE_BYTES
        plans, streams, first = [], [], 0
        for position, (run, pages) in enumerate(zip(runs, sizes, strict=True)):
            plans.append(
                plan_object(
                    run,
                    [(first, pages)],
                    extent_bytes=PAGE_BYTES,
                    data_base_address=base,
                    extent_limit=limit,
                    object_index=position,
                )
            )
            begin = first * PAGE_BYTES
            stream = self._bytes[begin : begin + run.stream_bytes]
            if run.total_bytes != run.stream_bytes:
                stream[:] = 0  # padding travels too, and must not carry what was here before
            streams.append(stream.data)
            first += pages
        return Spans.concatenate(plans), streams

    def _ensure(self, size: int) -> None:
        if len(self._bytes) < size:
            self._memory = np.zeros(size + PAGE_BYTES, dtype=np.uint8)
            skip = -int(self._memory.ctypes.data) % PAGE_BYTES
            self._bytes = self._memory[skip : skip + size]


def batches(runs: Sequence[StreamRuns]) -> Iterator[slice]:
    """Cut streams into batches that fit into the staging buffer."""
    begin = size = 0
    for position, run in enumerate(runs):
        mine = _pages(run.stream_bytes) * PAGE_BYTES
        if position > begin and size + mine > STAGING_BYTES:
            yield slice(begin, position)
            begin, size = position, 0
        size += mine
    if begin < len(runs):
        yield slice(begin, len(runs))


def _pages(length: int) -> int:
    return -(-length // PAGE_BYTES)


class InlineCarrier:
    """One connection and one buffer for each direction: ``store`` and ``load`` each belong to one copy thread.

    ``address`` is that of the present session, ``None`` while there is none; set by the IO thread.
    """

    def __init__(self, backend: Backend, patience_seconds: float) -> None:
        self.address: BulkAddress | None = None
        self._backend = backend
        self._patience_seconds = patience_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._context_lock = threading.Lock()
        self._out, self._in = BulkConnection(self._make_context), BulkConnection(self._make_context)
        self._out_staging, self._in_staging = Staging(), Staging()

    def close(self) -> None:
        """No copy thread runs any more."""
        self._out.close()
        self._in.close()
        if self._context is not None:
            self._context.term()

    def _make_context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """Made by the first copy, so that a worker with shared memory has none."""
        with self._context_lock:
            if self._context is None:
                self._context = zmq.Context()
            return self._context

    def _present(self) -> BulkAddress:
        address = self.address
        if address is None:
            raise DaemonUnreachable("The session ended before page bytes could travel.")
        return address

    # --- saving --------------------------------------------------------------------------------------------------

    def store(self, granted: ReserveResult, runs: Sequence[StreamRuns]) -> list[int]:
        """Gather, send, and wait for the last acknowledgement; see :class:`connector.client.carrier.Carrier`."""
        address = self._present()
        chosen = [(each, run) for each, run in zip(granted.reservations, runs, strict=True) if each]
        mine = [run for _, run in chosen]
        checksums: list[int] = []
        for batch in batches(mine):
            spans, streams = self._out_staging.plan(mine[batch])
            sums = self._backend.copy_spans_checksummed(spans, Direction.STORE, len(streams))
            checksums.extend(int(each) for each in finish(sums, stream_lengths(mine[batch])))
            reservations = [each for each, _ in chosen[batch]]
            frames = _puts(reservations, streams, address.frame_bytes)
            self._send(address, frames)
        return checksums

    def _send(self, address: BulkAddress, frames: Iterator[Frame]) -> None:
        try:
            self._out.transfer(
                address, frames, usable=self._same(address), patience_seconds=self._patience_seconds
            )
        except BaseException:
            self._out_staging.forget()
            raise

    def _same(self, address: BulkAddress) -> Callable[[], bool]:
        return lambda: self.address is address

    # --- loading ---------------------------------------------------------------------------------------------------

    def load(
        self, items: Sequence[LoadItem], runs: Sequence[StreamRuns], located: LocateResult, deadline: float
    ) -> list[LoadFailure | None]:
        """Ask, receive, scatter, and compare the checksums of the bytes that arrived in the pages."""
        address = self._present()
        failed: list[LoadFailure | None] = []
        for batch in batches(runs):
            spans, streams = self._in_staging.plan(runs[batch])
            frames = _gets(items, located, batch, streams, address.frame_bytes)
            try:
                self._in.transfer(
                    address,
                    frames,
                    usable=self._same(address),
                    patience_seconds=math.inf,
                    deadline=deadline,
                )
            except PagewardenError as error:
                return [*failed, *[_cause(error)] * (len(items) - len(failed))]
            sums = self._backend.copy_spans_checksummed(spans, Direction.LOAD, len(streams))
            arrived = finish(sums, stream_lengths(runs[batch]))
            failed.extend(
                None if int(found) == expected else LoadFailure.CHECKSUM
                for found, expected in zip(arrived, located.checksums[batch], strict=True)
            )
        return failed


def _puts(reservations: Sequence[int], streams: Sequence[memoryview], frame_bytes: int) -> Iterator[Frame]:
    for reservation, stream in zip(reservations, streams, strict=True):
        for offset in range(0, len(stream), frame_bytes):
            yield Frame(Put(reservation=reservation, offset=offset), stream[offset : offset + frame_bytes])


def _gets(
    items: Sequence[LoadItem],
    located: LocateResult,
    batch: slice,
    streams: Sequence[memoryview],
    frame_bytes: int,
) -> Iterator[Frame]:
    for item, word, stream in zip(items[batch], located.words[batch], streams, strict=True):
        for offset in range(0, len(stream), frame_bytes):
            data = stream[offset : offset + frame_bytes]
            yield Frame(
                Get(
                    lease=located.lease,
                    group=item.group,
                    chunk=item.chunk,
                    word=word,
                    offset=offset,
                    length=len(data),
                ),
                data,
            )


def _cause(error: PagewardenError) -> LoadFailure:
    if isinstance(error, LeaseEnded):
        return LoadFailure.GENERATION
    return LoadFailure.TIMEOUT if isinstance(error, DaemonUnreachable) else LoadFailure.ERROR
