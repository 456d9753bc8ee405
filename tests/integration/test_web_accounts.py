"""Logins, users, tokens, policies, settings and the audit over REST, against a real daemon and its dashboard."""

from __future__ import annotations

import csv
import io
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration._web import RunningWeb, running_web, settings_for
from tests.support.daemon import ADMIN_PASSWORD, DaemonProcess
from tests.support.waiting import eventually
from web.attempts import FAILURES_PER_USER_AND_ADDRESS

TTL = "/api/v1/policies/ttls"
READ_LEASE = f"{TTL}/read_lease_ttl_seconds"


@dataclass(frozen=True)
class Served:
    """A daemon, its dashboard in this process, and a client with an admin's token."""

    daemon: DaemonProcess
    web: RunningWeb

    @property
    def client(self) -> httpx.Client:
        return self.web.client

    @property
    def catalog(self) -> Path:
        return self.daemon.directory / "catalog.db"

    @contextmanager
    def browser(self, user: str = "admin", password: str = ADMIN_PASSWORD) -> Iterator[httpx.Client]:
        """A client that has logged in."""
        with self.web.anonymous() as client:
            answer = client.post("/api/v1/login", json={"user": user, "password": password})
            assert answer.status_code == 200, answer.text
            yield client

    def audit(self, **wanted: Any) -> list[dict[str, Any]]:
        return list(self.client.get("/api/v1/audit", params=wanted).json()["entries"])


@pytest.fixture
def served(make_daemon: Callable[..., DaemonProcess]) -> Iterator[Served]:
    daemon = make_daemon()
    settings = settings_for(
        daemon.port, catalog=daemon.directory / "catalog.db", run_dir=daemon.directory / "run"
    )
    with running_web(settings) as web:
        web.wait_for_status()
        web.client.headers.update(daemon.web_headers())
        yield Served(daemon, web)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


# --- logins ---


def test_a_login_lets_in_until_it_is_logged_out(served: Served) -> None:
    with served.browser() as browser:
        me = browser.get("/api/v1/me").json()
        assert (me["user"], me["role"], me["token_id"]) == ("admin", "admin", "")
        cookie = browser.cookies.get(served.web.state.settings.cookie_name)
        assert cookie is not None
        assert browser.post("/api/v1/logout").status_code == 204
        browser.cookies.set(served.web.state.settings.cookie_name, cookie)
        assert code_of(browser.get("/api/v1/me")) == (401, "not_authenticated")
    assert [entry["action"] for entry in served.audit(actor="admin")][:2] == ["login.end", "login.open"]


def test_the_cookie_is_out_of_reach_of_scripts_and_the_catalog_has_only_hashes(served: Served) -> None:
    with served.web.anonymous() as browser:
        answer = browser.post("/api/v1/login", json={"user": "admin", "password": ADMIN_PASSWORD})
    header = answer.headers["set-cookie"]
    for word in ("HttpOnly", "SameSite=lax", "Path=/"):
        assert word in header
    secret = header.split("=", 1)[1].split(";", 1)[0].split(".", 1)[1]
    token = served.client.headers["authorization"].rsplit("_", 1)[1]
    dumped = "\n".join(sqlite3.connect(served.catalog).iterdump())
    assert "$argon2id$" in dumped
    for clear_text in (secret, token, ADMIN_PASSWORD):
        assert clear_text not in dumped


def test_wrong_passwords_are_refused_alike_audited_and_bounded(served: Served) -> None:
    with served.web.anonymous() as browser:
        for user in ("admin", "nobody"):
            answer = browser.post("/api/v1/login", json={"user": user, "password": "not the password"})
            assert code_of(answer) == (401, "wrong_credentials")
        for _ in range(FAILURES_PER_USER_AND_ADDRESS - 1):
            browser.post("/login", data={"user": "admin", "password": "not the password"})
        answer = browser.post("/api/v1/login", json={"user": "admin", "password": ADMIN_PASSWORD})
        assert code_of(answer) == (429, "too_many_attempts")
        assert int(answer.headers["retry-after"]) > 0
        page = browser.post("/login", data={"user": "admin", "password": ADMIN_PASSWORD})
        assert page.status_code == 429
        assert "Too many logins failed" in page.text
    eventually(
        lambda: len(served.audit(action="login.fail")) == FAILURES_PER_USER_AND_ADDRESS + 1,
        "audited failures",
    )
    assert {entry["subject"] for entry in served.audit(action="login.fail")} == {"admin", "nobody"}


