"""What the OpenAPI description says of access: the two ways to show who asks, and what each route needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.routing import BaseRoute

from web.guard import GuardedRoute

SCHEMES: dict[str, Any] = {
    "token": {"type": "http", "scheme": "bearer", "description": "An API token."},
    "login": {
        "type": "apiKey",
        "in": "cookie",
        "name": "pagewarden_login_6580",
        "description": "The cookie of a login; its name ends in the dashboard's port.",
    },
}


def describe_access(document: dict[str, Any], routes: Sequence[BaseRoute]) -> None:
    """Add the security schemes, and to each operation what it needs."""
    document["components"]["securitySchemes"] = SCHEMES
    for route in routes:
        if not isinstance(route, GuardedRoute) or not route.include_in_schema:
            continue
        for method in route.methods or ():
            operation = document["paths"][route.path_format][method.lower()]
            operation["security"] = [] if route.rule.public else [{"token": []}, {"login": []}]
            if route.rule.permission is not None:
                operation["x-permission"] = route.rule.permission.value
