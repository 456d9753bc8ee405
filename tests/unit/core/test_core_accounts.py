"""Users, tokens and logins as the daemon changes them: in memory at once, back again if the catalog refuses."""

from __future__ import annotations

import pytest

from appliance.catalog.accounts import LoginChanged, TokenChanged, UserChanged
from appliance.catalog.events import AccessSeen, AuditNoted
from appliance.credentials import issue_login, issue_token
from appliance.errors import (
    AlreadyExists,
    CatalogUnavailable,
    InvalidField,
    LastAdmin,
    NotAuthenticated,
    NotFound,
    PagewardenError,
    VersionChanged,
    WrongRole,
)
from appliance.protocol.base import Role
from appliance.protocol.wire import Request, pack_request, unpack_reply
from appliance.server.dispatch import Waiting
from tests.support.core_wire import ADMIN_SECRET, Daemon, Peer

HASH = "$argon2id$v=19$m=65536,t=3,p=4$c2FsdHNhbHQ$aGFzaGhhc2g"
WHO = {"requested_by": "ada", "requested_from": "10.0.0.1"}


@pytest.fixture
def daemon():
    made = Daemon()
    yield made
    made.close()


@pytest.fixture
def admin(daemon):
    return Peer(daemon, Role.ADMIN, "")


def durable(daemon: Daemon, admin: Peer, op: str, args: dict, error: PagewardenError | None = None):
    """Ask for a change, have the catalog accept or refuse it; gives the row and the reply."""
    waiting = daemon.handle(admin.body(op, {**args, **WHO}))
    if not isinstance(waiting, Waiting):
        reply = unpack_reply(waiting.body)
        raise reply.error or AssertionError(f"no change: {reply.result}")
    reply = unpack_reply(daemon.dispatcher.finish(waiting, error))
    return waiting.answer.row, reply


def add_user(daemon, admin, name="ada", role="admin"):
    return durable(
        daemon, admin, "set_user", {"name": name, "role": role, "password_hash": HASH, "create": True}
    )


def add_token(daemon, admin, owner="ada", **changes):
    issued = issue_token()
    args = {
        "token_id": issued.public_id,
        "name": "ci",
        "owner": owner,
        "role": "viewer",
        "secret_hash": issued.secret_hash,
        **changes,
    }
    return durable(daemon, admin, "add_token", args)


def open_login(daemon, admin, user="ada"):
    issued = issue_login()
    args = {
        "login_id": issued.public_id,
        "user": user,
        "secret_hash": issued.secret_hash,
        "lifetime_seconds": 60.0,
    }
    return durable(daemon, admin, "open_login", args)


# --- the secret ---


@pytest.mark.parametrize("secret", ["", "wrong", ADMIN_SECRET + "x", "\ud800"])
def test_an_admin_session_needs_the_secret(daemon, secret):
    args = {"role": "admin", "protocol": 1, "client": "test", "secret": secret}
    try:
        body = pack_request(Request("hello", 1, b"", b"s" * 16, args))
    except UnicodeEncodeError:
        return  # no such message can be sent
    assert type(daemon.reply(body).error) is NotAuthenticated
    assert b"s" * 16 not in daemon.core.sessions.live


def test_a_daemon_without_a_secret_has_no_admins(daemon):
    daemon.core.admin_secret = ""
    with pytest.raises(NotAuthenticated):
        Peer(daemon, Role.ADMIN, "")


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("accounts", {}),
        ("note_access", {}),
        ("note_audit", {"action": "login.fail", "subject": "ada"}),
        ("remove_user", {"name": "ada"}),
        ("revoke_token", {"token_id": "0" * 12}),
        ("end_login", {"login_id": "0" * 12}),
        ("set_user", {"name": "ada"}),
        (
            "open_login",
            {"login_id": "0" * 12, "user": "ada", "secret_hash": "0" * 64, "lifetime_seconds": 1.0},
        ),
        (
            "add_token",
            {"token_id": "0" * 12, "name": "x", "owner": "ada", "role": "admin", "secret_hash": "0" * 64},
        ),
    ],
)
def test_engines_have_no_business_with_accounts(daemon, op, args):
    scheduler = Peer(daemon, Role.SCHEDULER)
    with pytest.raises(WrongRole):
        scheduler.ask(op, args)


# --- users ---


