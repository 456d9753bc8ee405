"""The eviction policy at run time: another one takes over what is in the cache, and what it was told before is not known to it."""

from __future__ import annotations

import time

import structlog

from appliance.catalog.events import SettingChanged
from appliance.errors import InvalidField, VersionChanged
from appliance.l1.eviction import POLICIES, make_policy, policy_named
from appliance.protocol.base import Role
from appliance.protocol.retention import SetPolicy, SetPolicyResult
from appliance.server.answers import Durable
from appliance.server.auditing import audit_entry
from appliance.server.core import Core, require_role
from appliance.sessions import Session

SETTING = "eviction_policy"

_log = structlog.get_logger(__name__)


def set_policy(core: Core, session: Session, args: SetPolicy) -> Durable:
    """Change the policy at once; the answer waits until the catalog has it."""
    require_role(session, Role.ADMIN)
    before = core.store.policy.name
    if args.if_policy and args.if_policy != before:
        raise VersionChanged(
            f"The eviction policy is {before} by now.", remedy="Look at it again.", version=before
        )
    configured = policy_named(core.settings.eviction_policy)
    after = configured if args.policy is None else args.policy.upper()
    if after not in POLICIES:
        raise InvalidField(
            f"The field 'policy' is '{args.policy}', no eviction policy.",
            remedy=f"Use one of {', '.join(POLICIES)}.",
            field="policy",
        )
    use(core, after)
    row = SettingChanged(
        SETTING,
        "",
        None if args.policy is None else after,
        time.time(),
        args.requested_by,
        audit_entry(
            args, "policy.reset" if args.policy is None else "policy.set", SETTING, before=before, after=after
        ),
    )

    def undo() -> None:
        """The change could not be made durable, so it does not hold; a later one of somebody else's does."""
        if core.store.policy.name == after:
            use(core, before)

    return Durable(SetPolicyResult(before=before, after=after, changed=after != configured), row, undo)


def use(core: Core, name: str) -> None:
    """Make the named policy the one that evicts; one that does already keeps what it has learned."""
    if core.store.policy.name != name:
        core.store.use_policy(make_policy(name, core.clock))
        _log.info("eviction policy changed", policy=name)


def apply_changed(core: Core, settings: tuple[SettingChanged, ...]) -> None:
    """At start: a change that an admin made stands above what was configured."""
    for changed in settings:
        if changed.name == SETTING and not changed.scope:
            if changed.value in POLICIES:
                use(core, str(changed.value))
            else:
                _log.warning("an unknown eviction policy in the catalog is ignored", policy=changed.value)
