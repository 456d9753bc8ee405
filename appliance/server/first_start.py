"""The first start: an admin for a catalog without users, and the password shown once."""

from __future__ import annotations

import os
import secrets
import sys
import time

import structlog
from sqlalchemy import func, select

from appliance.access import UserRole
from appliance.catalog.accounts import AuditEntry, UserChanged
from appliance.catalog.apply import apply_control
from appliance.catalog.connections import write_transaction
from appliance.catalog.database import open_for_daemon
from appliance.catalog.models import UserRow
from appliance.credentials import generate_password, hash_password
from appliance.errors import InvalidSettings, PagewardenError
from appliance.settings import Settings

FIRST_ADMIN = "admin"
PASSWORD_VARIABLE = "PAGEWARDEN_ADMIN_PASSWORD"  # noqa: S105  # the name of a variable

_log = structlog.get_logger(__name__)


def ensure_admin(settings: Settings) -> str | None:
    """Make the user ``admin`` if there is no user at all; returns the password if it was made up here.

    Runs before the catalog's writer does. A catalog that cannot be written now gets its admin at a later start.

    Raises:
        InvalidSettings: if the password that was given cannot be used.
    """
    engine = open_for_daemon(settings.catalog)
    try:
        with engine.connect() as connection:
            with connection.begin():
                users = connection.execute(select(func.count()).select_from(UserRow)).scalar_one()
            if users:
                return None
            given = _given_password(settings)
            password = given or generate_password()
            row = _first_admin(password)
            with write_transaction(connection, durable=True):
                apply_control(connection, row)
    except PagewardenError:
        raise
    except Exception as error:  # noqa: BLE001 - a full or locked catalog does not keep the cache from serving
        _log.warning("the first admin could not be made: nobody can log in", reason=str(error))
        return None
    finally:
        engine.dispose()
    return None if given else password


def show_first_password(password: str, settings: Settings) -> None:
    """Write the password to the terminal: once, and to no log."""
    where = "" if settings.no_web else f" at http://{settings.http_host}:{settings.http_port}/"
    sys.stderr.write(
        f"\n  First start. Log in{where} as {FIRST_ADMIN} with the password\n\n      {password}\n\n"
        f"  It is not shown again. Another one: pagewarden user password {FIRST_ADMIN}\n\n"
    )
    sys.stderr.flush()


def _first_admin(password: str) -> UserChanged:
    try:
        hashed = hash_password(password)
    except PagewardenError as error:
        raise InvalidSettings(
            f"The first admin's password cannot be used. {error.message}", remedy=error.remedy
        ) from error
    now = time.time()
    audit = AuditEntry(
        entry_id=secrets.token_hex(8),
        at_unix=now,
        actor="daemon",
        origin="first start",
        action="user.add",
        subject=FIRST_ADMIN,
        after={"role": UserRole.ADMIN.value},
    )
    return UserChanged(FIRST_ADMIN, UserRole.ADMIN.value, hashed, now, "daemon", now, audit=audit)


def _given_password(settings: Settings) -> str:
    """The password of the file or the variable, empty where neither was given."""
    path = settings.admin_password_file
    if path is None:
        return os.environ.get(PASSWORD_VARIABLE, "")
    try:
        return path.read_text("utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidSettings(
            f"The setting 'admin_password_file' is {path}, which cannot be read: {reason}.",
            remedy="Name a file that holds the password.",
            field="admin_password_file",
        ) from error