def test_a_user_is_made_with_who_and_from_where(daemon, admin):
    row, reply = add_user(daemon, admin)
    assert isinstance(row, UserChanged)
    assert reply.result["name"] == "ada"
    assert "password_hash" not in reply.result
    entry = row.audit
    assert entry is not None
    assert (entry.actor, entry.origin, entry.action, entry.subject) == ("ada", "10.0.0.1", "user.add", "ada")
    assert (entry.before, entry.after) == (None, {"role": "admin"})
    with pytest.raises(AlreadyExists):
        add_user(daemon, admin)


def test_what_the_catalog_refuses_does_not_hold(daemon, admin):
    add_user(daemon, admin)
    refused = CatalogUnavailable("full")
    args = {"name": "eve", "role": "admin", "password_hash": HASH, "create": True}
    assert type(durable(daemon, admin, "set_user", args, refused)[1].error) is CatalogUnavailable
    assert set(daemon.core.accounts.users) == {"ada"}
    add_user(daemon, admin, "bob")
    token, _ = add_token(daemon, admin, "bob")
    login, _ = open_login(daemon, admin, "bob")
    durable(daemon, admin, "remove_user", {"name": "bob"}, refused)
    assert "bob" in daemon.core.accounts.users
    assert daemon.core.accounts.tokens[token.token_id].revoked_unix is None
    assert daemon.core.accounts.logins[login.login_id].ended_unix is None


def test_a_refused_change_does_not_undo_a_later_one(daemon, admin):
    add_user(daemon, admin)
    add_user(daemon, admin, "bob", "viewer")
    first = daemon.handle(admin.body("set_user", {"name": "bob", "role": "operator"}))
    durable(daemon, admin, "set_user", {"name": "bob", "role": "admin"})
    daemon.dispatcher.finish(first, CatalogUnavailable("slow"))
    assert daemon.core.accounts.users["bob"].role == "admin"


def test_the_last_admin_stays(daemon, admin):
    add_user(daemon, admin)
    add_user(daemon, admin, "bob", "operator")
    for op, args in (("remove_user", {"name": "ada"}), ("set_user", {"name": "ada", "role": "operator"})):
        with pytest.raises(LastAdmin):
            durable(daemon, admin, op, args)
    durable(daemon, admin, "set_user", {"name": "bob", "role": "admin"})
    durable(daemon, admin, "remove_user", {"name": "ada"})
    assert set(daemon.core.accounts.users) == {"bob"}


@pytest.mark.parametrize(
    ("args", "ends"),
    [
        ({"role": "viewer"}, True),
        ({"password_hash": HASH}, True),
        ({"role": "admin"}, False),
        ({"role": "operator"}, False),
    ],
)
def test_a_lesser_role_or_a_new_password_ends_the_logins(daemon, admin, args, ends):
    add_user(daemon, admin)
    add_user(daemon, admin, "bob", "operator")
    login, _ = open_login(daemon, admin, "bob")
    durable(daemon, admin, "set_user", {"name": "bob", **args})
    assert (daemon.core.accounts.logins[login.login_id].ended_unix is not None) is ends


def test_a_removed_user_takes_logins_and_tokens_along_and_a_new_one_of_that_name_has_none(daemon, admin):
    add_user(daemon, admin)
    add_user(daemon, admin, "bob", "viewer")
    token, _ = add_token(daemon, admin, "bob")
    login, _ = open_login(daemon, admin, "bob")
    durable(daemon, admin, "remove_user", {"name": "bob"})
    add_user(daemon, admin, "bob", "viewer")
    assert daemon.core.accounts.tokens[token.token_id].revoked_unix is not None
    assert daemon.core.accounts.logins[login.login_id].ended_unix is not None


@pytest.mark.parametrize(
    "args",
    [
        {"name": "Ada", "role": "admin", "password_hash": HASH, "create": True},
        {"name": "", "role": "admin", "password_hash": HASH, "create": True},
        {"name": "eve", "role": "king", "password_hash": HASH, "create": True},
        {"name": "eve", "role": "admin", "password_hash": "plain text", "create": True},
        {"name": "eve", "role": "admin", "create": True},
        {"name": "eve", "password_hash": HASH, "create": True},
    ],
)
def test_a_user_that_cannot_be_is_refused_with_the_field(daemon, admin, args):
    with pytest.raises(InvalidField):
        admin.ask("set_user", args)
    assert daemon.core.accounts.users == {}


def test_a_user_that_is_not_there(daemon, admin):
    with pytest.raises(NotFound):
        admin.ask("set_user", {"name": "nobody", "role": "viewer"})
    assert admin.ask("remove_user", {"name": "nobody"}) == {"removed": False}


# --- tokens and logins ---


