"""Audit entries, made of what an admin's request says about who asks."""

from __future__ import annotations

import secrets
import time
from typing import Any, Protocol

from appliance.catalog.accounts import AuditEntry


class Requested(Protocol):
    """A request that says in whose name it is made, and from where."""

    @property
    def requested_by(self) -> str:
        """Who asks."""

    @property
    def requested_from(self) -> str:
        """From which address."""


def audit_entry(
    request: Requested, action: str, subject: str, *, before: Any = None, after: Any = None
) -> AuditEntry:
    """The entry for one change; ``before`` and ``after`` hold no secret."""
    return AuditEntry(
        entry_id=secrets.token_hex(8),
        at_unix=time.time(),
        actor=request.requested_by,
        origin=request.requested_from,
        action=action,
        subject=subject,
        before=before,
        after=after,
    )
