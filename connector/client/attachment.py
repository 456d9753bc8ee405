"""How a worker attaches: to shared memory where it can, inline where it cannot or is told to."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

from appliance.errors import ArenaUnreachable, AttachmentNotProven, PagewardenError
from appliance.protocol.base import Transport
from appliance.protocol.liveness import INLINE_ATTACH_IDS
from appliance.protocol.messages import HelloResult
from connector.client.lock import AttachLock

logger = logging.getLogger("vllm.pagewarden")

AUTO = "auto"


class Attachment:
    """The transport of the present session and why it is that one. Belongs to the IO thread; others may read.

    ``asked`` is ``auto``, ``shared`` or ``inline``. With ``auto`` a worker goes inline when it cannot lock a file in the
    arena's directory, when the daemon does not see that lock, or when the arena cannot be mapped; a new session tries
    shared memory again.
    """

    def __init__(self, asked: str, arena_dir: str | None) -> None:
        self.transport: Transport | None = None
        self.reason = "not attached"
        self.lock: AttachLock | None = None
        self._asked = asked
        self._arena_dir = arena_dir
        self._directory: Path | None = None
        self._not_shared = "the option pagewarden.transport says so" if asked == Transport.INLINE else ""

    def begin(self, hello: HelloResult) -> dict[str, Any]:
        """The arguments of attach that depend on the transport.

        Raises:
            ArenaUnreachable: the only transport allowed cannot be had.
        """
        if not self._not_shared:
            try:
                attach_id = self._locked(Path(self._arena_dir or hello.arena_dir))
                self._choose(Transport.SHARED, "the arena's directory can be seen")
                return {"attach_id": attach_id, "transport": Transport.SHARED.value}
            except ArenaUnreachable as error:
                if self._asked != AUTO:
                    raise
                self._not_shared = str(error)
        if not hello.bulk_port:
            raise ArenaUnreachable("The daemon has no bulk socket.", remedy="Upgrade the daemon.")
        self._choose(Transport.INLINE, self._not_shared)
        attach_id = INLINE_ATTACH_IDS | secrets.randbits(62)
        return {"attach_id": attach_id, "transport": Transport.INLINE.value}

    def failed(self, error: PagewardenError) -> None:
        """The attach was refused, or the arena could not be mapped after it."""
        cannot_share = isinstance(error, AttachmentNotProven | ArenaUnreachable)
        if cannot_share and self._asked == AUTO and self.transport is Transport.SHARED:
            self._not_shared = str(error)
            self.release()

    def new_session(self) -> None:
        """What could not be shared with one daemon may be with the next."""
        if self._asked == AUTO:
            self._not_shared = ""

    def release(self) -> None:
        """Nothing of this process is in flight in shared memory."""
        if self.lock is not None:
            self.lock.release()
        self.lock = self._directory = None

    def _locked(self, directory: Path) -> int:
        if self.lock is None or self._directory != directory or not self.lock.present:
            self.lock = AttachLock(directory)
            self._directory = directory
        return self.lock.attach_id

    def _choose(self, transport: Transport, reason: str) -> None:
        if transport is not self.transport:
            level = logging.WARNING if transport is Transport.INLINE and self._asked == AUTO else logging.INFO
            logger.log(level, "Pagewarden moves page bytes %s: %s", transport, reason)
        self.transport, self.reason = transport, reason
