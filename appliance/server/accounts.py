"""Users, API tokens and logins: changed in memory at once, answered when the catalog has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from appliance.access import UserRole
from appliance.catalog.account_memory import AccountMemory
from appliance.catalog.accounts import AccountRow, LoginChanged, TokenChanged, UserChanged
from appliance.catalog.events import AccessSeen, AuditNoted
from appliance.errors import AlreadyExists, InvalidField, LastAdmin, NotFound
from appliance.protocol import accounts as m
from appliance.protocol.base import Role
from appliance.protocol.messages import Done
from appliance.server.answers import Answer, Durable
from appliance.server.auditing import audit_entry
from appliance.server.core import Core, require_role
from appliance.sessions import Session

ARGON2ID = "$argon2id$"


def set_user(core: Core, session: Session, args: m.SetUser) -> Durable:
    """Make a user, or change role or password of one; a new password or a lesser role ends the user's logins."""
    require_role(session, Role.ADMIN)
    if args.password_hash and not args.password_hash.startswith(ARGON2ID):
        raise InvalidField("The field 'password_hash' is no argon2id hash.", field="password_hash")
    known = core.accounts.users.get(args.name)
    row = _new_user(known, args) if args.create else _changed_user(core, known, args)
    before = None if known is None else {"role": known.role}
    after: dict[str, Any] = {"role": row.role}
    if known is not None and args.password_hash:
        after["password"] = "changed"  # noqa: S105  # no password: what happened to it
    action = "user.add" if known is None else "user.change"
    row = replace(row, audit=audit_entry(args, action, args.name, before=before, after=after))
    return _durable(core, row, _user_info(row))


def _new_user(known: UserChanged | None, args: m.SetUser) -> UserChanged:
    if known is not None:
        raise AlreadyExists(
            f"There is a user '{args.name}'.", remedy="Change that one, or choose another name."
        )
    if args.role is None or not args.password_hash:
        raise InvalidField(f"The user '{args.name}' needs a role and a password.", field="role")
    now = time.time()
    return UserChanged(args.name, args.role.value, args.password_hash, now, args.requested_by, now)


def _changed_user(core: Core, known: UserChanged | None, args: m.SetUser) -> UserChanged:
    if known is None:
        raise NotFound(f"There is no user '{args.name}'.", remedy="List them with `pagewarden user list`.")
    role = UserRole(known.role) if args.role is None else args.role
    lesser = role.rank < UserRole(known.role).rank
    if lesser:
        _keep_an_admin(core, args.name)
    return replace(
        known,
        role=role.value,
        password_hash=args.password_hash or known.password_hash,
        changed_unix=time.time(),
        ends_logins=bool(args.password_hash) or lesser,
        audit=None,
    )


def remove_user(core: Core, session: Session, args: m.RemoveUser) -> Answer | Durable:
    """Remove a user with all logins and tokens; one that is not there is no error."""
    require_role(session, Role.ADMIN)
    known = core.accounts.users.get(args.name)
    if known is None:
        return Answer(m.Removed(removed=False))
    _keep_an_admin(core, args.name)
    audit = audit_entry(args, "user.remove", args.name, before={"role": known.role})
    row = replace(known, removed=True, changed_unix=time.time(), audit=audit)
    return _durable(core, row, m.Removed(removed=True))


def _keep_an_admin(core: Core, leaving: str) -> None:
    others = [user for name, user in core.accounts.users.items() if name != leaving]
    was_admin = core.accounts.users[leaving].role == UserRole.ADMIN
    if was_admin and not any(user.role == UserRole.ADMIN for user in others):
        raise LastAdmin(
            f"The user '{leaving}' is the last admin.", remedy="Make another user an admin before this."
        )


def add_token(core: Core, session: Session, args: m.AddToken) -> Durable:
    """Make an API token."""
    require_role(session, Role.ADMIN)
    if args.owner not in core.accounts.users:
        raise NotFound(f"There is no user '{args.owner}'.", field="owner")
    if args.token_id in core.accounts.tokens:
        raise AlreadyExists(f"There is a token '{args.token_id}'.", remedy="Make another one.")
    now = time.time()
    scopes = tuple(sorted({scope.value for scope in args.scopes}))
    shown = {"name": args.name, "owner": args.owner, "role": args.role.value, "scopes": list(scopes)}
    row = TokenChanged(
        token_id=args.token_id,
        name=args.name,
        owner=args.owner,
        role=args.role.value,
        scopes=scopes,
        secret_hash=args.secret_hash,
        created_unix=now,
        created_by=args.requested_by,
        expires_unix=now + args.lifetime_seconds if args.lifetime_seconds else None,
        audit=audit_entry(args, "token.add", args.token_id, after=shown),
    )
    return _durable(core, row, _token_info(row))


