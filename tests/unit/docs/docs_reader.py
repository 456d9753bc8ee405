"""Markdown as the tests of the documentation read it: tables, sections, links, and a schema's fields in words."""

from __future__ import annotations

import re
import types
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from appliance.protocol.base import MissReason

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"

_POWERS = {2**64 - 1: "2^64-1", 2**63 - 1: "2^63-1", 2**32 - 1: "2^32-1", 2**40: "2^40"}


def pages() -> list[Path]:
    """Every page of the documentation that this repository keeps."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def text_of(name: str) -> str:
    """A page by its path from the root."""
    return (ROOT / name).read_text()


def without_fences(text: str) -> str:
    """The text with code blocks taken out."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def section(text: str, heading: str) -> str:
    """What stands under a heading (given with its marks), down to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    lines = text.splitlines()
    assert heading in lines, f"there is no heading '{heading}'"
    begin = lines.index(heading) + 1
    fenced = False
    for position in range(begin, len(lines)):
        fenced ^= lines[position].startswith("```")
        if not fenced and re.match(rf"#{{1,{level}}} ", lines[position]):
            return "\n".join(lines[begin:position])
    return "\n".join(lines[begin:])


def headings(text: str) -> list[str]:
    """The headings of a page, with their marks."""
    return [line for line in without_fences(text).splitlines() if re.match(r"#{1,6} ", line)]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row but the headers and rules; an escaped bar stays in its cell."""
    found = []
    lines = without_fences(text).splitlines()
    for position, line in enumerate(lines):
        header = (
            position + 1 < len(lines)
            and set(lines[position + 1]) <= set("|-: ")
            and "|" in lines[position + 1]
        )
        if line.startswith("|") and not header and not set(line) <= set("|-: "):
            cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
            found.append([cell.strip().replace("\\|", "|") for cell in cells])
    return found


def first_words(text: str) -> list[str]:
    """The code in the first cell of each table row."""
    cells = [row[0] for row in rows(text)]
    return [cell.strip("`") for cell in cells if re.fullmatch(r"`[^`]+`", cell)]


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    words = re.sub(r"[`*]", "", heading.lstrip("#").strip()).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def links(text: str) -> list[str]:
    """Targets of the links and images of a page, those in code left out."""
    plain = re.sub(r"`[^`\n]*`", "``", without_fences(text))
    return re.findall(r"\]\(([^)\s]+)\)", plain) + re.findall(r"\b(?:src|srcset|href)=\"([^\"\s]+)\"", plain)


# --- schemas in words -------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """A bound as the documentation writes it."""
    return _POWERS.get(value, f"{value:,}") if isinstance(value, int) else f"{value:g}"


def shape_of(info: FieldInfo) -> str:
    """A field's type and bounds as the documentation writes them."""
    return _shape(info.annotation, list(info.metadata))


def default_of(info: FieldInfo) -> str:
    """A request field's default as the documentation writes it."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, bytes):
        return "empty" if not value else repr(value)
    if value is None:
        return "null"
    return (
        "empty" if value in ("", [], {}) else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def _shape(annotation: Any, bounds: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        unpacked = [m for each in extra for m in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return _shape(inner, [*unpacked, *bounds])
    if origin in (Union, types.UnionType):
        options = [option for option in get_args(annotation) if option is not type(None)]
        return " or ".join([*(_shape(option, bounds) for option in options), "null"])
    if origin is list:
        return f"list of {_plural(_shape(get_args(annotation)[0], []))}{_length(bounds, 'entries')}"
    if origin is dict:
        return (
            "map"
            if get_args(annotation)[1] is Any
            else f"map of {_plural(_shape(get_args(annotation)[1], []))}"
        )
    return _scalar(annotation, bounds)


def _scalar(annotation: Any, bounds: list[Any]) -> str:
    if annotation is Any:
        return "any value"
    if issubclass(annotation, BaseModel):
        return f"[`{annotation.__name__}`](#{annotation.__name__.lower()})"
    if annotation is MissReason:
        return "[miss reason](#miss-reasons)"
    if issubclass(annotation, (StrEnum, IntEnum)):
        return "one of " + ", ".join(f"`{member.value}`" for member in annotation)
    if annotation is bool:
        return "boolean"
    if issubclass(annotation, (int, float)):
        return f"{'integer' if annotation is int else 'float'}{_range(bounds)}"
    if annotation is bytes:
        return f"bytes{_length(bounds, 'bytes')}"
    assert annotation is str, f"{annotation} has no words here"
    patterns = [each.pattern for each in bounds if getattr(each, "pattern", None)]
    return f"string matching `{patterns[0]}`" if patterns else f"string{_length(bounds, 'characters')}"


def _plural(shape: str) -> str:
    if shape == "map":
        return "maps"
    kind, comma, rest = shape.partition(",")
    words = {"integer": "integers", "string": "strings", "float": "floats"}
    return words.get(kind, kind) + comma + (f"{rest} each" if comma else "")


def _bound(bounds: list[Any], name: str) -> Any:
    return next((getattr(each, name) for each in bounds if getattr(each, name, None) is not None), None)


def _range(bounds: list[Any]) -> str:
    least, above = _bound(bounds, "ge"), _bound(bounds, "gt")
    most, below = _bound(bounds, "le"), _bound(bounds, "lt")
    most = below - 1 if most is None and below is not None else most
    if above is not None:
        return f", above {number(above)}" + (f", at most {number(most)}" if most is not None else "")
    if least is None:
        return ""
    return f", {number(least)} to {number(most)}" if most is not None else f", at least {number(least)}"


def _length(bounds: list[Any], unit: str) -> str:
    least, most = _bound(bounds, "min_length"), _bound(bounds, "max_length")
    if most is None:
        return ""
    if least == most:
        return f", exactly {number(most)} {unit}"
    return f", {number(least)} to {number(most)} {unit}" if least else f", at most {number(most)} {unit}"
