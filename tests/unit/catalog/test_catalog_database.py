"""Opening the catalog at start: what is made, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import migrations
from appliance.catalog.apply import apply_control, apply_history
from appliance.catalog.connections import write_transaction
from appliance.catalog.database import APPLICATION_ID, open_for_daemon
from appliance.errors import CatalogUnreadable
from tests.unit.catalog.samples import count, lease_end, setting, stored_batch

ROOT = Path(__file__).parents[3]


def _made(path: Path) -> Path:
    engine = open_for_daemon(path)
    with engine.connect() as connection:
        with write_transaction(connection, durable=False):
            apply_history(connection, [lease_end(number) for number in range(500)])
            apply_history(connection, [stored_batch(*range(2_000))])
        with write_transaction(connection, durable=True):
            apply_control(connection, setting(60))
    return path


def _refusal(path: Path) -> CatalogUnreadable:
    with pytest.raises(CatalogUnreadable) as refused:
        open_for_daemon(path, busy_timeout_seconds=0.1)
    assert refused.value.remedy, "an operator must be told what to do"
    assert str(path) in str(refused.value) or str(path.parent) in str(refused.value)
    return refused.value


def test_a_missing_directory_and_file_are_made(tmp_path):
    path = tmp_path / "deep" / "er" / "catalog.db"
    open_for_daemon(path).dispose()
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert raw.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert raw.execute("SELECT version_num FROM alembic_version").fetchall() == [(migrations.HEAD,)]
    raw.close()


def test_opening_again_keeps_what_is_there(tmp_path):
    path = _made(tmp_path / "catalog.db")
    open_for_daemon(path).dispose()
    assert (count(path, "lease_ends"), count(path, "objects"), count(path, "settings")) == (500, 2_000, 1)


def test_an_empty_file_becomes_a_catalog(tmp_path):
    path = tmp_path / "catalog.db"
    path.touch()
    open_for_daemon(path).dispose()
    assert count(path, "objects") == 0


@pytest.mark.parametrize("name", ["what is this?.db", "100%.db", "a#b.db", "catalog;mode=rw.db"])
def test_a_path_with_odd_characters_is_one_file(tmp_path, name):
    path = _made(tmp_path / name)
    open_for_daemon(path).dispose()
    assert {entry.name for entry in tmp_path.iterdir()} == {name}


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    text = b"These are my notes, not a database. " * 100
    path.write_bytes(text)
    assert "no SQLite database" in _refusal(path).message
    assert path.read_bytes() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_another_programs_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "other.db"
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE theirs (a)")
    raw.commit()
    raw.close()
    before = path.read_bytes()
    assert "no Pagewarden catalog" in _refusal(path).message
    assert path.read_bytes() == before, "not even its journal mode may change"


def test_a_newer_schema_is_refused_and_left_alone(tmp_path):
    path = _made(tmp_path / "catalog.db")
    raw = sqlite3.connect(path)
    raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.commit()
    raw.close()
    refusal = _refusal(path)
    assert "newer than this version" in refusal.message
    assert refusal.details["revision"] == "9999"
    assert count(path, "objects") == 2_000


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be made" in _refusal(tmp_path / "file" / "catalog.db").message


def test_a_directory_in_the_files_place_is_refused(tmp_path):
    (tmp_path / "catalog.db").mkdir()
    assert "is no file" in _refusal(tmp_path / "catalog.db").message


@pytest.mark.parametrize("damaged_from", [0, 4096])
def test_a_file_with_overwritten_bytes_is_refused(tmp_path, damaged_from):
    path = _made(tmp_path / "catalog.db")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(damaged_from)
        file.write(os.urandom(size - damaged_from))
    message = _refusal(path).message
    assert "damaged" in message or "no SQLite database" in message


def test_a_truncated_file_is_refused(tmp_path):
    path = _made(tmp_path / "catalog.db")
    os.truncate(path, path.stat().st_size // 2)
    assert "damaged" in _refusal(path).message


def test_a_file_that_another_process_keeps_to_itself_is_refused_with_that_reason(tmp_path):
    path = _made(tmp_path / "catalog.db")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN IMMEDIATE")
    holder.execute("PRAGMA user_version = 7")
    assert "lock" in _refusal(path).message
    holder.close()
    open_for_daemon(path).dispose()


def test_a_file_whose_write_lock_is_held_for_the_moment_is_opened(tmp_path):
    path = _made(tmp_path / "catalog.db")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    open_for_daemon(path, busy_timeout_seconds=0.1).dispose()
    holder.close()


def test_what_a_killed_process_committed_is_there_again(tmp_path):
    path = _made(tmp_path / "catalog.db")
    script = (
        "import os, signal, sqlite3, sys\n"
        "raw = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "raw.execute(\"INSERT INTO settings VALUES ('extent_kib', '', '64', 1.0, 'admin')\")\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=60)
    assert path.with_name("catalog.db-wal").stat().st_size > 0
    open_for_daemon(path).dispose()
    assert count(path, "settings") == 2


AS_NOBODY = """
import os, pathlib, sys, tempfile
from appliance.catalog.database import open_for_daemon
from appliance.errors import CatalogUnreadable
with tempfile.TemporaryDirectory() as directory:  # imports all that this needs: nobody may not read our Python
    open_for_daemon(pathlib.Path(directory, "catalog.db")).dispose()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    open_for_daemon(pathlib.Path(sys.argv[1]))
except CatalogUnreadable as error:
    print(type(error).__name__, error.remedy != "", error.message)
"""


@pytest.fixture
def roots_directory():
    """A directory that everybody may read and only root may write; pytest's own are closed to others."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user; run as root to test this")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.parametrize(("file_mode", "words"), [(0o600, "cannot be opened"), (0o644, "cannot be written")])
def test_a_file_of_another_user_is_refused(roots_directory, file_mode, words):
    path = _made(roots_directory / "catalog.db")
    path.chmod(file_mode)
    out = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(path)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert out.stdout.startswith("CatalogUnreadable True"), out.stderr
    assert words in out.stdout


def test_a_directory_of_another_user_is_refused(roots_directory):
    for path in (roots_directory / "catalog.db", roots_directory / "new" / "catalog.db"):
        out = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(path)],
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
            cwd=ROOT,
        )
        assert out.stdout.startswith("CatalogUnreadable True"), out.stderr
