"""A plain request client: one DEALER socket, one request at a time, every wait bounded.

For admin tools and the web process. Engines use the connector's own client, which never blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import zmq
from pydantic import BaseModel

from appliance.errors import BootChanged, DaemonUnreachable, PagewardenError, UnknownSession
from appliance.protocol import MAX_CONTROL_BYTES, PROTOCOL_VERSION
from appliance.protocol.base import Message, Role, parse
from appliance.protocol.messages import HelloResult
from appliance.protocol.wire import ID_BYTES, NO_ID, Request, pack_request, unpack_reply

_R = TypeVar("_R", bound=BaseModel)

SESSIONLESS = frozenset({"ping", "status"})
"""Operations that need no hello, so that a page still answers right after a restart."""


class RequestClient:
    """One peer of the daemon. Not thread-safe: a thread has its own.

    ``admin_secret`` is asked for the daemon's secret at each hello, since another start has another one; what needs no
    session needs no secret.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        client_name: str,
        timeout_seconds: float = 2.0,
        role: Role = Role.ADMIN,
        engine_id: str = "",
        admin_secret: Callable[[], str] = str,
    ) -> None:
        self._admin_secret = admin_secret
        self._endpoint = endpoint
        self._client_name = client_name
        self._timeout_seconds = timeout_seconds
        self._role = role
        self._engine_id = engine_id
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._session = NO_ID
        self._boot = NO_ID
        self._next_id = 1

    def __enter__(self) -> RequestClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def boot(self) -> bytes:
        """The boot id of the last reply."""
        return self._boot

    def call(self, op: str, args: Message | dict[str, Any], result: type[_R]) -> _R:
        """Send one request and wait for its reply.

        A session that the daemon no longer knows is opened again and the request repeated once.

        Raises:
            DaemonUnreachable: after the timeout; PagewardenError: what the daemon answered.
        """
        values = args.model_dump(mode="python", exclude_defaults=True) if isinstance(args, Message) else args
        if op not in SESSIONLESS and self._session == NO_ID:
            self._hello()
        try:
            return parse(result, self._exchange(op, values))
        except (BootChanged, UnknownSession):
            self._hello()
            return parse(result, self._exchange(op, values))

    def close(self) -> None:
        """Close the socket; the session ends by its TTL."""
        self._drop_socket()
        self._context.term()

    def hello(self) -> HelloResult:
        """Open a new session; :meth:`call` does so by itself where one is needed.

        Raises:
            DaemonUnreachable: after the timeout; PagewardenError: what the daemon answered.
        """
        return self._hello()

    def _hello(self) -> HelloResult:
        session = secrets.token_bytes(ID_BYTES)
        said: dict[str, Any] = {
            "role": self._role.value,
            "protocol": PROTOCOL_VERSION,
            "client": self._client_name,
        }
        if self._role is Role.ADMIN:
            said["secret"] = self._admin_secret()
        if self._engine_id:
            said["engine_id"] = self._engine_id
        self._session, self._boot = session, NO_ID
        try:
            return parse(HelloResult, self._exchange("hello", said))
        except PagewardenError:
            self._session = NO_ID  # the next call says hello again
            raise

    def _exchange(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        socket = self._open_socket()
        request_id = self._next_id
        self._next_id += 1
        session, boot = (NO_ID, NO_ID) if op in SESSIONLESS else (self._session, self._boot)
        body = pack_request(Request(op, request_id, boot, session, args))
        deadline = time.monotonic() + self._timeout_seconds
        if not socket.poll(self._left_ms(deadline), zmq.POLLOUT):
            raise self._unreachable()
        socket.send(body, zmq.NOBLOCK)
        while socket.poll(self._left_ms(deadline), zmq.POLLIN):
            reply = unpack_reply(socket.recv(zmq.NOBLOCK))
            if reply.request_id != request_id:
                continue  # a late answer to a request that was given up
            self._boot = reply.boot
            if reply.error is not None:
                raise reply.error
            return reply.result
        raise self._unreachable()

    def _unreachable(self) -> DaemonUnreachable:
        self._drop_socket()
        return DaemonUnreachable(
            f"The daemon at {self._endpoint} did not answer within {self._timeout_seconds:g} s.",
            remedy="Check that `pagewarden server` runs and that host and port are right.",
            endpoint=self._endpoint,
        )

    @staticmethod
    def _left_ms(deadline: float) -> int:
        return max(0, int((deadline - time.monotonic()) * 1000))

    def _open_socket(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # a queued request would reach the next daemon
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
            socket.connect(self._endpoint)
            self._socket = socket
        return self._socket

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


def endpoint_of(host: str, port: int) -> str:
    """The ZeroMQ endpoint of a host and port; an IPv6 address gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
