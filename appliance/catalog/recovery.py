"""The control rows that the daemon applies at start, before it serves anybody."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from sqlalchemy import select

from appliance.catalog.account_memory import AccountMemory
from appliance.catalog.account_queries import read_accounts
from appliance.catalog.accounts import LoginChanged, TokenChanged, UserChanged
from appliance.catalog.connections import reading_engine
from appliance.catalog.events import ClearRecorded, ClearScope, SettingChanged
from appliance.catalog.failures import diagnose
from appliance.catalog.models import ClearRow, SettingRow
from appliance.errors import CatalogUnreadable

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

    from appliance.catalog.events import ControlRow

BUSY_TIMEOUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ControlState:
    """What is in force: every changed setting, the newest clear of each namespace (and of all), and all accounts."""

    settings: tuple[SettingChanged, ...] = ()
    clears: tuple[ClearRecorded, ...] = ()
    users: tuple[UserChanged, ...] = ()
    tokens: tuple[TokenChanged, ...] = ()
    logins: tuple[LoginChanged, ...] = ()

    @property
    def highest_epoch(self) -> int:
        """The newest clear's epoch, 0 without one."""
        return max((clear.epoch for clear in self.clears), default=0)


def load_control_state(path: Path) -> ControlState:
    """The control rows of the catalog at ``path``, which :func:`open_for_daemon` has opened before.

    Raises:
        CatalogUnreadable: if they cannot be read; a start that forgets a clear would serve what was cleared.
    """
    engine = reading_engine(path, busy_timeout_seconds=BUSY_TIMEOUT_SECONDS)
    try:
        with engine.connect() as connection:
            return read_control_state(connection)
    except Exception as error:
        failure = diagnose(error)
        raise CatalogUnreadable(
            f"The settings and clears in the catalog {path} cannot be read. {failure.sentence}",
            remedy=failure.remedy,
            path=str(path),
        ) from error


def read_control_state(connection: Connection) -> ControlState:
    """The control rows through an open connection.

    Raises:
        sqlalchemy.exc.DBAPIError: what SQLite reports.
        ValueError: if a setting's value is no JSON.
    """
    settings = tuple(
        SettingChanged(row.name, row.scope, json.loads(row.value), row.changed_unix, row.changed_by)
        for row in connection.execute(
            select(SettingRow.__table__).order_by(SettingRow.name, SettingRow.scope)
        )
    )
    newest: dict[str, ClearRecorded] = {}
    for row in connection.execute(select(ClearRow.__table__).order_by(ClearRow.epoch, ClearRow.clear_id)):
        newest[row.namespace] = ClearRecorded(
            row.epoch,
            cast("ClearScope", row.scope),
            row.namespace,
            row.requested_by,
            row.cleared_unix,
            row.removed_objects,
            row.removed_bytes,
        )
    return ControlState(settings, tuple(newest.values()), *read_accounts(connection))


class ControlMemory:
    """The control state that was acknowledged, kept by the writer: a file that vanished gets it back."""

    def __init__(self, state: ControlState) -> None:
        self._settings = {(row.name, row.scope): row for row in state.settings}
        self._clears = {row.namespace: row for row in state.clears}
        self._accounts = AccountMemory(state.users, state.tokens, state.logins)

    def remember(self, row: ControlRow) -> None:
        """Take over a row that is durable; what was audited once is not audited again."""
        row = replace(row, audit=None)
        if isinstance(row, (UserChanged, TokenChanged, LoginChanged)):
            self._accounts.remember(row)
        elif isinstance(row, ClearRecorded):
            known = self._clears.get(row.namespace)
            if known is None or row.epoch >= known.epoch:
                self._clears[row.namespace] = row
        elif row.value is None:
            self._settings.pop((row.name, row.scope), None)
        else:
            self._settings[row.name, row.scope] = row

    def missing_from(self, state: ControlState) -> list[ControlRow]:
        """The rows in force that ``state`` lacks or contradicts."""
        found = ControlMemory(state)
        missing: list[ControlRow] = [
            row
            for key, row in self._settings.items()
            if key not in found._settings or found._settings[key].value != row.value
        ]
        for namespace, row in self._clears.items():
            known = found._clears.get(namespace)
            if known is None or known.epoch < row.epoch:
                missing.append(row)
        return [*missing, *self._accounts.missing_from(found._accounts)]
