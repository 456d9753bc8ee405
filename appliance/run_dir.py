"""The run directory: where a daemon leaves the secret that its admin clients show.

Whoever can read the file is an admin: the command line, and the dashboard as the daemon's child. It is made anew at each
start, so that a copy is worth nothing after a restart.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from appliance.errors import NotAuthenticated, RunDirUnusable

SECRET_BYTES = 32


def default_run_dir() -> Path:
    """Where secrets are kept unless it is said: under the user's state directory, so that any shell finds it."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "pagewarden" / "run"


def secret_path(run_dir: Path, port: int) -> Path:
    """The file of the daemon that listens on ``port``."""
    return run_dir / f"admin-{port}.secret"


def write_secret(path: Path) -> str:
    """Make a new secret in a file that only this user can read; returns it.

    Raises:
        RunDirUnusable: if the file cannot be made.
    """
    secret = secrets.token_hex(SECRET_BYTES)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secret.encode())
        finally:
            os.close(descriptor)
        beside.replace(path)  # a reader sees the old secret or the new one, never a part
    except OSError as error:
        raise RunDirUnusable(
            f"The admin secret {path} cannot be written: {error.strerror or error}.",
            remedy="Choose a directory that this user may write with --run-dir.",
        ) from error
    return secret


def read_secret(path: Path) -> str:
    """The secret of the daemon that is running.

    Raises:
        NotAuthenticated: if this user cannot read it.
    """
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise NotAuthenticated(
            f"The daemon's admin secret {path} cannot be read: {reason}.",
            remedy="Run this as the daemon's user, with its port, and name its directory with --run-dir.",
        ) from error
