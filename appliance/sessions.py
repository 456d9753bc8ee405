"""Sessions: one per connected process and role. Silence makes a session suspect; only its TTL or its death ends it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from appliance.protocol.base import Role, Transport

SUSPECT_AFTER_HEARTBEATS = 3
_REPLIES_KEPT = 64
_REPLY_BYTES_KEPT = 1024 * 1024


class SessionState(StrEnum):
    """The life of a session.

    ::

        LIVE ◄──heard──► SUSPECT          silence is no proof of death
          │                 │
          └──► ENDED ◄──────┘             bye, TTL, proven dead, replaced
    """

    LIVE = "live"
    SUSPECT = "suspect"
    ENDED = "ended"


class SessionEnd(StrEnum):
    """Why a session ended."""

    BYE = "bye"
    TTL = "ttl"
    DIED = "died"
    REPLACED = "replaced"


@dataclass(slots=True)
class Session:
    """One session; ``heard_at`` is on the lease clock. ``attach_id`` is 0 until its process has shown a lock."""

    session_id: bytes
    role: Role
    engine_id: str
    client: str
    host: str
    pid: int
    heard_at: float
    attach_id: int = 0
    rank: int = -1
    transport: Transport = Transport.SHARED
    state: SessionState = SessionState.LIVE
    replies: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    reply_bytes: int = 0

    def remember_reply(self, request_id: int, body: bytes) -> None:
        """Keep a reply for a retry of the same request; the oldest go first, the newest is always kept."""
        self.reply_bytes += len(body) - len(self.replies.pop(request_id, b""))
        self.replies[request_id] = body
        while len(self.replies) > 1 and (
            len(self.replies) > _REPLIES_KEPT or self.reply_bytes > _REPLY_BYTES_KEPT
        ):
            _, dropped = self.replies.popitem(last=False)
            self.reply_bytes -= len(dropped)

    def forget_reply(self, request_id: int) -> None:
        """What a kept reply grants was taken back."""
        self.reply_bytes -= len(self.replies.pop(request_id, b""))


@dataclass(slots=True)
class SessionTable:
    """All sessions that have not ended."""

    clock: Callable[[], float]
    heartbeat_seconds: float
    live: dict[bytes, Session] = field(default_factory=dict)

    def open(self, session: Session) -> Session:
        """Take a session in; a second hello with the same id finds the first's session."""
        return self.live.setdefault(session.session_id, session)

    def get(self, session_id: bytes) -> Session | None:
        """The session, if it has not ended."""
        return self.live.get(session_id)

    def heard(self, session: Session) -> None:
        """Any message proves that the peer is there."""
        session.heard_at = self.clock()
        session.state = SessionState.LIVE

    def remove(self, session: Session) -> None:
        """The session has ended."""
        self.live.pop(session.session_id, None)
        session.state = SessionState.ENDED
        session.replies.clear()

    def silent(self, ttl_of: Callable[[Session], float]) -> list[Session]:
        """Sessions whose TTL has passed; marks the suspect ones on the way."""
        now = self.clock()
        due = []
        for session in self.live.values():
            silence = now - session.heard_at
            if silence > ttl_of(session):
                due.append(session)
            elif silence > SUSPECT_AFTER_HEARTBEATS * self.heartbeat_seconds:
                session.state = SessionState.SUSPECT
        return due
