"""Forms of pages: URL-encoded, small, each field once."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request

from appliance.errors import InvalidField

MAX_FIELDS = 100


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; of a field that stands twice, the last.

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


def number_of(form: dict[str, str], name: str) -> float:
    """A number of a form.

    Raises:
        InvalidField: naming the field and its value.
    """
    text = form.get(name, "").strip()
    try:
        return float(text)
    except ValueError:
        raise InvalidField(f"The field '{name}' is {text[:40]!r}: it must be a number.", field=name) from None


def changed_fields(form: dict[str, str], *names: str) -> dict[str, Any]:
    """The named fields that were filled in."""
    return {name: form[name].strip() for name in names if form.get(name, "").strip()}
