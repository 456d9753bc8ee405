"""Pages from templates, with what the frame of every page needs."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from appliance.access import Permission
from appliance.errors import PagewardenError
from web.navigation import links_for
from web.state import base_url, state_of

DONE: dict[str, str] = {
    "saved": "Saved. It holds for new leases and for the next renewal of old ones.",
    "undone": "Undone.",
    "policy-changed": "The policy evicts from now on. It took over what is in the cache, and learns anew.",
    "user-added": "The user can log in now.",
    "user-changed": "The user was changed.",
    "user-removed": "The user was removed, with all logins and tokens.",
    "token-revoked": "The token is revoked.",
    "login-ended": "That login has ended.",
}
"""What a page says after a change, by the word in its address."""


def render(
    request: Request,
    template: str,
    *,
    error: PagewardenError | None = None,
    status: int = 200,
    **values: Any,
) -> HTMLResponse:
    """A page. ``error`` is shown above it, and its status is the answer's."""
    state = state_of(request)
    identity = getattr(request.state, "identity", None)

    def may(permission: str) -> bool:
        """Whether a control is worth showing: the reader has the permission, and it would work."""
        granted = Permission(permission)
        changes = granted.value.endswith(":write")
        return identity is not None and identity.may(granted) and not (changes and state.settings.read_only)

    html = state.templates.get_template(template).render(
        me=identity,
        may=may,
        links=links_for(identity),
        here=request.url.path,
        read_only=state.settings.read_only,
        done=DONE.get(request.query_params.get("done", ""), ""),
        error=error,
        base_url=base_url(request),
        web_version=state.version,
        now_unix=time.time(),
        daemon_endpoint=state.settings.endpoint.removeprefix("tcp://"),
        **values,
    )
    return HTMLResponse(html, error.http_status if error is not None else status)