def test_ones_own_password(served: Served) -> None:
    url = "/api/v1/me/password"
    with served.browser() as browser:
        wrong = browser.post(url, json={"current": "not it at all", "new": "a new password"})
        assert code_of(wrong) == (401, "wrong_credentials")
        short = browser.post(url, json={"current": ADMIN_PASSWORD, "new": "short"})
        assert code_of(short) == (422, "invalid_field")
        assert browser.post(url, json={"current": ADMIN_PASSWORD, "new": "a new password"}).status_code == 204
        assert browser.get("/api/v1/me").status_code == 401, "the login ended with the password"
    with served.browser(password="a new password"):
        pass
    answer = served.client.post(url, json={"current": "a new password", "new": "another password"})
    assert code_of(answer) == (403, "forbidden"), "a token must not take over its owner's account"


def test_a_login_is_seen_and_can_be_ended_by_an_admin(served: Served) -> None:
    with served.browser() as browser:
        (login,) = served.client.get("/api/v1/logins").json()["logins"]
        assert login["user"] == "admin"
        assert login["origin"] == "127.0.0.1"
        assert served.client.delete(f"/api/v1/logins/{login['login_id']}").status_code == 204
        assert served.client.delete(f"/api/v1/logins/{login['login_id']}").status_code == 204
        assert browser.get("/api/v1/me").status_code == 401
    assert served.client.get("/api/v1/logins").json()["logins"] == []


# --- users and tokens ---


def test_users_over_rest(served: Served) -> None:
    new = {"name": "ada", "role": "operator", "password": "ada's password"}
    assert served.client.post("/api/v1/users", json=new).status_code == 201
    assert code_of(served.client.post("/api/v1/users", json=new)) == (409, "already_exists")
    with served.browser("ada", "ada's password") as ada:
        assert ada.get("/api/v1/audit").status_code == 200
        assert code_of(ada.get("/api/v1/users")) == (403, "forbidden")
        assert served.client.patch("/api/v1/users/ada", json={"role": "viewer"}).status_code == 200
        assert ada.get("/api/v1/me").status_code == 401
    with served.browser("ada", "ada's password") as ada:
        assert code_of(ada.get("/api/v1/audit")) == (403, "forbidden")
        for _ in range(2):
            assert served.client.delete("/api/v1/users/ada").status_code == 204
        assert ada.get("/api/v1/me").status_code == 401
    assert [user["name"] for user in served.client.get("/api/v1/users").json()["users"]] == ["admin"]
    assert code_of(served.client.delete("/api/v1/users/admin")) == (409, "last_admin")
    assert code_of(served.client.patch("/api/v1/users/nobody", json={"role": "admin"})) == (404, "not_found")
    assert code_of(served.client.delete("/api/v1/users/Not%20A%20Name")) == (422, "invalid_field")
    actions = [(entry["action"], entry["before"], entry["after"]) for entry in served.audit(text="ada")]
    assert actions == [
        ("user.remove", {"role": "viewer"}, None),
        ("login.open", None, None),
        ("user.change", {"role": "operator"}, {"role": "viewer"}),
        ("login.open", None, None),
        ("user.add", None, {"role": "operator"}),
    ]


def test_tokens_over_rest(served: Served) -> None:
    new = {"name": "ci", "owner": "admin", "role": "operator", "scopes": ["policies:read"], "days": 1}
    made = served.client.post("/api/v1/tokens", json=new)
    assert made.status_code == 201
    headers = {"Authorization": f"Bearer {made.json()['token']}"}
    with served.web.anonymous() as program:
        assert program.get(TTL, headers=headers).status_code == 200
        assert code_of(program.get("/api/v1/status", headers=headers)) == (403, "forbidden")

        def listed() -> dict[str, Any]:
            tokens = served.client.get("/api/v1/tokens").json()["tokens"]
            return {each["token_id"]: each for each in tokens}[made.json()["token_id"]]

        assert "token" not in listed()
        eventually(lambda: listed()["last_used_unix"], "the token's last use")
        for _ in range(2):
            assert served.client.delete(f"/api/v1/tokens/{made.json()['token_id']}").status_code == 204
        assert program.get(TTL, headers=headers).status_code == 401
    assert listed()["revoked_unix"] is not None
    assert code_of(served.client.post("/api/v1/tokens", json={**new, "owner": "no"})) == (404, "not_found")


