"""From a message's bytes to a handler and back to bytes; whatever goes wrong on the way becomes a typed reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from appliance.errors import BootChanged, PagewardenError, UnknownOperation, UnknownSession
from appliance.protocol import messages as m
from appliance.protocol.base import parse
from appliance.protocol.wire import (
    NO_ID,
    Request,
    pack_error,
    pack_result,
    salvage_request_id,
    unpack_request,
)
from appliance.server import accounts, admin, membership, policy, reading, writing
from appliance.server.answers import Answer, Durable, nothing_to_undo
from appliance.server.core import Core
from appliance.server.report import status
from appliance.sessions import Session

_log = structlog.get_logger(__name__)

_IN_SESSION: dict[str, Callable[..., Answer | Durable]] = {
    "attach": membership.attach,
    "register": membership.register,
    "heartbeat": membership.heartbeat,
    "bye": membership.bye,
    "lookup": reading.lookup,
    "locate": reading.locate,
    "release": reading.release,
    "loads": reading.loads,
    "reserve": writing.reserve,
    "commit": writing.commit,
    "abort": writing.abort,
    "clear": admin.clear,
    "set_ttl": admin.set_ttl,
    "check": admin.check,
    "set_policy": policy.set_policy,
    **accounts.HANDLERS,
}
_DURABLE = frozenset({"clear", "set_ttl", "set_policy"}) | accounts.DURABLE
_REPEATABLE = frozenset({"heartbeat", "release", "loads", "note_access", "accounts"})
"""Harmless when repeated, so their replies are not kept."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A reply ready to send, and what takes back its grant if it cannot be."""

    body: bytes
    undo: Callable[[], None] = nothing_to_undo


@dataclass(frozen=True, slots=True)
class Waiting:
    """A reply that waits for the catalog: the loop sends it when the row is durable."""

    request: Request
    session: Session
    answer: Durable


class Dispatcher:
    """Runs one request at a time on the core.

    ``health`` gives the gates, catalog and loops of the status document. ``require_catalog`` raises CatalogUnavailable
    while the catalog is known to be down, so that a durable change is refused before it is made.
    """

    def __init__(
        self, core: Core, health: Callable[[], dict[str, Any]], require_catalog: Callable[[], None]
    ) -> None:
        self._core = core
        self._health = health
        self._require_catalog = require_catalog
        self._waiting: set[tuple[bytes, int]] = set()

    def handle(self, body: bytes) -> Outgoing | Waiting | None:
        """Answer one message. Never raises for anything a peer can send.

        ``None`` for a repeated request whose first copy still waits for the catalog: that one will be answered.
        """
        core = self._core
        request_id = 0
        try:
            request = unpack_request(body)
            request_id = request.request_id
            core.counters[f"requests_{request.op}" if request.op in m.REQUESTS else "requests_unknown"] += 1
            return self._answer(request)
        except PagewardenError as error:
            core.counters[f"refusals_{error.code}"] += 1
            return Outgoing(pack_error(request_id or salvage_request_id(body), core.boot, error))
        except Exception as error:  # noqa: BLE001  # no message may end the loop
            core.counters["handler_errors"] += 1
            _log.exception("a handler failed", request_id=request_id)
            told = PagewardenError(
                f"The daemon failed on this request ({type(error).__name__}); its log says where."
            )
            return Outgoing(pack_error(request_id, core.boot, told))

    def _answer(self, request: Request) -> Outgoing | Waiting | None:
        core = self._core
        model = m.REQUESTS.get(request.op)
        if model is None:
            raise UnknownOperation(
                f"There is no operation '{request.op}'.", remedy=f"Use {', '.join(m.REQUESTS)}."
            )
        if request.op == "ping":
            return self._packed(request, admin.ping(core))
        if request.op == "status":
            parse(model, request.args)
            return self._packed(request, Answer(status(core, **self._health())))
        if request.op == "hello":
            return self._packed(
                request, membership.hello(core, request.session, parse(m.Hello, request.args))
            )
        session = self._session(request)
        kept = session.replies.get(request.request_id)
        if kept is not None:
            core.counters["requests_repeated"] += 1
            return Outgoing(kept)
        core.sessions.heard(session)
        if request.op in _DURABLE:
            if (session.session_id, request.request_id) in self._waiting:
                return None
            self._require_catalog()
        answer = _IN_SESSION[request.op](core, session, parse(model, request.args))
        if isinstance(answer, Durable):
            self._waiting.add((session.session_id, request.request_id))
            return Waiting(request, session, answer)
        outgoing = self._packed(request, answer)
        if request.op in _REPEATABLE:
            return outgoing
        session.remember_reply(request.request_id, outgoing.body)

        def undo() -> None:
            # A retry must not be told of memory that was taken back: it is granted anew.
            session.forget_reply(request.request_id)
            outgoing.undo()

        return Outgoing(outgoing.body, undo)

    def _session(self, request: Request) -> Session:
        if request.boot not in (NO_ID, self._core.boot):
            raise BootChanged(
                "The request was meant for an earlier boot of the daemon.", remedy="Say hello again."
            )
        session = self._core.sessions.get(request.session)
        if session is None:
            raise UnknownSession("The daemon holds no such session.", remedy="Say hello again.")
        return session

    def _packed(self, request: Request, answer: Answer) -> Outgoing:
        try:
            body = pack_result(request.request_id, self._core.boot, answer.result.model_dump())
        except PagewardenError:
            answer.undo()
            raise
        return Outgoing(body, answer.undo)

    def finish(self, waiting: Waiting, error: PagewardenError | None) -> bytes:
        """The reply of a durable request whose row is on disk, or was refused."""
        self._waiting.discard((waiting.session.session_id, waiting.request.request_id))
        if error is not None:
            waiting.answer.undo()
            return pack_error(waiting.request.request_id, self._core.boot, error)
        body = pack_result(waiting.request.request_id, self._core.boot, waiting.answer.result.model_dump())
        waiting.session.remember_reply(waiting.request.request_id, body)
        return body
