"""Messages as bytes: one MessagePack map each, checked before anything reads it.

A request is ``{v, op, id, boot, session, args}``, a reply ``{v, id, boot, ok, result | error}``. Nothing is unpickled;
maps have string keys only; sizes are bounded on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from appliance.errors import (
    InvalidField,
    MalformedMessage,
    MessageTooLarge,
    PagewardenError,
    UnsupportedVersion,
    from_wire,
)
from appliance.protocol import MAX_CONTROL_BYTES, PROTOCOL_VERSION

ID_BYTES = 16
"""Length of boot ids, session ids and the arena's nonce."""

NO_ID = b""
"""Stands for a boot or session that is not known yet: only hello, status and ping may carry it."""

MAX_REQUEST_ID = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came: ``args`` is still to be checked against the operation's schema."""

    op: str
    request_id: int
    boot: bytes
    session: bytes
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply: ``result`` where ``error`` is ``None``."""

    request_id: int
    boot: bytes
    result: dict[str, Any]
    error: PagewardenError | None


def pack_request(request: Request) -> bytes:
    """The bytes of a request.

    Raises:
        MessageTooLarge: before anything is sent, so that the connection survives.
    """
    return _pack(
        {
            "v": PROTOCOL_VERSION,
            "op": request.op,
            "id": request.request_id,
            "boot": request.boot,
            "session": request.session,
            "args": request.args,
        }
    )


def pack_result(request_id: int, boot: bytes, result: dict[str, Any]) -> bytes:
    """The bytes of a reply that grants what was asked."""
    return _pack({"v": PROTOCOL_VERSION, "id": request_id, "boot": boot, "ok": True, "result": result})


def pack_error(request_id: int, boot: bytes, error: PagewardenError) -> bytes:
    """The bytes of a typed refusal."""
    return _pack(
        {"v": PROTOCOL_VERSION, "id": request_id, "boot": boot, "ok": False, "error": error.to_wire()}
    )


def unpack_request(body: bytes | memoryview) -> Request:
    """The request in ``body``.

    Raises:
        MalformedMessage, MessageTooLarge, UnsupportedVersion, InvalidField: with a sentence for the peer's log.
    """
    envelope = _unpack(body)
    _check_version(envelope)
    op = envelope.get("op")
    if not isinstance(op, str) or len(op) > 64:
        raise InvalidField(f"The field 'op' is {_shown(op)}; it names an operation.", field="op")
    args = envelope.get("args", {})
    if not isinstance(args, dict):
        raise InvalidField(f"The field 'args' is {_shown(args)}; it must be a map.", field="args")
    return Request(
        op, _request_id(envelope), _identity(envelope, "boot"), _identity(envelope, "session"), args
    )


def unpack_reply(body: bytes | memoryview) -> Reply:
    """The reply in ``body``, with its error rebuilt from the tree.

    Raises:
        MalformedMessage, MessageTooLarge, UnsupportedVersion, InvalidField.
    """
    envelope = _unpack(body)
    _check_version(envelope)
    request_id, boot = _request_id(envelope), _identity(envelope, "boot")
    if envelope.get("ok") is True:
        result = envelope.get("result")
        if not isinstance(result, dict):
            raise MalformedMessage("A reply has no 'result' map.")
        return Reply(request_id, boot, result, None)
    error = envelope.get("error")
    if not isinstance(error, dict):
        raise MalformedMessage("A reply has neither a result nor an error.")
    return Reply(request_id, boot, {}, from_wire(error))


def salvage_request_id(body: bytes | memoryview) -> int:
    """The id of a request whose body was refused, so that the refusal reaches its sender; 0 if it has none."""
    try:
        return _request_id(_unpack(body))
    except PagewardenError:
        return 0


def _pack(envelope: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(envelope, use_bin_type=True)
    if len(packed) > MAX_CONTROL_BYTES:
        raise MessageTooLarge(f"A message of {len(packed)} bytes is over the bound of {MAX_CONTROL_BYTES}.")
    return packed


def _unpack(body: bytes | memoryview) -> dict[str, Any]:
    if len(body) > MAX_CONTROL_BYTES:
        raise MessageTooLarge(f"A message of {len(body)} bytes is over the bound of {MAX_CONTROL_BYTES}.")
    try:
        envelope = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=False,
            use_list=True,
            max_ext_len=0,
        )
    except Exception as error:
        raise MalformedMessage(f"The message is not one MessagePack map ({type(error).__name__}).") from error
    if not isinstance(envelope, dict) or not all(isinstance(key, str) for key in envelope):
        raise MalformedMessage("The message is not a MessagePack map with string keys.")
    return envelope


def _check_version(envelope: dict[str, Any]) -> None:
    version = envelope.get("v")
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise UnsupportedVersion(
            f"The message speaks protocol version {_shown(version)}; this side speaks {PROTOCOL_VERSION}.",
            remedy="Install the same version of pagewarden on both sides.",
            ours=PROTOCOL_VERSION,
        )


def _request_id(envelope: dict[str, Any]) -> int:
    request_id = envelope.get("id")
    if (
        not isinstance(request_id, int)
        or isinstance(request_id, bool)
        or not 0 <= request_id <= MAX_REQUEST_ID
    ):
        raise InvalidField(
            f"The field 'id' is {_shown(request_id)}; it must be an unsigned 64-bit number.", field="id"
        )
    return request_id


def _identity(envelope: dict[str, Any], name: str) -> bytes:
    value = envelope.get(name, NO_ID)
    if not isinstance(value, bytes) or len(value) not in (0, ID_BYTES):
        raise InvalidField(
            f"The field '{name}' is {_shown(value)}; it must be {ID_BYTES} bytes or none.", field=name
        )
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
