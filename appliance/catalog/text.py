"""Values as the catalog keeps them: canonical JSON."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any) -> str:
    """Canonical JSON: equal values give equal text.

    Raises:
        TypeError: if the value has no JSON form.
        ValueError: if it holds a number that is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
