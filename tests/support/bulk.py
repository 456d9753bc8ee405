"""A raw peer of the bulk socket, for frames that no client of ours would send."""

from __future__ import annotations

from typing import Any

import zmq

from appliance.protocol.client import endpoint_of
from appliance.protocol.wire import Reply, Request, pack_request, unpack_reply


class BulkPeer:
    """One DEALER with a session's identity, which may be false."""

    def __init__(self, port: int, boot: bytes, session: bytes, **options: int) -> None:
        self.boot = boot
        self.session = session
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(endpoint_of("127.0.0.1", port))
        self._next_id = 1

    def send(self, op: str, args: dict[str, Any], data: bytes = b"") -> int:
        """Send one request and give its id."""
        request_id = self._next_id
        self._next_id += 1
        header = pack_request(Request(op, request_id, self.boot, self.session, args))
        self.socket.send_multipart([header, data])
        return request_id

    def send_raw(self, *parts: bytes) -> None:
        """Send parts as they are."""
        self.socket.send_multipart(list(parts))

    def receive(self) -> tuple[Reply, bytes]:
        """The next answer."""
        assert self.socket.poll(20_000), "no answer at all"
        header, data = self.socket.recv_multipart()
        return unpack_reply(header), data

    def ask(self, op: str, args: dict[str, Any], data: bytes = b"") -> tuple[Reply, bytes]:
        """Send one request and wait for its answer."""
        request_id = self.send(op, args, data)
        reply, answer = self.receive()
        assert reply.request_id == request_id
        return reply, answer

    def close(self) -> None:
        """Close it."""
        self.socket.close(linger=0)
        self._context.term()
