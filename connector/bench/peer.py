"""What a lookup benchmark measures against: a daemon of its own, a bare echo, and a socket that only sends and waits."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import socket as sockets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq
from pydantic import BaseModel

from appliance.errors import DaemonUnreachable
from appliance.protocol import MAX_CONTROL_BYTES, PROTOCOL_VERSION
from appliance.protocol.base import Role, parse
from appliance.protocol.client import RequestClient, endpoint_of
from appliance.protocol.messages import Done
from appliance.protocol.status import DaemonStatus
from appliance.protocol.wire import ID_BYTES, NO_ID, Request, pack_request, unpack_reply

HOST = "127.0.0.1"
START_SECONDS = 120.0
ANSWER_MS = 60_000
_R = TypeVar("_R", bound=BaseModel)


class Peer:
    """One session with the daemon over one socket, in the plainest way there is."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], port: int, role: Role, engine_id: str
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        self._socket.connect(endpoint_of(HOST, port))
        self._session, self._boot = secrets.token_bytes(ID_BYTES), NO_ID
        self._next_id = 0
        self.ask(
            "hello",
            {
                "role": role.value,
                "protocol": PROTOCOL_VERSION,
                "client": "pagewarden-bench",
                "engine_id": engine_id,
            },
            Done,
        )

    def pack(self, op: str, args: dict[str, Any]) -> bytes:
        """A request ready to send, with an id of its own."""
        self._next_id += 1
        return pack_request(Request(op, self._next_id, self._boot, self._session, args))

    def round_trip(self, body: bytes) -> tuple[float, bytes]:
        """Seconds from the send to the reply, and the reply."""
        began = time.perf_counter()
        self._socket.send(body)
        reply = self._socket.recv()
        return time.perf_counter() - began, reply

    def ask(self, op: str, args: dict[str, Any], result: type[_R]) -> _R:
        """Send one request and read its reply.

        Raises:
            PagewardenError: what the daemon answered. zmq.Again: it did not.
        """
        _, body = self.round_trip(self.pack(op, args))
        reply = unpack_reply(body)
        self._boot = reply.boot
        if reply.error is not None:
            raise reply.error
        return parse(result, reply.result)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


@contextmanager
def running_daemon(l1_bytes: int, extent_kib: int) -> Iterator[tuple[int, Path]]:
    """A daemon of its own with memory, catalog and port of its own; gives its port and arena directory."""
    directory = Path(tempfile.mkdtemp(prefix="pagewarden-bench-", dir=_shared_memory()))
    port = _free_port()
    settings = {
        "host": HOST,
        "port": port,
        "l1-size-gb": l1_bytes / (1 << 30),
        "extent-kib": extent_kib,
        "arena-dir": directory / "arena",
        "catalog": directory / "catalog.db",
        "run-dir": directory / "run",
        "log-format": "json",
        "engine-inflight-share": 1.0,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    with (directory / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance.cli", "server", "--no-web", *flags], stdout=log, stderr=log
        )
    try:
        _wait_ready(process, port, directory / "daemon.log")
        yield port, directory / "arena"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def status_of(port: int) -> DaemonStatus:
    """The status document."""
    with RequestClient(
        endpoint_of(HOST, port), client_name="pagewarden-bench", timeout_seconds=30.0
    ) as client:
        return client.call("status", {}, DaemonStatus)


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the daemon ended: {log.read_text()[-2000:]}")
        try:
            if status_of(port).ready:
                return
        except DaemonUnreachable:
            continue
        time.sleep(0.1)
    raise RuntimeError(f"the daemon was not ready in {START_SECONDS:g} s: {log.read_text()[-2000:]}")


def _shared_memory() -> Path | None:
    mount = Path("/dev/shm")  # noqa: S108  # the daemon's own default; the arena must be in memory
    return mount if os.access(mount, os.W_OK) else None


def _free_port() -> int:
    with sockets.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _serve_echo(port: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint_of(HOST, port))
    while True:
        router.send_multipart(router.recv_multipart())


@contextmanager
def running_echo(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[zmq.Socket[bytes]]:
    """A process that sends back what it gets, and a socket to it: the bare ZeroMQ round trip."""
    port = _free_port()
    process = multiprocessing.get_context("spawn").Process(target=_serve_echo, args=(port,), daemon=True)
    process.start()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
    socket.connect(endpoint_of(HOST, port))
    try:
        yield socket
    finally:
        socket.close()
        process.kill()
        process.join()
