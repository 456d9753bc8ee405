"""The bulk socket: page bytes of clients that share no memory with the daemon, in bounded frames with credits.

A message is a header frame, the same MessagePack envelope as on the control socket, and one frame of raw bytes, which is
empty where nothing is carried. A frame carries at most ``BULK_FRAME_BYTES``; a client has at most ``BULK_CREDITS``
requests unanswered.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from appliance.protocol.base import Lenient, Message
from appliance.protocol.bounds import MAX_OBJECT_BYTES, U32, U64, GroupIndex

BULK_FRAME_BYTES: Final = 1024 * 1024
"""The most page bytes in one frame."""

BULK_CREDITS: Final = 8
"""Requests that a client may have unanswered on one connection, and so frames that wait for it anywhere."""

MAX_BULK_PART_BYTES: Final = 2 * BULK_FRAME_BYTES
"""A larger part ends its connection; below it, a frame that is too large gets a typed answer."""

Offset = Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)]


class Put(Message):
    """Bytes of a reservation's stream, from ``offset`` on, in the frame behind the header."""

    reservation: U64
    offset: Offset


class PutResult(Lenient):
    """They are in the arena: bytes of the stream that have arrived without a gap."""

    arrived: int


class Get(Message):
    """Asks for ``length`` bytes of a located object's stream from ``offset`` on.

    ``lease`` and ``word`` are those that ``locate`` answered.
    """

    lease: U64
    group: GroupIndex
    chunk: U32
    word: U64
    offset: Offset
    length: Annotated[int, Field(ge=1, le=BULK_FRAME_BYTES)]


class GetResult(Lenient):
    """The bytes are in the frame behind the header."""

    offset: int


BULK_REQUESTS: dict[str, type[Message]] = {"put": Put, "get": Get}
"""Every operation of the bulk socket."""
