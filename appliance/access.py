"""Who may do what: roles, and the permissions that roles give and scopes of API tokens narrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class UserRole(StrEnum):
    """The role of a user or of an API token; each one may do all that the ones before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        """0 for the least."""
        return list(UserRole).index(self)

    def at_most(self, other: UserRole) -> UserRole:
        """The lesser of two roles: a token never outranks its owner."""
        return self if self.rank <= other.rank else other


class Permission(StrEnum):
    """What a page, a route or an action asks for; also the scopes of API tokens."""

    STATUS_READ = "status:read"
    POLICIES_READ = "policies:read"
    SETTINGS_READ = "settings:read"
    POLICIES_WRITE = "policies:write"
    AUDIT_READ = "audit:read"
    ACCOUNTS_READ = "accounts:read"
    ACCOUNTS_WRITE = "accounts:write"


LEAST_ROLE: Mapping[Permission, UserRole] = {
    Permission.STATUS_READ: UserRole.VIEWER,
    Permission.POLICIES_READ: UserRole.VIEWER,
    Permission.SETTINGS_READ: UserRole.VIEWER,
    Permission.POLICIES_WRITE: UserRole.OPERATOR,
    Permission.AUDIT_READ: UserRole.OPERATOR,
    Permission.ACCOUNTS_READ: UserRole.ADMIN,
    Permission.ACCOUNTS_WRITE: UserRole.ADMIN,
}
"""The least role that has each permission."""


def permissions_of(role: UserRole, scopes: Iterable[str] = ()) -> frozenset[Permission]:
    """What a role may do, narrowed to ``scopes`` where any are given; a scope that nobody knows gives nothing."""
    allowed = frozenset(each for each, least in LEAST_ROLE.items() if role.rank >= least.rank)
    narrowed = frozenset(scopes)
    return allowed & narrowed if narrowed else allowed