# --- policies ---


def test_a_ttl_is_changed_with_the_version_that_was_read_and_undone(served: Served) -> None:
    first = served.client.get(TTL)
    etag = first.headers["etag"]
    assert etag == f'"{first.json()["version"]}"'
    change = {"value_seconds": 120}
    assert code_of(served.client.put(READ_LEASE, json=change)) == (428, "version_required")
    done = served.client.put(READ_LEASE, json=change, headers={"If-Match": etag})
    assert done.json() == {"before_seconds": 300.0, "after_seconds": 120.0, "version": done.json()["version"]}
    late = served.client.put(READ_LEASE, json={"value_seconds": 60}, headers={"If-Match": etag})
    assert code_of(late) == (412, "version_changed")
    assert served.daemon.status().settings["l1_read_ttl_seconds"] == 120.0
    (made,) = served.client.get(f"{TTL}/history").json()["changes"]
    assert (made["before"], made["after"]) == (None, 120.0)
    undo = f"{TTL}/history/{made['change_id']}/undo"
    assert code_of(served.client.post(undo)) == (428, "version_required")
    undone = served.client.post(undo, headers={"If-Match": done.headers["etag"]})
    assert undone.json()["after_seconds"] == 300.0
    assert undone.headers["etag"] == etag, "all is as it was"
    assert code_of(served.client.post(f"{TTL}/history/999/undo", headers={"If-Match": "*"})) == (
        404,
        "not_found",
    )
    told = [(entry["action"], entry["before"], entry["after"]) for entry in served.audit(text="read_lease")]
    assert told == [("ttl.reset", 120.0, 300.0), ("ttl.set", 300.0, 120.0)]


