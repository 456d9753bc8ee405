"""Tells the daemon which logins and tokens were used, so that their last use is known; what it misses is told again later."""

from __future__ import annotations

import asyncio

from appliance.errors import PagewardenError
from appliance.protocol.accounts import MAX_NAMED, NoteAccess
from appliance.protocol.messages import Done
from web.state import WebState

TELL_EVERY_SECONDS = 1.0


async def note_access(state: WebState) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(TELL_EVERY_SECONDS)
        tokens, logins = state.identities.take_unnoted()
        if tokens or logins:
            try:
                args = NoteAccess(tokens=tokens[:MAX_NAMED], logins=logins[:MAX_NAMED])
                await state.admin.note("note_access", args, Done)
            except PagewardenError:
                continue  # it is away; the next use is told again