def revoke_token(core: Core, session: Session, args: m.RevokeToken) -> Answer | Durable:
    """Revoke a token; one that is revoked already, or unknown, is no error."""
    require_role(session, Role.ADMIN)
    known = core.accounts.tokens.get(args.token_id)
    if known is None or known.revoked_unix is not None:
        return Answer(m.Removed(removed=False))
    before = {"name": known.name, "owner": known.owner, "role": known.role}
    audit = audit_entry(args, "token.revoke", args.token_id, before=before)
    return _durable(core, replace(known, revoked_unix=time.time(), audit=audit), m.Removed(removed=True))


def open_login(core: Core, session: Session, args: m.OpenLogin) -> Durable:
    """Take in a login whose password the dashboard has checked."""
    require_role(session, Role.ADMIN)
    if args.user not in core.accounts.users:
        raise NotFound(f"There is no user '{args.user}'.", field="user")
    if args.login_id in core.accounts.logins:
        raise AlreadyExists(f"There is a login '{args.login_id}'.", remedy="Log in again.")
    now = time.time()
    core.accounts.forget_expired_logins(now)
    row = LoginChanged(
        login_id=args.login_id,
        user=args.user,
        secret_hash=args.secret_hash,
        origin=args.requested_from,
        agent=args.agent,
        created_unix=now,
        expires_unix=now + args.lifetime_seconds,
        last_seen_unix=now,
        audit=audit_entry(args, "login.open", args.user),
    )
    return _durable(core, row, _login_info(row))


def end_login(core: Core, session: Session, args: m.EndLogin) -> Answer | Durable:
    """End a login; one that has ended, or is unknown, is no error."""
    require_role(session, Role.ADMIN)
    known = core.accounts.logins.get(args.login_id)
    if known is None or known.ended_unix is not None:
        return Answer(m.Removed(removed=False))
    own = args.requested_by == known.user
    row = replace(
        known,
        ended_unix=time.time(),
        end_cause="logged out" if own else f"ended by {args.requested_by}",
        audit=audit_entry(args, "login.end", known.user, before={"login": known.login_id}),
    )
    return _durable(core, row, m.Removed(removed=True))


def note_access(core: Core, session: Session, args: m.NoteAccess) -> Answer:
    """Refresh the times of last use."""
    require_role(session, Role.ADMIN)
    now = time.time()
    accounts = core.accounts
    for token_id in args.tokens:
        if token_id in accounts.tokens:
            accounts.tokens[token_id] = replace(accounts.tokens[token_id], last_used_unix=now)
    for login_id in args.logins:
        if login_id in accounts.logins:
            accounts.logins[login_id] = replace(accounts.logins[login_id], last_seen_unix=now)
    core.history.submit(AccessSeen(tuple(args.tokens), tuple(args.logins), now))
    return Answer(Done())


def note_audit(core: Core, session: Session, args: m.NoteAudit) -> Answer:
    """Audit something that changed nothing."""
    require_role(session, Role.ADMIN)
    core.history.submit(AuditNoted(audit_entry(args, args.action, args.subject)))
    return Answer(Done())


def accounts(core: Core, session: Session, args: m.ListAccounts) -> Answer:  # noqa: ARG001
    """Everything there is, without secrets."""
    require_role(session, Role.ADMIN)
    now = time.time()
    found = core.accounts
    return Answer(
        m.Accounts(
            users=[_user_info(user) for _, user in sorted(found.users.items())],
            tokens=[_token_info(token) for token in found.tokens.values()],
            logins=[
                _login_info(login)
                for login in found.logins.values()
                if login.ended_unix is None and login.expires_unix > now
            ],
        )
    )


def _durable(core: Core, row: AccountRow, result: Any) -> Durable:
    """Take the row over in memory; if the catalog refuses it, what stood before stands again."""
    memory = core.accounts
    before = _tables(memory)
    memory.remember(replace(row, audit=None))
    after = _tables(memory)

    def undo() -> None:
        _take_back(memory.users, before[0], after[0])
        _take_back(memory.tokens, before[1], after[1])
        _take_back(memory.logins, before[2], after[2])

    return Durable(result, row, undo)


def _tables(memory: AccountMemory) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return dict(memory.users), dict(memory.tokens), dict(memory.logins)


def _take_back(table: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    """Restore the entries that this change touched and nobody has changed since."""
    for key in before.keys() | after.keys():
        if before.get(key) == after.get(key) or table.get(key) != after.get(key):
            continue
        if key in before:
            table[key] = before[key]
        else:
            table.pop(key, None)


def _user_info(row: UserChanged) -> m.UserInfo:
    return m.UserInfo.model_validate(asdict(row))


def _token_info(row: TokenChanged) -> m.TokenInfo:
    return m.TokenInfo.model_validate(asdict(row))


def _login_info(row: LoginChanged) -> m.LoginInfo:
    return m.LoginInfo.model_validate(asdict(row))


HANDLERS: dict[str, Callable[..., Answer | Durable]] = {
    "set_user": set_user,
    "remove_user": remove_user,
    "add_token": add_token,
    "revoke_token": revoke_token,
    "open_login": open_login,
    "end_login": end_login,
    "note_access": note_access,
    "note_audit": note_audit,
    "accounts": accounts,
}
DURABLE = frozenset({"set_user", "remove_user", "add_token", "revoke_token", "open_login", "end_login"})
