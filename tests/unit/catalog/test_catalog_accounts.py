"""Users, tokens, logins and the audit in SQLite: written twice they stay the same, and a new file gets them back."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest

from appliance.catalog.account_memory import AccountMemory
from appliance.catalog.account_queries import AccountReader, AuditFilter
from appliance.catalog.accounts import AuditEntry, LoginChanged, TokenChanged, UserChanged
from appliance.catalog.apply import apply_control, apply_history
from appliance.catalog.connections import write_transaction
from appliance.catalog.database import open_for_daemon
from appliance.catalog.events import AccessSeen, AuditNoted
from appliance.catalog.recovery import ControlMemory, ControlState, load_control_state
from appliance.catalog.store import CatalogStore
from tests.unit.catalog.samples import clear, setting

USER = UserChanged("ada", "admin", "$argon2id$", 1.0, "tests", 1.0)
TOKEN = TokenChanged("t1", "ci", "ada", "viewer", ("status:read",), "hash", 2.0, "ada")
LOGIN = LoginChanged("l1", "ada", "hash", "10.0.0.1", "browser", 3.0, 100.0, 3.0)


def entry(number: int = 1, **changes) -> AuditEntry:
    base = AuditEntry(f"e{number}", float(number), "ada", "10.0.0.1", "ttl.set", "read", 300.0, {"a": number})
    return replace(base, **changes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "catalog.db"


def write(path, *rows):
    engine = open_for_daemon(path)
    with engine.connect() as connection, write_transaction(connection, durable=True):
        proofs = [apply_control(connection, row) for row in rows]
    engine.dispose()
    return proofs


def note(path, *events):
    engine = open_for_daemon(path)
    with engine.connect() as connection, write_transaction(connection, durable=False):
        apply_history(connection, events)
    engine.dispose()


def test_accounts_come_back_as_they_were_written(path):
    write(path, USER, TOKEN, LOGIN)
    state = load_control_state(path)
    assert (state.users, state.tokens, state.logins) == ((USER,), (TOKEN,), (LOGIN,))
    reader = AccountReader(path)
    assert reader.user("ada") == USER
    assert reader.user("bob") is None
    assert reader.token_and_owner("t1") == (TOKEN, USER)
    assert reader.login_and_user("l1") == (LOGIN, USER)
    assert reader.logins(50.0) == [LOGIN]
    assert reader.logins(100.0) == []


@pytest.mark.parametrize(
    "row", [USER, TOKEN, LOGIN, setting(60), clear(1)], ids=lambda row: type(row).__name__
)
def test_a_row_and_its_audit_written_twice_are_one(path, row):
    row = replace(row, audit=entry())
    first, second = write(path, row), write(path, row)
    assert first == second == [("audit", 1)]
    assert len(AccountReader(path).audit(AuditFilter())) == 1


def test_a_change_that_cannot_be_written_leaves_no_audit(path):
    bad = replace(USER, role="king", audit=entry())
    with pytest.raises(Exception, match="CHECK"):
        write(path, bad)
    assert AccountReader(path).audit(AuditFilter()) == []


def test_a_removed_user_takes_everything_along(path):
    write(path, USER, TOKEN, LOGIN, replace(USER, removed=True, changed_unix=9.0, audit=entry()), USER)
    reader = AccountReader(path)
    (token,) = reader.tokens()
    assert token.revoked_unix == 9.0
    login, _ = reader.login_and_user("l1")
    assert (login.ended_unix, login.end_cause) == (9.0, "user removed")


def test_a_changed_user_may_end_the_logins_and_keeps_the_tokens(path):
    write(path, USER, TOKEN, LOGIN, replace(USER, role="viewer", ends_logins=True, changed_unix=9.0))
    reader = AccountReader(path)
    assert reader.user("ada").role == "viewer"
    assert reader.tokens()[0].revoked_unix is None
    assert reader.login_and_user("l1")[0].end_cause == "user changed"


def test_use_is_seen(path):
    write(path, USER, TOKEN, LOGIN)
    note(path, AccessSeen(("t1", "unknown"), ("l1",), 42.0))
    reader = AccountReader(path)
    assert reader.tokens()[0].last_used_unix == 42.0
    assert reader.login_and_user("l1")[0].last_seen_unix == 42.0


def test_old_logins_are_deleted(path):
    write(path, USER, LOGIN)
    write(path, replace(LOGIN, login_id="l2", created_unix=1e9, expires_unix=1e9 + 1))
    assert AccountReader(path).login_and_user("l1") is None


# --- the audit ---


def test_the_audit_is_filtered_newest_first(path):
    write(
        path,
        replace(setting(1, at=1.0), audit=entry(1)),
        replace(setting(2, at=2.0), audit=entry(2, actor="bob", action="user.add", subject="Carol")),
        replace(setting(3, at=3.0), audit=entry(3, before=None, after={"role": "Admin"})),
    )
    note(path, AuditNoted(entry(4, action="login.fail")))
    reader = AccountReader(path)

    def found(**wanted) -> list[int]:
        return [int(each.at_unix) for each in reader.audit(AuditFilter(**wanted))]

    assert found() == [4, 3, 2, 1]
    assert found(actor="bob") == [2]
    assert found(action="ttl.set") == [3, 1]
    assert found(text="carol") == [2]
    assert found(text="ADMIN") == [3]
    assert found(text="%") == []
    assert found(since_unix=2.0, until_unix=4.0) == [3, 2]
    assert reader.audit_actions() == ["login.fail", "ttl.set", "user.add"]
    assert [each.audit_id for each in reader.audit(AuditFilter(), before_id=3, limit=1)] == [2]
    assert reader.audit(AuditFilter(action="user.add"))[0].after == {"a": 2}


def test_the_audit_can_only_grow(path):
    write(path, replace(setting(1), audit=entry()))
    raw = sqlite3.connect(path)
    for statement in ("UPDATE audit SET actor = 'eve'", "DELETE FROM audit"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            raw.execute(statement)
    raw.close()


# --- a file that vanished, or is another one ---


def test_a_new_file_gets_the_accounts_back_without_their_audit(path):
    write(path)
    store = CatalogStore(path, busy_timeout_seconds=1.0)
    store.ensure_open()
    rows = [replace(row, audit=entry(number)) for number, row in enumerate((USER, TOKEN, LOGIN))]
    assert store.write_control(rows) == [None, None, None]
    path.unlink()
    store.ensure_open()
    store.close()
    state = load_control_state(path)
    assert (state.users, state.tokens, state.logins) == ((USER,), (TOKEN,), (LOGIN,))
    assert AccountReader(path).audit(AuditFilter()) == [], "what was audited once is not audited again"


def test_a_removal_is_remembered_against_a_file_from_before(path):
    memory = ControlMemory(ControlState(users=(USER,), tokens=(TOKEN,), logins=(LOGIN,)))
    memory.remember(replace(USER, removed=True, changed_unix=9.0, audit=entry()))
    missing = memory.missing_from(ControlState(users=(USER,), tokens=(TOKEN,), logins=(LOGIN,)))
    assert isinstance(missing[0], UserChanged)
    assert missing[0].removed
    assert replace(TOKEN, revoked_unix=9.0) in missing
    assert memory.missing_from(ControlState()) == [
        replace(TOKEN, revoked_unix=9.0),
        replace(LOGIN, ended_unix=9.0, end_cause="user removed"),
    ]


def test_times_of_use_are_no_contradiction():
    kept = AccountMemory([USER], [TOKEN], [LOGIN])
    found = AccountMemory([USER], [replace(TOKEN, last_used_unix=5.0)], [replace(LOGIN, last_seen_unix=5.0)])
    assert kept.missing_from(found) == []


def test_logins_that_nobody_can_use_are_forgotten():
    over = replace(LOGIN, login_id="l2", ended_unix=4.0)
    memory = AccountMemory([USER], [], [LOGIN, over])
    memory.forget_expired_logins(50.0)
    assert set(memory.logins) == {"l1"}
    memory.forget_expired_logins(100.0)
    assert memory.logins == {}