@pytest.mark.parametrize("value", [0, -1, 1e9, "120", True, [1]])
def test_a_ttl_that_cannot_be_is_refused(served: Served, value: Any) -> None:
    answer = served.client.put(READ_LEASE, json={"value_seconds": value}, headers={"If-Match": "*"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] == "invalid_field"


def test_a_ttl_of_a_namespace_that_is_not_there(served: Served) -> None:
    change = {"value_seconds": 5, "namespace": "0" * 32}
    assert code_of(served.client.put(READ_LEASE, json=change, headers={"If-Match": "*"})) == (
        404,
        "not_found",
    )
    short = {"value_seconds": 0.001}
    answer = served.client.put(f"{TTL}/session_ttl_seconds", json=short, headers={"If-Match": "*"})
    assert code_of(answer) == (422, "invalid_field")
    assert code_of(served.client.put(f"{TTL}/no_ttl", json=short, headers={"If-Match": "*"})) == (
        422,
        "invalid_field",
    )


EVICTION = "/api/v1/policies/eviction"


def test_the_eviction_policy_is_changed_with_the_one_that_was_read(served: Served) -> None:
    first = served.client.get(EVICTION)
    assert (first.json()["policy"], first.headers["etag"]) == ("RETURNS", '"RETURNS"')
    assert {shadow["policy"] for shadow in first.json()["retention"]["policies"]} >= {"RETURNS", "LRU"}
    change = {"policy": "lru"}
    assert code_of(served.client.put(EVICTION, json=change)) == (428, "version_required")
    done = served.client.put(EVICTION, json=change, headers={"If-Match": first.headers["etag"]})
    assert done.json() == {"before": "RETURNS", "after": "LRU", "changed": True}
    late = served.client.put(EVICTION, json={"policy": "SIMPLE"}, headers={"If-Match": '"RETURNS"'})
    assert code_of(late) == (412, "version_changed")
    assert served.daemon.status().settings["eviction_policy"] == "LRU"
    unknown = served.client.put(EVICTION, json={"policy": "ARC"}, headers={"If-Match": "*"})
    assert code_of(unknown) == (422, "invalid_field")
    assert "ARC" in unknown.json()["detail"]
    back = served.client.put(EVICTION, json={"policy": None}, headers={"If-Match": done.headers["etag"]})
    assert back.json() == {"before": "LRU", "after": "RETURNS", "changed": False}
    told = [(entry["action"], entry["before"], entry["after"]) for entry in served.audit(text="eviction")]
    assert told == [("policy.reset", "LRU", "RETURNS"), ("policy.set", "RETURNS", "LRU")]


def test_history_and_audit_come_in_pages(served: Served) -> None:
    for number in range(5):
        change = {"value_seconds": 100 + number}
        assert served.client.put(READ_LEASE, json=change, headers={"If-Match": "*"}).status_code == 200
    for path, key, name in (
        (f"{TTL}/history", "changes", "change_id"),
        ("/api/v1/audit", "entries", "audit_id"),
    ):
        seen: list[int] = []
        query: dict[str, Any] = {"limit": 2}
        while True:
            page = served.client.get(path, params=query).json()
            seen += [each[name] for each in page[key]]
            if page["next_before_id"] is None:
                break
            query["before_id"] = page["next_before_id"]
        assert len(seen) >= 5
        assert seen == sorted(set(seen), reverse=True)
    older = served.client.get("/audit", params={"before_id": seen[1]}).text
    assert older.count("<tr>") == len(seen) - 2 + 1, "one row for each, and the header"


# --- settings and audit ---


def test_settings_say_where_each_value_is_from(served: Served) -> None:
    def found() -> dict[str, tuple[Any, str]]:
        listed = served.client.get("/api/v1/settings").json()["settings"]
        return {each["name"]: (each["value"], each["source"]) for each in listed}

    assert found()["chunk_size"] == (32, "flag")
    assert found()["max_workers"] == (4, "default")
    assert found()["l1_write_ttl_seconds"] == (600.0, "default")
    url = f"{TTL}/write_ttl_seconds"
    assert served.client.put(url, json={"value_seconds": 500}, headers={"If-Match": "*"}).status_code == 200
    eventually(lambda: found()["l1_write_ttl_seconds"] == (500.0, "run time"), "the new value and its source")


def test_the_audit_is_filtered_and_exported(served: Served) -> None:
    began = time.time()
    served.client.put(READ_LEASE, json={"value_seconds": 90}, headers={"If-Match": "*"})
    assert served.audit(action="ttl.set", since_unix=began - 1, until_unix=began + 3600)
    assert not served.audit(action="ttl.set", until_unix=began - 1)
    assert not served.audit(actor="nobody at all")
    (entry,) = served.audit(action="ttl.set")
    token = served.client.headers["authorization"].split("_")[1]
    assert entry["actor"] == f"admin (token {token})"
    assert entry["origin"] == "127.0.0.1"
    export = served.client.get("/api/v1/audit.csv", params={"action": "ttl.set"})
    assert export.headers["content-type"].startswith("text/csv")
    (row,) = csv.DictReader(io.StringIO(export.text))
    assert (row["subject"], row["before"], row["after"]) == ("read_lease_ttl_seconds", "300.0", "90.0")
    page = served.client.get("/audit", params={"since": "yesterday"})
    assert page.status_code == 422
    assert "must be a day" in page.text


def test_what_is_audited_can_be_neither_changed_nor_deleted(served: Served) -> None:
    connection = sqlite3.connect(served.catalog, isolation_level=None)
    for statement in ("DELETE FROM audit", "UPDATE audit SET actor = 'somebody else'"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()


# --- the daemon comes and goes ---


def test_accounts_outlive_a_restart_and_pages_a_stop(served: Served) -> None:
    with served.browser() as browser:
        served.daemon.stop()
        assert not served.daemon.secret_path.exists()
        assert browser.get("/policies").status_code == 200
        answer = served.client.put(READ_LEASE, json={"value_seconds": 90}, headers={"If-Match": "*"})
        assert code_of(answer) == (503, "daemon_unreachable")
        served.daemon.start()
        assert browser.get("/api/v1/me").json()["user"] == "admin"
        answer = browser.put(READ_LEASE, json={"value_seconds": 90}, headers={"If-Match": "*"})
        assert answer.status_code == 200, answer.text
    assert "First start" not in served.daemon.log.read_text()


def test_a_catalog_that_was_deleted_gets_its_accounts_back(served: Served) -> None:
    for name in ("catalog.db", "catalog.db-wal", "catalog.db-shm"):
        (served.daemon.directory / name).unlink(missing_ok=True)

    def back() -> bool:
        return served.client.get("/api/v1/users").status_code == 200

    eventually(back, "the accounts in the new file", seconds=30)
    with served.browser() as browser:
        assert browser.get("/api/v1/me").json()["user"] == "admin"
