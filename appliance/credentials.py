"""Passwords, API tokens and login cookies: how each is made, kept as a hash, and compared.

Passwords are chosen by people, so they are hashed with argon2id, which is slow on purpose. Tokens and cookies hold 256
random bits: a plain sha-256 of such a secret cannot be searched, and costs nothing on each request.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from functools import cache

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from appliance.errors import InvalidField

MIN_PASSWORD_CHARACTERS = 10
MAX_PASSWORD_CHARACTERS = 256
TOKEN_PREFIX = "pgw"  # noqa: S105  # what every token begins with, so that a leaked one is recognised
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"

_hasher = PasswordHasher()


def hash_password(password: str) -> str:
    """The argon2id hash of a password, with its salt and parameters. Takes tens of milliseconds and 64 MiB.

    Raises:
        InvalidField: if the password is too short or too long.
    """
    if not MIN_PASSWORD_CHARACTERS <= len(password) <= MAX_PASSWORD_CHARACTERS:
        raise InvalidField(
            f"The field 'password' has {len(password)} characters; {MIN_PASSWORD_CHARACTERS} to "
            f"{MAX_PASSWORD_CHARACTERS} are taken.",
            remedy="Choose another password.",
            field="password",
        )
    return _hasher.hash(password)


def password_matches(password_hash: str | None, password: str) -> bool:
    """Whether a password is the one behind a hash; as slow for a user that does not exist (``None``)."""
    try:
        _hasher.verify(password_hash or _nobodys_hash(), password[:MAX_PASSWORD_CHARACTERS])
    except (VerificationError, InvalidHashError):
        return False
    return password_hash is not None and len(password) <= MAX_PASSWORD_CHARACTERS


@cache
def _nobodys_hash() -> str:
    return _hasher.hash(secrets.token_urlsafe(32))


def generate_password() -> str:
    """A password of 79 random bits that can be read aloud: four groups of four letters and digits."""
    return "-".join("".join(secrets.choice(_LETTERS) for _ in range(4)) for _ in range(4))


def hash_secret(secret: str) -> str:
    """The sha-256 of a random secret, hexadecimal."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def secret_matches(secret_hash: str, secret: str) -> bool:
    """Whether a secret is the one behind a hash, in a time that tells nothing about it."""
    return hmac.compare_digest(secret_hash, hash_secret(secret))


@dataclass(frozen=True, slots=True)
class Issued:
    """A new secret: ``text`` is shown to its owner once, the rest is kept."""

    public_id: str
    text: str
    secret_hash: str


def issue_token() -> Issued:
    """A new API token, ``pgw_ID_SECRET``."""
    public_id, secret = secrets.token_hex(6), secrets.token_hex(32)
    return Issued(public_id, f"{TOKEN_PREFIX}_{public_id}_{secret}", hash_secret(secret))


def split_token(text: str) -> tuple[str, str] | None:
    """Public id and secret of a token's text; ``None`` if it cannot be one."""
    prefix, _, rest = text.partition("_")
    public_id, _, secret = rest.partition("_")
    return (public_id, secret) if prefix == TOKEN_PREFIX and public_id and secret else None


def issue_login() -> Issued:
    """A new login, ``ID.SECRET`` in its cookie."""
    public_id, secret = secrets.token_hex(6), secrets.token_hex(32)
    return Issued(public_id, f"{public_id}.{secret}", hash_secret(secret))


def split_login(text: str) -> tuple[str, str] | None:
    """Public id and secret of a login's cookie; ``None`` if it cannot be one."""
    public_id, _, secret = text.partition(".")
    return (public_id, secret) if public_id and secret else None
