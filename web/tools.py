"""What the pages beside the overview share: their frame, and forms that are read without a parser of their own."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request
from fastapi.responses import HTMLResponse

from appliance.errors import InvalidField, PagewardenError
from web.state import base_url, state_of

MAX_FIELDS = 64


def render_tool(
    request: Request, template: str, *, error: PagewardenError | None = None, **values: Any
) -> HTMLResponse:
    """A page or fragment. ``error`` is shown on it, and its status is the answer's."""
    state = state_of(request)
    html = state.templates.get_template(template).render(
        here=request.url.path,
        base_url=base_url(request),
        web_version=state.version,
        daemon_endpoint=state.settings.endpoint.removeprefix("tcp://"),
        error=error,
        **values,
    )
    return HTMLResponse(html, error.http_status if error is not None else 200)


async def form_fields(request: Request) -> dict[str, str]:
    """The fields of a URL-encoded form; of a field that stands twice, the last.

    Raises:
        InvalidField: if the body is no form.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/x-www-form-urlencoded":
        raise InvalidField("The body is not application/x-www-form-urlencoded.", field="body")
    try:
        text = (await request.body()).decode("ascii")
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict"))
    except ValueError as error:
        raise InvalidField(f"The body is no form: {error}.", field="body") from error
