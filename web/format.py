"""Numbers, sizes and durations as a person reads them."""

from __future__ import annotations

import json
import math
import unicodedata
from datetime import UTC, datetime
from typing import Any

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_WHITE = "\n\t"
_UNSEEN = frozenset(("Cc", "Cf", "Co", "Cs", "Zl", "Zp"))
_COUNT_UNITS = ("", "k", "M", "G", "T", "P")


def format_bytes(value: float) -> str:
    """A size in binary units with three significant digits: ``0 B``, ``640 KiB``, ``41.5 GiB``."""
    magnitude = float(abs(value))
    unit = 0
    while magnitude >= 1024 and unit < len(_BYTE_UNITS) - 1:
        magnitude /= 1024
        unit += 1
    if unit and f"{magnitude:.0f}" == "1024" and unit < len(_BYTE_UNITS) - 1:
        magnitude, unit = 1.0, unit + 1
    digits = 0 if unit == 0 or magnitude >= 100 else 1 if magnitude >= 10 else 2
    sign = "-" if value < 0 else ""
    return f"{sign}{magnitude:.{digits}f} {_BYTE_UNITS[unit]}"


def format_count(value: float) -> str:
    """A whole number with thin thousands marks: ``1,234,567``."""
    return f"{value:,.0f}"


def format_compact(value: float) -> str:
    """A large number in thousands, millions or more, with three significant digits: ``950``, ``4.12 k``, ``302 M``."""
    magnitude = float(abs(value))
    unit = 0
    while magnitude >= 999.5 and unit < len(_COUNT_UNITS) - 1:
        magnitude /= 1000
        unit += 1
    if unit == 0:
        return format_count(value)
    digits = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
    return f"{'-' if value < 0 else ''}{magnitude:.{digits}f} {_COUNT_UNITS[unit]}"


def format_percent(part: float, whole: float) -> str:
    """``part`` of ``whole`` in per cent; never rounds to 0 or 100 what is neither."""
    if whole <= 0:
        return "–"  # noqa: RUF001 - an en dash stands for "no value" in a table
    ratio = part / whole
    if 0 < ratio < 0.001:
        return "< 0.1 %"
    if 0.999 < ratio < 1:
        return "> 99.9 %"
    text = f"{ratio * 100:.1f}"
    return f"{text.removesuffix('.0')} %"


def format_duration(seconds: float | None) -> str:
    """A duration in at most two units: ``20 ms``, ``0.4 s``, ``35 s``, ``3 min 20 s``, ``2 h 5 min``, ``4 d 2 h``."""
    if seconds is None or not math.isfinite(seconds):
        return "–"  # noqa: RUF001 - as above
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "< 1 ms"
    if seconds < 9.95:
        text = f"{seconds:.1f}"
        return f"{text.removesuffix('.0')} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for size, name, smaller, smaller_name in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            large, rest = divmod(whole, size)
            small = rest // smaller
            return f"{large} {name} {small} {smaller_name}" if small else f"{large} {name}"
    return f"{whole} s"


def format_clock(unix_seconds: float) -> str:
    """The time of day in UTC, with the date unless it is today's: ``14:03:22 UTC``."""
    moment = datetime.fromtimestamp(unix_seconds, tz=UTC)
    today = datetime.now(tz=UTC).date()
    return moment.strftime("%H:%M:%S UTC" if moment.date() == today else "%Y-%m-%d %H:%M:%S UTC")


def format_iso(unix_seconds: float) -> str:
    """The moment in ISO 8601, for ``<time datetime>``."""
    return datetime.fromtimestamp(unix_seconds, tz=UTC).isoformat(timespec="seconds")


def format_value(value: Any) -> str:
    """A fingerprint field's value as it stands in JSON; an absent field says so."""
    if value is None:
        return "(absent)"
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, ensure_ascii=False, default=repr)


def shortened(text: str, limit: int = 160) -> str:
    """``text``, cut in its middle where it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def visible(text: str) -> str:
    """``text`` with every character that would not be seen, or would turn its neighbours around, replaced.

    Names are chosen by peers: a control or bidirectional character could make one look like another.
    """
    return "".join(
        character if character in _WHITE or unicodedata.category(character) not in _UNSEEN else "\ufffd"
        for character in text
    )


def short_namespace(namespace: str) -> str:
    """The first 12 hexadecimal digits of a namespace, enough to tell the namespaces of one daemon apart."""
    return namespace[:12]


def plural(count: int, one: str, many: str = "") -> str:
    """``1 engine``, ``2 engines``: the count with its noun."""
    return f"{format_count(count)} {one if count == 1 else many or one + 's'}"


def joined(words: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
