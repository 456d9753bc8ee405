"""The bulk socket and its thread: page bytes in and out for clients that share no memory with the daemon.

It touches the arena through tickets only, and never the loop's state. A peer that does not read is never waited for: what
could not be sent is read again later, and each peer has room for its credits and no more.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import zmq

from appliance.errors import (
    BootChanged,
    InvalidField,
    LeaseEnded,
    MalformedMessage,
    MessageTooLarge,
    PagewardenError,
    UnknownOperation,
)
from appliance.protocol.base import parse
from appliance.protocol.bulk import (
    BULK_CREDITS,
    BULK_FRAME_BYTES,
    BULK_REQUESTS,
    MAX_BULK_PART_BYTES,
    Get,
    GetResult,
    Put,
    PutResult,
)
from appliance.protocol.status import InlineStatus
from appliance.protocol.wire import (
    NO_ID,
    Request,
    pack_error,
    pack_result,
    salvage_request_id,
    unpack_request,
)
from appliance.server.background import Pulse
from appliance.server.sockets import bind_router
from appliance.tickets import TicketTable, WriteTicket

_log = structlog.get_logger(__name__)

IDLE_POLL_SECONDS = 0.25
MESSAGES_A_TURN = 64
SOCKET_QUEUE = 2 * BULK_CREDITS
"""Messages that ZeroMQ may hold for a peer in each direction; it counts what was sent with a delay, hence the factor."""
MAX_WAITING = 2 * BULK_CREDITS
"""Answers that may wait for a peer that does not read."""
FIRST_RETRY_SECONDS = 0.001
LONGEST_RETRY_SECONDS = 0.1
GIVE_UP_SECONDS = 30.0

Parts = tuple[bytes, bytes | bytearray]


def bind_bulk(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """The ROUTER socket of page bytes. Raises as :func:`bind_router`."""
    return bind_router(
        context, endpoint, part_bytes=MAX_BULK_PART_BYTES, send_queue=SOCKET_QUEUE, receive_queue=SOCKET_QUEUE
    )


@dataclass(slots=True)
class _Waiting:
    """Answers that a peer has no room for now; each is made when it is sent, so that no page bytes wait here."""

    answers: deque[Callable[[], Parts]] = field(default_factory=deque)
    since: float = 0.0
    retry_at: float = 0.0
    retry_seconds: float = FIRST_RETRY_SECONDS


class BulkServer:
    """Serves one bulk socket on a thread of its own.

    ``let_go`` is told, on the bulk thread, of each write that ended after its ticket was withdrawn.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        port: int,
        boot: bytes,
        tickets: TicketTable,
        let_go: Callable[[WriteTicket], None],
    ) -> None:
        self.pulse = Pulse("bulk")
        self.port = port
        self._router = router
        self._boot = boot
        self._tickets = tickets
        self._let_go = let_go
        self._counts: Counter[str] = Counter()
        self._waiting: dict[bytes, _Waiting] = {}
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="bulk", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread, bounded, and close the socket; whether it has ended."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return False
        self._router.close(linger=0)
        return True

    def status(self) -> InlineStatus:
        """What went through, for the status document; from any thread."""
        counts = self._counts
        return InlineStatus(
            port=self.port,
            sessions=self._tickets.session_count,
            frames_in=counts["frames_in"],
            bytes_in=counts["bytes_in"],
            frames_out=counts["frames_out"],
            bytes_out=counts["bytes_out"],
            refusals=counts["refusals"],
            stalls=counts["stalls"],
            stalled_peers=len(self._waiting),
            answers_dropped=counts["answers_dropped"],
        )

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._stopping.is_set():
            self.pulse.beat()
            try:
                poller.poll(self._pause_ms())
                self._turn()
            except Exception as error:  # noqa: BLE001  # no message may end the thread
                self.pulse.failed(error)
                self._stopping.wait(LONGEST_RETRY_SECONDS)

    def _pause_ms(self) -> int:
        if not self._waiting:
            return int(IDLE_POLL_SECONDS * 1000)
        due = min(waiting.retry_at for waiting in self._waiting.values()) - time.monotonic()
        return max(1, int(min(due, IDLE_POLL_SECONDS) * 1000))

    def _turn(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._answer(frames[0].bytes, [memoryview(frame.buffer) for frame in frames[1:]])
        now = time.monotonic()
        for peer in [peer for peer, waiting in self._waiting.items() if waiting.retry_at <= now]:
            self._resume(peer, now)

    def _answer(self, peer: bytes, parts: list[memoryview]) -> None:
        header = parts[0] if parts else memoryview(b"")
        try:
            request = self._checked(header, parts)
        except PagewardenError as error:
            refusal = self._refused(salvage_request_id(header), error)
            self._send(peer, lambda: refusal)
            return
        if request.op == "put":
            done = self._guarded(request, lambda: self._put(request, parts[1]))
            self._send(peer, lambda: done)
        else:
            self._send(peer, lambda: self._guarded(request, lambda: self._get(request)))

    def _checked(self, header: memoryview, parts: list[memoryview]) -> Request:
        if len(parts) != 2:
            raise MalformedMessage(
                f"A bulk message has a header and one frame of bytes, not {len(parts)} parts."
            )
        if len(parts[1]) > BULK_FRAME_BYTES:
            raise MessageTooLarge(
                f"A frame of {len(parts[1])} bytes is over the bound of {BULK_FRAME_BYTES}."
            )
        request = unpack_request(header)
        if request.op not in BULK_REQUESTS:
            raise UnknownOperation(
                f"There is no bulk operation '{request.op}'.", remedy=f"Use {', '.join(BULK_REQUESTS)}."
            )
        if request.boot not in (NO_ID, self._boot):
            raise BootChanged(
                "The request was meant for an earlier boot of the daemon.", remedy="Say hello again."
            )
        return request

    def _guarded(self, request: Request, work: Callable[[], Parts]) -> Parts:
        try:
            return work()
        except PagewardenError as error:
            return self._refused(request.request_id, error)
        except Exception as error:  # noqa: BLE001  # no message may end the thread
            self.pulse.failed(error)
            told = PagewardenError(
                f"The daemon failed on this request ({type(error).__name__}); its log says where."
            )
            return self._refused(request.request_id, told)

    def _refused(self, request_id: int, error: PagewardenError) -> Parts:
        self._counts["refusals"] += 1
        return pack_error(request_id, self._boot, error), b""

    def _put(self, request: Request, data: memoryview) -> Parts:
        args = parse(Put, request.args)
        if not len(data):
            raise InvalidField("The frame behind a put is empty; it carries the bytes.", field="bytes")
        ticket = self._tickets.begin_write(request.session, args.reservation, args.offset, len(data))
        end = 0
        try:
            ticket.segment.write_data(ticket.runs, args.offset, data)
            end = args.offset + len(data)
        finally:
            if self._tickets.end_write(ticket, end):
                self._let_go(ticket)
        self._counts["frames_in"] += 1
        self._counts["bytes_in"] += len(data)
        result = PutResult(arrived=ticket.arrived)
        return pack_result(request.request_id, self._boot, result.model_dump()), b""

    def _get(self, request: Request) -> Parts:
        args = parse(Get, request.args)
        ticket = self._tickets.read(request.session, args.lease, args.group, args.chunk)
        if args.offset + args.length > ticket.length:
            raise InvalidField(
                f"The field 'offset' is {args.offset} for {args.length} bytes, but the stream has {ticket.length}.",
                field="offset",
            )
        data = ticket.segment.read_data(ticket.runs, args.offset, args.length)
        # After the bytes: had the memory been reused while they were read, the generation would have gone up first.
        if args.word != ticket.word or ticket.segment.read_word(ticket.head) != ticket.word:
            raise LeaseEnded(
                f"Chunk {args.chunk} of group {args.group} is not the object that was located any more.",
                lease=args.lease,
                chunks=[args.chunk],
            )
        result = GetResult(offset=args.offset)
        return pack_result(request.request_id, self._boot, result.model_dump()), data

    # --- peers that do not read ----------------------------------------------------------------------------------

    def _send(self, peer: bytes, answer: Callable[[], Parts]) -> None:
        waiting = self._waiting.get(peer)
        if waiting is None:
            parts = answer()
            if self._sent(peer, parts):
                return
            # A small answer is kept; page bytes are read again.
            again = (lambda: parts) if not parts[1] else answer
            now = time.monotonic()
            waiting = self._waiting[peer] = _Waiting(since=now, retry_at=now + FIRST_RETRY_SECONDS)
            waiting.answers.append(again)
        elif len(waiting.answers) < MAX_WAITING:
            waiting.answers.append(answer)
        else:
            self._counts["answers_dropped"] += 1

    def _sent(self, peer: bytes, parts: Parts) -> bool:
        """Send without waiting; ``False`` if the peer has no room. What a peer that is gone would get is dropped."""
        try:
            self._router.send_multipart([peer, *parts], zmq.NOBLOCK, copy=not parts[1])
        except zmq.Again:
            self._counts["stalls"] += 1
            return False
        except zmq.ZMQError as error:
            self._counts["answers_dropped"] += 1
            _log.debug("a bulk answer could not be delivered", error=str(error))
            return True
        if parts[1]:
            self._counts["frames_out"] += 1
            self._counts["bytes_out"] += len(parts[1])
        return True

    def _resume(self, peer: bytes, now: float) -> None:
        waiting = self._waiting[peer]
        while waiting.answers:
            if not self._sent(peer, waiting.answers[0]()):
                if now - waiting.since > GIVE_UP_SECONDS:
                    break
                waiting.retry_seconds = min(LONGEST_RETRY_SECONDS, 2 * waiting.retry_seconds)
                waiting.retry_at = now + waiting.retry_seconds
                return
            waiting.answers.popleft()
            waiting.since, waiting.retry_seconds = now, FIRST_RETRY_SECONDS
        self._counts["answers_dropped"] += len(waiting.answers)
        del self._waiting[peer]
