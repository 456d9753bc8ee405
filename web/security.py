"""Headers that every response carries, whatever happened, and HEAD for every GET."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.errors import MessageTooLarge

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)

SECURITY_HEADERS: dict[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

MAX_BODY_BYTES = 256 * 1024

_IMMUTABLE = "public, max-age=31536000, immutable"


class SecurityHeaders:
    """An ASGI wrapper around the whole application, so that its own error answers are covered too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head_only = scope["method"] == "HEAD"
        inner = {**scope, "method": "GET"} if head_only else scope
        versioned = scope["path"].startswith("/static/") and scope["query_string"].startswith(b"v=")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                if versioned and message["status"] in (200, 304):
                    headers["Cache-Control"] = _IMMUTABLE
                else:
                    headers.setdefault("Cache-Control", "no-store")
            elif message["type"] == "http.response.body" and head_only:
                message = {**message, "body": b""}
            await send(message)

        await self._app(inner, _bounded(receive), send_with_headers)


def _bounded(receive: Receive) -> Receive:
    """The body of a request, as long as it is no longer than any that is wanted here."""
    received = 0

    async def receive_bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise MessageTooLarge(f"The body is longer than {MAX_BODY_BYTES:,} bytes.")
        return message

    return receive_bounded
