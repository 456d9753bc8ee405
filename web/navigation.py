"""The pages in the order of the navigation. A new page is one line here, one router in ``web.app``, and one template."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.access import Permission
from web.identity import Identity


@dataclass(frozen=True, slots=True)
class PageLink:
    """One entry of the navigation; those who lack the permission do not see it."""

    path: str
    title: str
    permission: Permission


PAGES: tuple[PageLink, ...] = (
    PageLink("/", "Overview", Permission.STATUS_READ),
    PageLink("/policies", "Policies", Permission.POLICIES_READ),
    PageLink("/restarts", "Restarts", Permission.STATUS_READ),
    PageLink("/audit", "Audit", Permission.AUDIT_READ),
    PageLink("/plan", "Plan", Permission.STATUS_READ),
    PageLink("/doctor", "Doctor", Permission.STATUS_READ),
    PageLink("/settings", "Settings", Permission.SETTINGS_READ),
)


def links_for(identity: Identity | None) -> tuple[PageLink, ...]:
    """The pages that somebody may see."""
    return () if identity is None else tuple(page for page in PAGES if identity.may(page.permission))
