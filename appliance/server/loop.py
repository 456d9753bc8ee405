"""The one loop: receives, answers, and lets time pass. It never waits for a disk and never blocks on a peer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import structlog
import zmq

from appliance.errors import CatalogUnavailable, PagewardenError
from appliance.protocol import MAX_CONTROL_BYTES
from appliance.server import membership
from appliance.server.background import Mailbox, Pulse
from appliance.server.core import Core, Phase
from appliance.server.dispatch import Dispatcher, Waiting
from appliance.server.sockets import bind_router
from appliance.sessions import Session, SessionEnd

_log = structlog.get_logger(__name__)

IDLE_POLL_MS = 250
MESSAGES_A_TURN = 256
EVICTIONS_A_TURN = 256
TICK_SECONDS = 0.1
SHADOW_SECONDS = 0.003
"""What the shadows of other policies may take of a tick."""
SEND_QUEUE = 4096


def bind_control(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """The ROUTER socket of control messages. Raises as :func:`bind_router`."""
    return bind_router(context, endpoint, part_bytes=MAX_CONTROL_BYTES, send_queue=SEND_QUEUE)


class Loop:
    """Turns of: receive and answer all that waits, run what was posted, then let time pass.

    Nothing expires before the socket was drained, so that a renewal that is queued is heard first.
    """

    def __init__(
        self,
        core: Core,
        dispatcher: Dispatcher,
        router: zmq.Socket[bytes],
        mailbox: Mailbox,
        submit_control: Callable[[int, Waiting], None],
    ) -> None:
        self.pulse = Pulse("loop")
        self.watched_attach_ids: tuple[int, ...] = ()
        self._core = core
        self._dispatcher = dispatcher
        self._router = router
        self._mailbox = mailbox
        self._submit_control = submit_control
        self._tokens = itertools.count(1)
        self._waiting: dict[int, tuple[list[bytes], Waiting]] = {}
        self._ticked_at = time.monotonic()
        self._stopping = False

    def stop(self) -> None:
        """End the loop after this turn; called on the loop thread."""
        self._stopping = True

    def run(self) -> None:
        """Until :meth:`stop`."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._mailbox.fileno(), zmq.POLLIN)
        while not self._stopping:
            try:
                poller.poll(IDLE_POLL_MS)
                self.turn()
            except Exception as error:  # noqa: BLE001  # no message and no timer may end the loop
                self.pulse.failed(error)

    def turn(self) -> None:
        """One turn; what it did is handed to the catalog at its end."""
        self.pulse.beat()
        drained = self._receive()
        for work in self._mailbox.take():
            work()
        now = time.monotonic()
        if now - self._ticked_at >= TICK_SECONDS:
            self._ticked_at = now
            self._let_time_pass(now, drained=drained)
        self._core.history.flush()

    def _receive(self) -> bool:
        """Answer what waits; ``True`` if nothing waits any more."""
        for _ in range(MESSAGES_A_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if len(frames) != 2:
                self._core.counters["messages_malformed"] += 1
                continue
            outgoing = self._dispatcher.handle(frames[1])
            if outgoing is None:
                continue
            if isinstance(outgoing, Waiting):
                self._wait_for_catalog(frames[:1], outgoing)
            elif not self._send(frames[:1], outgoing.body):
                outgoing.undo()
        return False

    def _send(self, envelope: list[bytes], body: bytes) -> bool:
        try:
            self._router.send_multipart([*envelope, body], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The peer is gone (EHOSTUNREACH) or does not read (EAGAIN): never wait for it.
            self._core.counters["replies_undeliverable"] += 1
            _log.debug("a reply could not be delivered", error=str(error))
            return False
        return True

    # --- durable requests -------------------------------------------------------------------------------------

    def _wait_for_catalog(self, envelope: list[bytes], waiting: Waiting) -> None:
        token = next(self._tokens)
        self._waiting[token] = (envelope, waiting)
        try:
            self._submit_control(token, waiting)
        except CatalogUnavailable as error:
            self.durable(token, error)

    def durable(self, token: int, error: PagewardenError | None) -> None:
        """The catalog has the row of ``token`` on disk, or refused it; runs on the loop thread."""
        envelope, waiting = self._waiting.pop(token)
        self._send(envelope, self._dispatcher.finish(waiting, error))

    # --- time ---------------------------------------------------------------------------------------------------

    def _let_time_pass(self, monotonic_seconds: float, *, drained: bool) -> None:
        core = self._core
        core.clock.advance(monotonic_seconds)
        if drained:
            for session in core.sessions.silent(self._session_ttl):
                membership.end_session(core, session, SessionEnd.TTL)
            core.leases.expire()
            core.reservations.expire()
        core.amnesty.advance(membership.attached(core), set(core.dead), core.clock())
        membership.bury(core)
        core.located &= core.leases.live.keys()
        self.watched_attach_ids = membership.watched(core)
        if core.phase in (Phase.READY, Phase.POPULATING):
            watermark = int(core.arena.account().capacity * core.settings.eviction_watermark)
            core.store.evict_down_to(watermark, at_most=EVICTIONS_A_TURN)
        if drained:
            core.shadows.work(SHADOW_SECONDS)

    def _session_ttl(self, session: Session) -> float:
        core = self._core
        engine = core.engines.engines.get(session.engine_id)
        namespace = (
            engine.fingerprint.namespace if engine is not None and engine.fingerprint is not None else ""
        )
        return core.ttls.get("session_ttl_seconds", namespace)
