"""`pagewarden user` and `pagewarden token` against a real daemon, and the password of a first start."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.catalog.account_queries import AccountReader
from appliance.credentials import password_matches, split_token
from appliance.errors import InvalidSettings, NotAuthenticated
from appliance.protocol.accounts import Accounts, ListAccounts
from appliance.protocol.client import RequestClient, endpoint_of
from tests.support.daemon import ADMIN_PASSWORD, DaemonProcess


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return make_daemon()


def run(daemon: DaemonProcess, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance.cli", *arguments, *daemon.reach()]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def answer(daemon: DaemonProcess, *arguments: str, text: str = "") -> Any:
    done = run(daemon, *arguments, "--json", text=text)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def reader(daemon: DaemonProcess) -> AccountReader:
    return AccountReader(daemon.directory / "catalog.db")


def test_users_are_made_changed_and_removed(daemon: DaemonProcess) -> None:
    made = answer(daemon, "user", "add", "ada", "--role=operator")
    stored = reader(daemon).user("ada")
    assert stored is not None
    assert password_matches(stored.password_hash, made["password"])
    assert answer(daemon, "user", "role", "ada", "viewer")["role"] == "viewer"
    assert "password" not in answer(
        daemon, "user", "password", "ada", "--password-stdin", text="her own password\n"
    )
    stored = reader(daemon).user("ada")
    assert stored is not None
    assert password_matches(stored.password_hash, "her own password")
    names = [user["name"] for user in answer(daemon, "user", "list")["users"]]
    assert names == ["ada", "admin"]
    assert answer(daemon, "user", "remove", "ada") == {"removed": True}
    assert answer(daemon, "user", "remove", "ada") == {"removed": False}
    refused = run(daemon, "user", "remove", "admin")
    assert refused.returncode == 1
    assert "last_admin" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "text", "says"),
    [
        (("user", "add", "Ada"), "", "invalid_field: The field 'name'"),
        (("user", "add", "ada", "--password-stdin"), "short\n", "'password' has 5 characters"),
        (("user", "role", "nobody", "admin"), "", "not_found"),
        (("token", "add", "ci", "--owner=nobody"), "", "not_found"),
        (("token", "revoke", "what"), "", "invalid_field: The field 'token_id'"),
    ],
)
def test_what_cannot_be_done_is_said(
    daemon: DaemonProcess, arguments: tuple[str, ...], text: str, says: str
) -> None:
    done = run(daemon, *arguments, text=text)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_tokens_are_made_and_revoked(daemon: DaemonProcess) -> None:
    made = answer(daemon, "token", "add", "ci", "--scope=status:read", "--scope=audit:read", "--days=1")
    parts = split_token(made["token"])
    assert parts is not None
    assert parts[0] == made["token_id"]
    assert made["scopes"] == ["audit:read", "status:read"]
    assert made["expires_unix"] == pytest.approx(made["created_unix"] + 86_400)
    plain = run(daemon, "token", "list")
    assert re.search(rf"{made['token_id']}\s+valid\s+viewer\s+admin\s+ci", plain.stdout)
    assert made["token"] not in plain.stdout
    assert answer(daemon, "token", "revoke", made["token_id"]) == {"removed": True}
    assert "revoked" in run(daemon, "token", "list").stdout
    (entry,) = [each for each in _audit(daemon) if each.action == "token.revoke"]
    assert entry.actor.startswith("cli:")
    assert entry.origin


def _audit(daemon: DaemonProcess) -> list[Any]:
    from appliance.catalog.account_queries import AuditFilter

    return reader(daemon).audit(AuditFilter())


def test_a_ttl_is_changed_and_taken_back(daemon: DaemonProcess) -> None:
    assert "600 s before, 90 s now" in run(daemon, "ttl", "write_ttl_seconds", "90").stdout
    assert "90 s before, 600 s now" in run(daemon, "ttl", "write_ttl_seconds").stdout
    told = [(each.action, each.after) for each in _audit(daemon)[:2]]
    assert told == [("ttl.reset", 600.0), ("ttl.set", 90.0)]


def test_a_command_without_the_secret_is_refused(daemon: DaemonProcess, tmp_path: Path) -> None:
    empty = [f"--port={daemon.port}", f"--run-dir={tmp_path}"]
    for arguments in (["clear"], ["ttl", "write_ttl_seconds", "60"], ["check"], ["user", "list"]):
        command = [sys.executable, "-m", "appliance.cli", *arguments, *empty]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "not_authenticated" in done.stderr
        assert "--run-dir" in done.stderr
    status = [sys.executable, "-m", "appliance.cli", "status", f"--port={daemon.port}"]
    assert subprocess.run(status, capture_output=True, timeout=60, check=False).returncode == 0


def test_the_secret_of_an_earlier_start_is_worth_nothing(daemon: DaemonProcess) -> None:
    earlier = daemon.secret_path.read_text()
    assert stat.S_IMODE(daemon.secret_path.stat().st_mode) == 0o600
    daemon.kill()
    daemon.start()
    endpoint = endpoint_of("127.0.0.1", daemon.port)
    with (
        RequestClient(endpoint, client_name="tests", admin_secret=lambda: earlier) as client,
        pytest.raises(NotAuthenticated),
    ):
        client.call("accounts", ListAccounts(), Accounts)


# --- the first start ---


def started_alone(daemon: DaemonProcess, **variables: str) -> str:
    """Start it without the tests' password; gives what it said on its terminal."""
    environment = {k: v for k, v in os.environ.items() if k != "PAGEWARDEN_ADMIN_PASSWORD"} | variables
    with daemon.log.open("ab") as log:
        command = [sys.executable, "-m", "appliance.cli", "server", *daemon.arguments()]
        daemon.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    daemon.wait_ready()
    return daemon.log.read_text()


def test_the_first_start_shows_a_password_once(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(start=False)
    told = started_alone(daemon)
    (password,) = re.findall(r"^ +(\S{4}-\S{4}-\S{4}-\S{4})$", told, flags=re.MULTILINE)
    admin = reader(daemon).user("admin")
    assert admin is not None
    assert admin.role == "admin"
    assert password_matches(admin.password_hash, password)
    assert daemon.stop() == 0
    daemon.log.write_text("")
    assert "First start" not in started_alone(daemon)


@pytest.mark.parametrize("given", ["file", "variable"])
def test_the_first_password_can_be_given(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path, given: str
) -> None:
    (tmp_path / "password").write_text("a given password\n")
    by_file = {"admin_password_file": tmp_path / "password"} if given == "file" else {}
    daemon = make_daemon(start=False, **by_file)
    variables = {} if given == "file" else {"PAGEWARDEN_ADMIN_PASSWORD": "a given password"}
    told = started_alone(daemon, **variables)
    assert "First start" not in told
    assert "a given password" not in told
    admin = reader(daemon).user("admin")
    assert admin is not None
    assert password_matches(admin.password_hash, "a given password")


@pytest.mark.parametrize(("content", "says"), [(None, "cannot be read"), ("short", "5 characters")])
def test_a_first_password_that_cannot_be_used_ends_the_start(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "password").write_text(content)
    daemon = make_daemon(start=False, admin_password_file=tmp_path / "password")
    daemon.start(ready=False)
    assert daemon.process is not None
    assert daemon.process.wait(30) == InvalidSettings.exit_status
    assert says in daemon.log.read_text()


def test_the_tests_own_password_is_in_no_log(daemon: DaemonProcess) -> None:
    assert ADMIN_PASSWORD not in daemon.log.read_text()
