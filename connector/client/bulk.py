"""A connection to the daemon's bulk socket: frames under credits, every wait bounded. A copy thread has its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from appliance.errors import DaemonUnreachable, MalformedMessage
from appliance.protocol.bulk import MAX_BULK_PART_BYTES, Get, Put
from appliance.protocol.wire import Request, pack_request, unpack_reply

LOOK_SECONDS = 0.1
"""How often a wait looks whether the session is still the same."""


@dataclass(frozen=True, slots=True)
class BulkAddress:
    """Where the bulk socket of one session is, and its bounds."""

    endpoint: str
    boot: bytes
    session: bytes
    frame_bytes: int
    credits: int


class Window:
    """Credits: at most so many requests are out at a time, each known by its id until it is answered."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._out: dict[int, Any] = {}
        self._next = 1

    @property
    def open(self) -> bool:
        """Whether one more may be sent."""
        return len(self._out) < self._size

    @property
    def outstanding(self) -> int:
        """Requests that are not answered."""
        return len(self._out)

    @property
    def next_id(self) -> int:
        """The id of the request that is sent next."""
        return self._next

    def sent(self, request: Any) -> None:
        """The request with :attr:`next_id` is out."""
        assert self.open, "more frames than the daemon has room for would be under way"
        self._out[self._next] = request
        self._next += 1

    def answered(self, request_id: int) -> Any | None:
        """The request that an answer is for, ``None`` if it is for none that is out."""
        return self._out.pop(request_id, None)


@dataclass(frozen=True, slots=True)
class Frame:
    """One request: a put with its bytes, or a get with the place that its answer's bytes go to."""

    args: Put | Get
    data: memoryview

    @property
    def op(self) -> str:
        """The operation."""
        return "put" if isinstance(self.args, Put) else "get"


class BulkConnection:
    """One DEALER socket, opened when it is needed and dropped with whatever went wrong.

    A connection that failed is never used again: frames of it that the daemon still gets are for what was given up, and
    answers to them reach nobody.
    """

    def __init__(self, context: Callable[[], zmq.Context[zmq.Socket[bytes]]]) -> None:
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._address: BulkAddress | None = None
        self._window = Window(0)

    def close(self) -> None:
        """Drop the connection and what is on its way."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._address = None

    def transfer(
        self,
        address: BulkAddress,
        frames: Iterator[Frame],
        *,
        usable: Callable[[], bool],
        patience_seconds: float,
        deadline: float | None = None,
    ) -> None:
        """Send all frames and wait until each is answered.

        Raises:
            DaemonUnreachable: no answer for ``patience_seconds``, the deadline (on ``time.monotonic``) has come, or the
                session is not ``usable`` any more. PagewardenError: what the daemon answered.
        """
        try:
            self._transfer(self._open(address), address, frames, usable, patience_seconds, deadline)
        except BaseException:
            self.close()
            raise

    def _open(self, address: BulkAddress) -> zmq.Socket[bytes]:
        if self._socket is not None and self._address == address:
            return self._socket
        self.close()
        socket = self._context().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BULK_PART_BYTES)
        socket.setsockopt(zmq.SNDHWM, address.credits)
        socket.setsockopt(zmq.RCVHWM, address.credits)
        socket.connect(address.endpoint)
        self._socket, self._address, self._window = socket, address, Window(address.credits)
        return socket

    def _transfer(
        self,
        socket: zmq.Socket[bytes],
        address: BulkAddress,
        frames: Iterator[Frame],
        usable: Callable[[], bool],
        patience_seconds: float,
        deadline: float | None,
    ) -> None:
        window = self._window
        following = next(frames, None)
        heard_at = time.monotonic()
        while following is not None or window.outstanding:
            now = time.monotonic()
            left = heard_at + patience_seconds - now
            left = left if deadline is None else min(left, deadline - now)
            if left <= 0 or not usable():
                raise DaemonUnreachable(
                    "The daemon did not take or send the next page bytes in time."
                    if left <= 0
                    else "The session ended while page bytes were on their way."
                )
            wanted = zmq.POLLIN | (zmq.POLLOUT if following is not None and window.open else 0)
            events = socket.poll(max(1, int(min(left, LOOK_SECONDS) * 1000)), wanted)
            if events & zmq.POLLIN and self._receive(socket):
                heard_at = time.monotonic()
            if events & zmq.POLLOUT and following is not None and self._sent(socket, address, following):
                following = next(frames, None)

    def _sent(self, socket: zmq.Socket[bytes], address: BulkAddress, frame: Frame) -> bool:
        header = pack_request(
            Request(frame.op, self._window.next_id, address.boot, address.session, frame.args.model_dump())
        )
        data: memoryview | bytes = frame.data if frame.op == "put" else b""
        try:
            socket.send_multipart([header, data], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self._window.sent(frame)
        return True

    def _receive(self, socket: zmq.Socket[bytes]) -> bool:
        """Take in what is there; whether a request of ours was answered."""
        answered = False
        while True:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return answered
            if len(parts) != 2:
                raise MalformedMessage(f"A bulk answer has {len(parts)} parts.")
            reply = unpack_reply(parts[0].bytes)
            frame = self._window.answered(reply.request_id)
            if reply.error is not None:
                raise reply.error
            if frame is None:
                continue
            answered = True
            if frame.op == "get":
                data = memoryview(parts[1].buffer)
                if len(data) != len(frame.data):
                    raise MalformedMessage(f"{len(data)} bytes came where {len(frame.data)} were asked for.")
                np.frombuffer(frame.data, dtype=np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
