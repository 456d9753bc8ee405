"""Roles, secrets, the run directory, the bound on failed logins, and what the audit writes into a spreadsheet."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.access import LEAST_ROLE, Permission, UserRole, permissions_of
from appliance.catalog.account_queries import AuditRecord
from appliance.credentials import (
    generate_password,
    hash_password,
    issue_login,
    issue_token,
    password_matches,
    secret_matches,
    split_login,
    split_token,
)
from appliance.errors import InvalidField, NotAuthenticated, RunDirUnusable, TooManyAttempts
from appliance.run_dir import read_secret, secret_path, write_secret
from web.attempts import (
    FAILURES_PER_ADDRESS,
    FAILURES_PER_USER,
    FAILURES_PER_USER_AND_ADDRESS,
    MAX_KEYS,
    WINDOW_SECONDS,
    Attempts,
)
from web.audit import csv_of
from web.login import _is_ours

# --- roles ---


def test_every_permission_has_a_least_role_and_each_role_has_all_of_the_lesser_ones():
    assert set(LEAST_ROLE) == set(Permission)
    viewer, operator, admin = (permissions_of(role) for role in UserRole)
    assert viewer < operator < admin == set(Permission)
    assert not [each for each in viewer if each.value.endswith(":write")]


@given(st.sampled_from(UserRole), st.lists(st.sampled_from(Permission), min_size=1))
def test_scopes_only_narrow(role: UserRole, scopes: list[Permission]):
    assert permissions_of(role, scopes) == permissions_of(role) & set(scopes)


def test_a_scope_that_nobody_knows_gives_nothing():
    assert permissions_of(UserRole.ADMIN, ["everything"]) == frozenset()


@given(st.sampled_from(UserRole), st.sampled_from(UserRole))
def test_a_token_never_outranks_its_owner(token: UserRole, owner: UserRole):
    assert permissions_of(token.at_most(owner)) <= permissions_of(owner)


# --- secrets ---


def test_a_password_is_hashed_with_argon2id_and_a_salt():
    first, second = hash_password("correct horse"), hash_password("correct horse")
    assert first.startswith("$argon2id$")
    assert first != second
    assert password_matches(first, "correct horse")
    assert not password_matches(first, "correct horsf")
    assert not password_matches(None, "correct horse")
    assert not password_matches("no hash at all", "correct horse")


@pytest.mark.parametrize("password", ["", "too short", "x" * 257])
def test_a_password_has_a_length(password: str):
    with pytest.raises(InvalidField, match="'password'"):
        hash_password(password)


def test_a_password_that_is_too_long_is_not_cut_into_a_right_one():
    right = "x" * 256
    assert not password_matches(hash_password(right), right + "y")


def test_made_up_passwords_differ_and_can_be_used():
    made = {generate_password() for _ in range(50)}
    assert len(made) == 50
    assert all(len(each) == 19 for each in made)


def test_tokens_and_cookies_come_apart_as_they_were_put_together():
    token, login = issue_token(), issue_login()
    for issued, split in ((token, split_token), (login, split_login)):
        parts = split(issued.text)
        assert parts is not None
        assert parts[0] == issued.public_id
        assert secret_matches(issued.secret_hash, parts[1])
        assert parts[1] not in issued.secret_hash
    assert token.text.startswith("pgw_")


@given(st.text())
def test_any_text_is_a_token_or_none(text: str):
    for split in (split_token, split_login):
        parts = split(text)
        assert parts is None or not secret_matches("0" * 64, parts[1])


# --- the run directory ---


def test_the_secret_is_the_users_alone_and_new_each_time(tmp_path):
    path = secret_path(tmp_path / "a" / "run", 6555)
    first = write_secret(path)
    assert read_secret(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert write_secret(path) != first
    assert [each.name for each in path.parent.iterdir()] == ["admin-6555.secret"]


def test_a_run_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirUnusable, match="--run-dir"):
        write_secret(secret_path(tmp_path / "file" / "run", 1))
    with pytest.raises(NotAuthenticated, match="--run-dir"):
        read_secret(secret_path(tmp_path, 1))


# --- failed logins ---


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_user_is_locked_out_here_for_as_long_as_the_failures_lie_in_the_window():
    clock = Clock()
    attempts = Attempts(clock)
    for _ in range(FAILURES_PER_USER_AND_ADDRESS):
        attempts.check("ada", "10.0.0.1")
        attempts.failed("ada", "10.0.0.1")
        clock.now += 1.0
    with pytest.raises(TooManyAttempts) as caught:
        attempts.check("ada", "10.0.0.1")
    wait = WINDOW_SECONDS - FAILURES_PER_USER_AND_ADDRESS
    assert caught.value.details["retry_after_seconds"] == wait
    attempts.check("bob", "10.0.0.1")
    attempts.check("ada", "10.9.9.9")
    clock.now += wait
    attempts.check("ada", "10.0.0.1")


def test_a_user_is_locked_out_everywhere_after_many_failures():
    attempts = Attempts(Clock())
    for number in range(FAILURES_PER_USER):
        attempts.check("ada", f"10.0.0.{number}")
        attempts.failed("ada", f"10.0.0.{number}")
    with pytest.raises(TooManyAttempts):
        attempts.check("ada", "10.9.9.9")
    attempts.check("bob", "10.9.9.9")


def test_an_address_is_locked_out_whatever_names_it_tries():
    attempts = Attempts(Clock())
    for number in range(FAILURES_PER_ADDRESS):
        attempts.failed(f"user-{number}", "10.0.0.1")
    with pytest.raises(TooManyAttempts):
        attempts.check("ada", "10.0.0.1")
    attempts.check("ada", "10.0.0.2")


def test_a_right_password_forgets_the_users_failures_and_not_the_addresss():
    attempts = Attempts(Clock())
    for _ in range(FAILURES_PER_USER_AND_ADDRESS):
        attempts.failed("ada", "10.0.0.1")
    attempts.succeeded("ada", "10.0.0.1")
    attempts.check("ada", "10.0.0.1")
    for _ in range(FAILURES_PER_ADDRESS - FAILURES_PER_USER_AND_ADDRESS):
        attempts.failed("bob", "10.0.0.1")
    with pytest.raises(TooManyAttempts):
        attempts.check("ada", "10.0.0.1")


def test_failures_take_bounded_memory():
    attempts = Attempts(Clock())
    for number in range(MAX_KEYS):
        attempts.failed(f"user-{number}", f"address-{number}")
    assert len(attempts._failures) == MAX_KEYS


# --- small things that would hurt ---


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/", True),
        ("/policies?done=saved", True),
        ("//evil.example", False),
        ("/\\evil.example", False),
        ("https://evil.example/", False),
        ("", False),
        ("/a\r\nSet-Cookie: x=y", False),
    ],
)
def test_a_login_leads_to_this_dashboard_only(path: str, ours: bool):
    assert _is_ours(path) is ours


@given(st.text(min_size=1))
def test_no_cell_of_the_csv_is_a_formula(text: str):
    entry = AuditRecord(1, 0.0, text, text, "ttl.set", text, text, {"value": text})
    body = csv_of([entry]).split("\r\n", 1)[1]
    assert not body.startswith(("=", "+", "-", "@"))
    for start in ("=", "+", "-", "@"):
        assert f",{start}" not in csv_of([AuditRecord(1, 0.0, start, start, start, start, None, None)])
