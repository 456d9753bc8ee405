"""The static files: addresses that change with their content, and the recorded hashes of the third-party ones."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

STATIC_DIR = Path(__file__).parent / "static"
VENDOR_MANIFEST = STATIC_DIR / "vendor" / "vendor.json"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: ``url`` changes with its content.

    ``integrity`` is what a browser checks a third-party file against, and empty for this package's own: those may be
    replaced by an upgrade under a running process, and the page should not lose its style for that.
    """

    url: str
    integrity: str = ""


def vendored() -> list[dict[str, Any]]:
    """The third-party files with package, version, licence and the sha256 recorded when each was taken in."""
    entries: list[dict[str, Any]] = json.loads(VENDOR_MANIFEST.read_text("utf-8"))
    return entries


@cache
def asset(name: str) -> Asset:
    """The file ``name`` under ``static/``; a third-party one comes with its recorded hash, not its present one."""
    recorded = {f"vendor/{entry['file']}": str(entry["sha256"]) for entry in vendored()}.get(name)
    if recorded is None:
        digest = hashlib.sha256((STATIC_DIR / name).read_bytes()).hexdigest()
        return Asset(f"/static/{name}?v={digest[:16]}")
    integrity = base64.b64encode(bytes.fromhex(recorded)).decode()
    return Asset(f"/static/{name}?v={recorded[:16]}", f"sha256-{integrity}")
