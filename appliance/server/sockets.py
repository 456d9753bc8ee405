"""The daemon's listening sockets."""

from __future__ import annotations

import zmq


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    *,
    part_bytes: int,
    send_queue: int,
    receive_queue: int | None = None,
) -> zmq.Socket[bytes]:
    """A ROUTER socket that says so when a reply cannot be delivered, and never takes a larger part than ``part_bytes``.

    Queues are in messages a peer; ZeroMQ's own bound holds where none is given.

    Raises:
        zmq.ZMQError: EADDRINUSE if the port is taken.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, part_bytes)
    socket.setsockopt(zmq.SNDHWM, send_queue)
    if receive_queue is not None:
        socket.setsockopt(zmq.RCVHWM, receive_queue)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket
