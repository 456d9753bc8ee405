"""The IO thread of a client: one socket, every request's fate, heartbeats, and finding the daemon again."""

from __future__ import annotations

import logging
import os
import secrets
import socket as sockets
import threading
import time
from collections import deque
from typing import Any, Protocol

import zmq

from appliance.errors import (
    BootChanged,
    DaemonUnreachable,
    PagewardenError,
    RegistrationError,
    UnknownSession,
)
from appliance.protocol import MAX_CONTROL_BYTES, PROTOCOL_VERSION
from appliance.protocol.base import Role, parse
from appliance.protocol.client import endpoint_of
from appliance.protocol.messages import HelloResult
from appliance.protocol.wire import ID_BYTES, NO_ID, Request, pack_request, unpack_reply
from connector.client.calls import Call
from connector.client.jobs import ClientHealth, ClientOptions, ClientState

logger = logging.getLogger("vllm.pagewarden")

CONTROL_TIMEOUT_SECONDS = 2.0
FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 2.0
REFUSED_RETRY_SECONDS = 5.0
IDLE_POLL_SECONDS = 0.25
RESEND_SECONDS = 0.05
SILENT_HEARTBEATS = 3


class Member(Protocol):
    """What differs between a scheduler and a worker. All methods run on the IO thread and return at once."""

    role: Role

    def may_join(self) -> bool:
        """Whether nothing of an earlier session is in flight."""

    def join(self, hello: HelloResult) -> tuple[str, dict[str, Any]]:
        """The operation and arguments of attach or register."""

    def joined(self, result: dict[str, Any]) -> None:
        """Attach or register was granted. A PagewardenError counts as a refusal."""

    def refused(self, error: PagewardenError) -> None:
        """Attach or register failed; it will be tried again."""

    def heartbeat(self) -> dict[str, Any]:
        """The arguments of a heartbeat."""

    def heard(self, result: dict[str, Any]) -> None:
        """The reply to a heartbeat."""

    def hurried(self) -> bool:
        """Whether the next heartbeat should come soon: a registration is about to settle."""

    def lost(self) -> None:
        """The session is gone: what it held is gone too."""


TRANSITIONS: dict[ClientState, frozenset[ClientState]] = {
    ClientState.IDLE: frozenset({ClientState.CONNECTING, ClientState.STOPPED, ClientState.FORKED}),
    ClientState.CONNECTING: frozenset({ClientState.JOINING, ClientState.STOPPED, ClientState.FORKED}),
    ClientState.JOINING: frozenset(
        {
            ClientState.JOINED,
            ClientState.CONNECTING,
            ClientState.REFUSED,
            ClientState.STOPPED,
            ClientState.FORKED,
        }
    ),
    ClientState.JOINED: frozenset({ClientState.CONNECTING, ClientState.STOPPED, ClientState.FORKED}),
    ClientState.REFUSED: frozenset({ClientState.CONNECTING, ClientState.STOPPED, ClientState.FORKED}),
    ClientState.STOPPED: frozenset({ClientState.FORKED}),
    ClientState.FORKED: frozenset(),
}


