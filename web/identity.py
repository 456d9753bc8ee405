"""Who asks: the login of a cookie or the API token of a header, as the catalog has it at this moment."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from appliance.access import Permission, UserRole, permissions_of
from appliance.catalog.account_queries import AccountReader
from appliance.credentials import secret_matches, split_login, split_token
from appliance.errors import CatalogUnavailable

GRACE_SECONDS = 600.0
"""For how long an identity that was proven holds while the catalog cannot be read: the page that says so must open."""

NOTE_EVERY_SECONDS = 60.0
"""How often the use of one login or token is told to the daemon."""

MAX_REMEMBERED = 1_000


@dataclass(frozen=True, slots=True)
class Requester:
    """In whose name a change is asked for, and from where; it goes into the audit."""

    actor: str
    address: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody who is known. ``token_id`` or ``login_id`` says by what; the other one is empty."""

    user: str
    role: UserRole
    permissions: frozenset[Permission]
    token_id: str = ""
    login_id: str = ""

    @property
    def actor(self) -> str:
        """As the audit names them."""
        return f"{self.user} (token {self.token_id})" if self.token_id else self.user

    def may(self, permission: Permission) -> bool:
        """Whether this identity has a permission."""
        return permission in self.permissions


class Identities:
    """Proves credentials against the catalog. The reading happens on whatever thread calls; the rest is quick."""

    def __init__(self, catalog: Path | None, cookie_name: str) -> None:
        self._reader = None if catalog is None else AccountReader(catalog)
        self._cookie_name = cookie_name
        self._proven: OrderedDict[str, tuple[Identity, float]] = OrderedDict()
        self._noted: dict[tuple[str, str], float] = {}
        self._unnoted: set[tuple[str, str]] = set()

    @property
    def reader(self) -> AccountReader:
        """The accounts in the catalog.

        Raises:
            CatalogUnavailable: if this process was given none.
        """
        if self._reader is None:
            raise CatalogUnavailable(
                "No catalog was named to the dashboard's process, so nobody can log in.",
                remedy="Start it with --catalog, on the daemon's host.",
            )
        return self._reader

    def of_request(self, request: Request) -> Identity | None:
        """Who asks, ``None`` if nobody that is known. A token in the header outranks a cookie; reads the disk.

        Raises:
            CatalogUnavailable: if the catalog cannot be read and the credential was not proven lately.
        """
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        text = text.strip() if scheme.lower() == "bearer" else ""
        cookie = request.cookies.get(self._cookie_name, "")
        if not text and not cookie:
            return None
        key = hashlib.sha256(f"{text}\n{cookie}".encode("utf-8", "surrogatepass")).hexdigest()
        try:
            identity = self._of_token(text) if text else self._of_login(cookie)
        except CatalogUnavailable:
            return self._proven_lately(key)
        self._remember(key, identity)
        return identity

    def take_unnoted(self) -> tuple[list[str], list[str]]:
        """Ids of tokens and of logins whose use is to be told to the daemon; empties the list."""
        taken, self._unnoted = self._unnoted, set()
        return [key for kind, key in taken if kind == "token"], [
            key for kind, key in taken if kind == "login"
        ]

    def _of_token(self, text: str) -> Identity | None:
        parts = split_token(text)
        found = None if parts is None else self.reader.token_and_owner(parts[0])
        if parts is None or found is None:
            return None
        token, owner = found
        expired = token.expires_unix is not None and token.expires_unix <= time.time()
        if token.revoked_unix is not None or expired or not secret_matches(token.secret_hash, parts[1]):
            return None
        role = UserRole(token.role).at_most(UserRole(owner.role))
        self._note("token", token.token_id)
        return Identity(owner.name, role, permissions_of(role, token.scopes), token_id=token.token_id)

    def _of_login(self, cookie: str) -> Identity | None:
        parts = split_login(cookie)
        found = None if parts is None else self.reader.login_and_user(parts[0])
        if parts is None or found is None:
            return None
        login, user = found
        over = login.ended_unix is not None or login.expires_unix <= time.time()
        if over or not secret_matches(login.secret_hash, parts[1]):
            return None
        role = UserRole(user.role)
        self._note("login", login.login_id)
        return Identity(user.name, role, permissions_of(role), login_id=login.login_id)

    def _note(self, kind: str, key: str) -> None:
        now = time.monotonic()
        if now - self._noted.get((kind, key), -NOTE_EVERY_SECONDS) >= NOTE_EVERY_SECONDS:
            if len(self._noted) >= MAX_REMEMBERED:
                self._noted.clear()
            self._noted[kind, key] = now
            self._unnoted.add((kind, key))

    def _remember(self, key: str, identity: Identity | None) -> None:
        self._proven.pop(key, None)
        if identity is not None:
            self._proven[key] = identity, time.monotonic()
            while len(self._proven) > MAX_REMEMBERED:
                self._proven.popitem(last=False)

    def _proven_lately(self, key: str) -> Identity:
        identity, when = self._proven.get(key, (None, 0.0))
        if identity is None or time.monotonic() - when > GRACE_SECONDS:
            raise CatalogUnavailable(
                "The catalog cannot be read, so nobody can be recognised.",
                remedy="Repair it; the daemon's log and /readyz say what is wrong.",
            )
        return identity
