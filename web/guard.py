"""The guard in front of every route: which host was meant, from which site, who asks, and whether they may.

A route says what it needs with :func:`requires` or :func:`public`; one that says nothing cannot be made. The guard runs
before anything of the request's body is read.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute

from appliance.access import Permission
from appliance.errors import CrossSite, Forbidden, HostRefused, NotAuthenticated, ReadOnlyDashboard
from web.identity import Identity, Requester
from web.settings import WebSettings
from web.state import state_of

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Rule:
    """What a route needs: nothing (``public``), somebody who is logged in, or a permission.

    ``probe`` serves any Host, for orchestrators. ``own`` changes nothing but one's own login, so it works where the
    dashboard is read-only.
    """

    permission: Permission | None = None
    public: bool = False
    probe: bool = False
    own: bool = False


_RULES: dict[Callable[..., Any], Rule] = {}


def requires(permission: Permission) -> Callable[[_F], _F]:
    """A route for those who have a permission."""
    return _ruled(Rule(permission))


def requires_login(*, own: bool = False) -> Callable[[_F], _F]:
    """A route for everybody who is logged in."""
    return _ruled(Rule(own=own))


def public(*, probe: bool = False) -> Callable[[_F], _F]:
    """A route for everybody."""
    return _ruled(Rule(public=True, probe=probe, own=True))


def _ruled(rule: Rule) -> Callable[[_F], _F]:
    def mark(endpoint: _F) -> _F:
        _RULES[endpoint] = rule
        return endpoint

    return mark


class GuardedRoute(APIRoute):
    """A route behind the guard."""

    @property
    def rule(self) -> Rule:
        """What it needs."""
        return _RULES[self.endpoint]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler with the guard in front."""
        assert self.endpoint in _RULES, f"{self.path} says not who may use it: it would be open to everybody"
        rule, handler = self.rule, super().get_route_handler()

        async def guarded(request: Request) -> Response:
            refusal = await _admit(request, rule)
            return await handler(request) if refusal is None else refusal

        return guarded


def identity_of(request: Request) -> Identity:
    """Who asks, on a route that is not public."""
    identity = request.state.identity
    assert isinstance(identity, Identity), "a public route would act in nobody's name"
    return identity


def requester_of(request: Request) -> Requester:
    """In whose name a change is asked for."""
    return Requester(identity_of(request).actor, address_of(request))


def address_of(request: Request) -> str:
    """The peer's address. Headers of proxies are not believed: anybody can send them."""
    return request.client.host if request.client is not None else ""


async def _admit(request: Request, rule: Rule) -> Response | None:
    """Let the request through (``None``), answer it here, or raise what is wrong with it."""
    state = state_of(request)
    request.state.identity = None
    if not rule.probe:
        _check_host(request, state.settings)
    changes = request.method not in SAFE_METHODS
    if changes:
        _check_site(request)
    if rule.public:
        return None
    identity = await asyncio.to_thread(state.identities.of_request, request)
    if identity is None:
        return _ask_to_log_in(request)
    request.state.identity = identity
    if rule.permission is not None and not identity.may(rule.permission):
        raise Forbidden(
            f"This needs the permission '{rule.permission}', which {identity.actor} as {identity.role} lacks.",
            remedy="Ask an admin for the role, or use a token with the scope.",
            permission=rule.permission.value,
        )
    if changes and state.settings.read_only and not rule.own:
        raise ReadOnlyDashboard("This dashboard is read-only.", remedy="Start it without --read-only.")
    return None


def _ask_to_log_in(request: Request) -> Response:
    wants_page = not request.url.path.startswith("/api/") and request.method in SAFE_METHODS
    if wants_page and "HX-Request" in request.headers:
        return Response(status_code=401, headers={"HX-Redirect": "/login"})
    if wants_page and "text/html" in request.headers.get("accept", ""):
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(here, safe='/')}", 303)
    raise NotAuthenticated(
        "This needs a login or an API token that is valid.",
        remedy="Log in, or send `Authorization: Bearer TOKEN`; make one with `pagewarden token add NAME`.",
    )


def _check_host(request: Request, settings: WebSettings) -> None:
    """Refuse a name that is not ours: a page elsewhere may point its own name at this address and read the answers.

    An address cannot be pointed anywhere, so any is fine.
    """
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    if host in settings.host_names or _is_address(host):
        return
    raise HostRefused(
        "The request names a host that is not known here.",
        remedy="Use the address, or name the host with --http-names.",
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_site(request: Request) -> None:
    """Refuse a change that another site's page asks for with the reader's cookie.

    Browsers say so in ``Sec-Fetch-Site``, older ones in ``Origin``; programs say neither and have no cookie to abuse.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    if site is not None:
        refused = site not in ("same-origin", "none")
    else:
        refused = origin is not None and urlsplit(origin).netloc != request.headers.get("host", "")
    if refused:
        raise CrossSite(
            "A page of another site asked for this change.", remedy="Use this dashboard's own page."
        )