class Link:
    """The connection of one client.

    ::

        IDLE ──start──► CONNECTING ──hello──► JOINING ──attach / register──► JOINED
                            ▲  ▲                 │                              │
                            │  │                 └──refused──► REFUSED          │
                            │  └────────after a pause─────────────┘             │
                            └──────────the daemon restarted, or forgot us───────┘

        any ──stop──► STOPPED          any ──fork──► FORKED (in the child)

    A daemon that is merely slow or away does not end JOINED: ``responsive`` is false until it answers again, and a
    session that it still knows goes on with all its leases.
    """

    def __init__(self, options: ClientOptions, member: Member) -> None:
        self._options = options
        self._member = member
        # Who may wait longer for a lookup does not call a daemon unresponsive sooner.
        self._patience_seconds = max(CONTROL_TIMEOUT_SECONDS, options.lookup_timeout_seconds)
        self._endpoint = endpoint_of(options.host, options.port)
        self._state = ClientState.IDLE
        self._reason = "not started"
        self._boot = NO_ID
        self._session = NO_ID
        self._responsive = False
        self._heartbeat_seconds = 1.0
        self._submitted: deque[Call] = deque()
        self._unsent: list[Call] = []
        self._in_flight: dict[int, Call] = {}
        self._next_id = 1
        self._control: Call | None = None
        self._hello: HelloResult | None = None
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._heartbeat_at = 0.0
        self._heard_at = 0.0
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"pagewarden-{member.role}", daemon=True)

    # --- any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the IO thread; once."""
        if self._state is ClientState.IDLE:
            self._move(ClientState.CONNECTING, "connecting")
            self._thread.start()

    @property
    def health(self) -> ClientHealth:
        """The state at this moment."""
        return ClientHealth(self._state, self._reason, self._boot)

    @property
    def identity(self) -> tuple[bytes, bytes]:
        """The daemon's boot and our session."""
        return self._boot, self._session

    @property
    def usable(self) -> bool:
        """Whether a request has a chance to be answered soon."""
        return self._state is ClientState.JOINED and self._responsive

    def submit(self, call: Call) -> Call:
        """Send a request; where that has no chance now, the call is done at once with an error."""
        if self._state is not ClientState.JOINED:
            call.complete(None, DaemonUnreachable(f"The daemon is not reachable: {self._reason}."))
        else:
            self._submitted.append(call)
            self.wake()
        return call

    def unresponsive(self) -> None:
        """A request was not answered in time: further ones are not worth a wait until something is heard."""
        self._responsive = False

    def wake(self) -> None:
        """Have the IO thread look at once."""
        if self._state is not ClientState.FORKED:
            os.eventfd_write(self._wake, 1)

    def heartbeat_soon(self) -> None:
        """Send a heartbeat now rather than later: it carries something that the daemon waits for."""
        self._heartbeat_at = 0.0
        self.wake()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Say bye and end the thread, bounded."""
        if self._state in (ClientState.FORKED, ClientState.STOPPED):
            return
        self._stopping.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        self._move(ClientState.STOPPED, "stopped")
        self._fail_all()

    def after_fork_in_child(self) -> None:
        """This is a child: the thread and the socket are the parent's."""
        self._state = ClientState.FORKED
        self._reason = "this process is a fork of the one that connected"

    # --- the IO thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._open(context)
        try:
            while not self._stopping.is_set():
                try:
                    self._turn(context)
                except Exception as error:
                    self._reason = f"{type(error).__name__}: {error}"
                    logger.exception("Pagewarden's IO thread failed and goes on")
                    time.sleep(FIRST_RETRY_SECONDS)
            self._say_bye()
        finally:
            self._socket.close(linger=200)
            context.term()

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # a request queued for a dead daemon would reach the next one
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(self._endpoint)
        return socket

    def _turn(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._wait()
        self._receive()
        self._advance()
        self._take_submitted()
        self._expire()
        self._send_unsent()
        if self._silent():
            self._socket.close(linger=0)
            self._socket = self._open(context)
            self._heard_at = time.monotonic()
            self.unresponsive()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        if dict(poller.poll(int(self._pause_seconds() * 1000))).get(self._wake):
            os.eventfd_read(self._wake)

    def _pause_seconds(self) -> float:
        if self._unsent:
            return RESEND_SECONDS
        now = time.monotonic()
        times = [now + IDLE_POLL_SECONDS]
        if self._state is ClientState.JOINED and self._control is None:
            times.append(self._heartbeat_at)
        elif self._control is None:
            times.append(max(self._retry_at, now + 0.01))
        times.extend(min(call.deadline, call.send_again_at) for call in self._in_flight.values())
        return max(0.0, min(times) - now)

    def _receive(self) -> None:
        while True:
            try:
                body = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = unpack_reply(body)
            self._heard_at = time.monotonic()
            self._responsive = True
            call = self._in_flight.pop(reply.request_id, None)
            if call is None:
                continue  # a second answer to a request that was sent twice, or one of an earlier session
            if call.op == "hello" and reply.error is None:
                self._boot = reply.boot
            if isinstance(reply.error, (BootChanged, UnknownSession)):
                self._start_over(str(reply.error))
            call.complete(reply.result if reply.error is None else None, reply.error)

    def _silent(self) -> bool:
        """Whether requests are out and nothing has been heard for too long: the connection may be dead."""
        limit = max(self._patience_seconds, SILENT_HEARTBEATS * self._heartbeat_seconds)
        return bool(self._in_flight) and time.monotonic() - self._heard_at > limit

    # --- states ------------------------------------------------------------------------------------------------------

    def _move(self, to: ClientState, reason: str) -> None:
        if to is self._state:
            return
        assert to in TRANSITIONS[self._state], (
            f"a client went from {self._state} to {to}: it would answer too early"
        )
        if to in (ClientState.JOINED, ClientState.REFUSED) or self._state is ClientState.JOINED:
            logger.info("Pagewarden %s client is %s: %s", self._member.role, to, reason)
        self._state, self._reason = to, reason

    def _start_over(self, reason: str) -> None:
        """The daemon does not know our session: it restarted, or gave us up for dead."""
        if self._state in (ClientState.JOINED, ClientState.JOINING, ClientState.REFUSED):
            self._member.lost()
            self._fail_all()
            self._move(ClientState.CONNECTING, reason)
            self._control = None
            self._session = NO_ID
            self._retry_at = 0.0

    def _fail_all(self) -> None:
        calls = [*self._in_flight.values(), *self._unsent, *self._submitted]
        self._in_flight.clear()
        self._unsent.clear()
        self._submitted.clear()
        for call in calls:
            call.complete(None, DaemonUnreachable("The daemon restarted or went away."))

    def _advance(self) -> None:
        now = time.monotonic()
        if self._control is not None:
            if not self._control.done:
                return
            done, self._control = self._control, None
            self._control_done(done, now)
        if now < self._retry_at:
            return
        if self._state is ClientState.REFUSED:
            self._move(ClientState.CONNECTING, "trying again after a refusal")
        if self._state is ClientState.CONNECTING:
            self._say_hello()
        elif self._state is ClientState.JOINING:
            self._join()
        elif self._state is ClientState.JOINED and now >= self._heartbeat_at:
            self._heartbeat_at = now + (0.1 if self._member.hurried() else self._heartbeat_seconds)
            self._control = self._queue(Call("heartbeat", self._member.heartbeat(), self._patience_seconds))

    def _control_done(self, call: Call, now: float) -> None:
        if call.error is not None:
            self._control_failed(call.error, now)
            return
        assert call.result is not None, "a control call would be done with nothing"
        self._retry_seconds = FIRST_RETRY_SECONDS
        if call.op == "hello":
            self._hello = parse(HelloResult, call.result)
            self._heartbeat_seconds = self._hello.heartbeat_seconds
            self._move(ClientState.JOINING, "the daemon answered")
        elif call.op == "heartbeat":
            self._member.heard(call.result)
        else:
            try:
                self._member.joined(call.result)
            except PagewardenError as error:
                self._control_failed(error, now)
                return
            self._heartbeat_at = 0.0
            self._move(ClientState.JOINED, "serving")

    def _control_failed(self, error: PagewardenError, now: float) -> None:
        self._reason = str(error)
        if self._state is ClientState.JOINING:
            self._member.refused(error)
        if self._state is ClientState.JOINING and isinstance(error, RegistrationError):
            logger.warning("Pagewarden refuses this engine: %s", error)
            self._move(ClientState.REFUSED, str(error))
            self._retry_at = now + REFUSED_RETRY_SECONDS
            return
        if self._state is ClientState.JOINING:
            self._move(ClientState.CONNECTING, str(error))
        if self._state is not ClientState.JOINED:
            self._retry_at = now + self._retry_seconds
            self._retry_seconds = min(LONGEST_RETRY_SECONDS, 2 * self._retry_seconds)

    def _say_hello(self) -> None:
        if self._session == NO_ID:
            self._session = secrets.token_bytes(ID_BYTES)
        self._boot = NO_ID
        args = {
            "role": self._member.role.value,
            "protocol": PROTOCOL_VERSION,
            "client": self._options.client_name,
            "engine_id": self._options.engine_id,
            "host": sockets.gethostname(),
            "pid": os.getpid(),
        }
        self._control = self._queue(Call("hello", args, self._patience_seconds))

    def _join(self) -> None:
        assert self._hello is not None, "a client joins a daemon that has not answered"
        if not self._member.may_join():
            self._retry_at = time.monotonic() + RESEND_SECONDS
            return
        try:
            op, args = self._member.join(self._hello)
        except PagewardenError as error:
            self._control_failed(error, time.monotonic())
            return
        self._control = self._queue(Call(op, args, self._patience_seconds))

    # --- sending -----------------------------------------------------------------------------------------------------

    def _queue(self, call: Call) -> Call:
        call.request_id = self._next_id
        self._next_id += 1
        self._unsent.append(call)
        return call

    def _take_submitted(self) -> None:
        while self._submitted:
            self._queue(self._submitted.popleft())

    def _expire(self) -> None:
        now = time.monotonic()
        overdue = [call for call in [*self._in_flight.values(), *self._unsent] if call.deadline <= now]
        for call in overdue:
            call.complete(None, DaemonUnreachable(f"The daemon did not answer '{call.op}' in time."))
            self._in_flight.pop(call.request_id, None)
            self.unresponsive()
        if overdue:
            self._unsent = [call for call in self._unsent if not call.done]
        for call in list(self._in_flight.values()):
            if call.send_again_at <= now:
                del self._in_flight[call.request_id]
                self._unsent.append(call)

    def _send_unsent(self) -> None:
        now = time.monotonic()
        while self._unsent:
            call = self._unsent[0]
            body = self._packed(call)
            if body is not None:
                try:
                    self._socket.send(body, zmq.NOBLOCK)
                except zmq.Again:
                    self.unresponsive()
                    return
                call.send_again_at = now + call.retry_seconds
                if not self._in_flight:
                    self._heard_at = now
                self._in_flight[call.request_id] = call
            self._unsent.pop(0)

    def _packed(self, call: Call) -> bytes | None:
        try:
            return pack_request(Request(call.op, call.request_id, self._boot, self._session, call.args))
        except PagewardenError as error:
            call.complete(None, error)
            return None

    def _say_bye(self) -> None:
        if self._state is ClientState.JOINED:
            self._take_submitted()
            self._unsent.append(Call("bye", {}, CONTROL_TIMEOUT_SECONDS))
            self._unsent[-1].request_id = self._next_id
            self._send_unsent()