def test_a_token_is_made_listed_used_and_revoked_once(daemon, admin):
    add_user(daemon, admin)
    row, reply = add_token(daemon, admin, scopes=["status:read", "status:read"], lifetime_seconds=60.0)
    assert isinstance(row, TokenChanged)
    assert row.scopes == ("status:read",)
    assert reply.result["expires_unix"] == pytest.approx(reply.result["created_unix"] + 60.0)
    admin.ask("note_access", {"tokens": [row.token_id, "0" * 12], "logins": []})
    assert isinstance(daemon.events[-1], AccessSeen)
    listed = admin.ask("accounts", {})
    assert listed["tokens"][0]["last_used_unix"] is not None
    assert "secret_hash" not in listed["tokens"][0]
    assert durable(daemon, admin, "revoke_token", {"token_id": row.token_id})[1].result == {"removed": True}
    assert admin.ask("revoke_token", {"token_id": row.token_id}) == {"removed": False}


def test_a_token_needs_its_owner_and_a_scope_that_exists(daemon, admin):
    with pytest.raises(NotFound):
        add_token(daemon, admin, "nobody")
    add_user(daemon, admin)
    with pytest.raises(InvalidField, match="scopes"):
        add_token(daemon, admin, scopes=["everything"])


def test_a_login_is_opened_listed_and_ended_once(daemon, admin):
    with pytest.raises(NotFound):
        open_login(daemon, admin)
    add_user(daemon, admin)
    row, _ = open_login(daemon, admin)
    assert isinstance(row, LoginChanged)
    assert row.origin == "10.0.0.1"
    assert [each["login_id"] for each in admin.ask("accounts", {})["logins"]] == [row.login_id]
    ended, _ = durable(daemon, admin, "end_login", {"login_id": row.login_id})
    assert ended.end_cause == "logged out"
    assert admin.ask("accounts", {})["logins"] == []
    assert admin.ask("end_login", {"login_id": row.login_id}) == {"removed": False}


def test_what_changes_nothing_can_be_audited_too(daemon, admin):
    admin.ask("note_audit", {"action": "login.fail", "subject": "ada", "requested_from": "10.0.0.9"})
    event = daemon.events[-1]
    assert isinstance(event, AuditNoted)
    assert (event.entry.action, event.entry.subject, event.entry.origin) == ("login.fail", "ada", "10.0.0.9")


# --- policies and clears in the audit ---


def test_a_ttl_is_changed_against_the_version_that_was_read(daemon, admin):
    version = daemon.core.ttls.version
    change = {"name": "write_ttl_seconds", "value_seconds": 60.0, "if_version": version}
    row, reply = durable(daemon, admin, "set_ttl", change)
    assert (row.audit.before, row.audit.after, row.audit.action) == (600.0, 60.0, "ttl.set")
    with pytest.raises(VersionChanged):
        durable(daemon, admin, "set_ttl", change)
    taken_back = {"name": "write_ttl_seconds", "value_seconds": None, "if_version": reply.result["version"]}
    row, reply = durable(daemon, admin, "set_ttl", taken_back)
    assert (row.value, row.audit.after, row.audit.action) == (None, 600.0, "ttl.reset")
    assert reply.result["version"] == version


def test_a_ttl_whose_taking_back_was_refused_still_holds(daemon, admin):
    durable(daemon, admin, "set_ttl", {"name": "write_ttl_seconds", "value_seconds": 60.0})
    reset = {"name": "write_ttl_seconds", "value_seconds": None}
    durable(daemon, admin, "set_ttl", reset, CatalogUnavailable("full"))
    assert daemon.core.ttls.changed_value("write_ttl_seconds") == 60.0
    assert daemon.core.store.incomplete_grace_seconds == 60.0


def test_a_clear_is_audited(daemon, admin):
    row, _ = durable(daemon, admin, "clear", {})
    assert (row.audit.action, row.audit.subject, row.audit.actor) == ("cache.clear", "every namespace", "ada")


def test_the_status_names_every_ttl_and_its_source(daemon, admin):
    durable(daemon, admin, "set_ttl", {"name": "write_ttl_seconds", "value_seconds": 60.0})
    status = admin.ask("status", {})
    found = {
        ttl["name"]: (ttl["value_seconds"], ttl["configured_seconds"], ttl["changed"])
        for ttl in status["ttls"]
    }
    assert found["write_ttl_seconds"] == (60.0, 600.0, True)
    assert found["read_lease_ttl_seconds"] == (300.0, 300.0, False)
    assert status["ttls_version"] == daemon.core.ttls.version
    assert status["setting_sources"]["l1_size_gb"] == "flag"
    assert status["setting_sources"]["max_workers"] == "default"
