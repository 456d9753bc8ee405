"""Accounts of each role in a real catalog, and what their owners send to be let in."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from appliance.catalog.accounts import AccountRow, TokenChanged, UserChanged
from appliance.catalog.apply import apply_control
from appliance.catalog.connections import write_transaction
from appliance.catalog.database import open_for_daemon
from appliance.credentials import Issued, hash_password, issue_token

ROLES = ("viewer", "operator", "admin")
PASSWORD = "a password for tests"


@cache
def password_hash() -> str:
    """Made once: it is slow on purpose."""
    return hash_password(PASSWORD)


@dataclass(frozen=True)
class Access:
    """A user named after each role, and a token of each."""

    tokens: dict[str, Issued]

    @classmethod
    def made_in(cls, catalog: Path) -> Access:
        """Make them in a new catalog."""
        tokens = {role: issue_token() for role in ROLES}
        rows: list[AccountRow] = []
        now = time.time()
        for role, issued in tokens.items():
            rows.append(UserChanged(role, role, password_hash(), now, "tests", now))
            rows.append(
                TokenChanged(issued.public_id, f"of {role}", role, role, (), issued.secret_hash, now, "tests")
            )
        write(catalog, *rows)
        return cls(tokens)

    def headers(self, role: str) -> dict[str, str]:
        """What a program of that role sends."""
        return {"Authorization": f"Bearer {self.tokens[role].text}"}

    def context(self, browser: Any, role: str = "admin", **options: Any) -> Any:
        """A browser that is let in by a token."""
        return browser.new_context(extra_http_headers=self.headers(role), **options)


def write(catalog: Path, *rows: AccountRow) -> None:
    """Write rows as the daemon would."""
    engine = open_for_daemon(catalog)
    with engine.connect() as connection, write_transaction(connection, durable=True):
        for row in rows:
            apply_control(connection, row)
    engine.dispose()
