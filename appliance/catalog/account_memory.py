"""Users, tokens and logins as last made durable: the daemon decides by them, and a file that vanished gets them back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from appliance.catalog.accounts import AccountRow, LoginChanged, TokenChanged, UserChanged


class AccountMemory:
    """The rows in force by their keys. Not thread-safe: each owner has its own."""

    def __init__(
        self,
        users: Iterable[UserChanged] = (),
        tokens: Iterable[TokenChanged] = (),
        logins: Iterable[LoginChanged] = (),
    ) -> None:
        self.users = {row.name: row for row in users}
        self.tokens = {row.token_id: row for row in tokens}
        self.logins = {row.login_id: row for row in logins}
        self._removed: dict[str, UserChanged] = {}

    def remember(self, row: AccountRow) -> None:
        """Take a row over, with what follows from it."""
        if isinstance(row, TokenChanged):
            self.tokens[row.token_id] = row
        elif isinstance(row, LoginChanged):
            self.logins[row.login_id] = row
        else:
            self._remember_user(row)

    def _remember_user(self, row: UserChanged) -> None:
        if row.removed or row.ends_logins:
            cause = "user removed" if row.removed else "user changed"
            for login in [each for each in self.logins.values() if each.user == row.name]:
                if login.ended_unix is None:
                    ended = replace(login, ended_unix=row.changed_unix, end_cause=cause)
                    self.logins[login.login_id] = ended
        if not row.removed:
            self.users[row.name] = replace(row, ends_logins=False)
            self._removed.pop(row.name, None)
            return
        self.users.pop(row.name, None)
        self._removed[row.name] = row
        for token in [each for each in self.tokens.values() if each.owner == row.name]:
            if token.revoked_unix is None:
                self.tokens[token.token_id] = replace(token, revoked_unix=row.changed_unix)

    def forget_expired_logins(self, now_unix: float) -> None:
        """Drop logins that nobody can use any more."""
        self.logins = {
            key: row
            for key, row in self.logins.items()
            if row.ended_unix is None and row.expires_unix > now_unix
        }

    def missing_from(self, found: AccountMemory) -> list[AccountRow]:
        """The rows that ``found`` lacks or contradicts, users before what hangs on them."""
        missing: list[AccountRow] = [row for name, row in self._removed.items() if name in found.users]
        missing += [row for name, row in self.users.items() if found.users.get(name) != row]
        for token_id, token in self.tokens.items():
            known = found.tokens.get(token_id)
            if known is None or known.revoked_unix != token.revoked_unix:
                missing.append(token)
        for login_id, login in self.logins.items():
            other = found.logins.get(login_id)
            if other is None or other.ended_unix != login.ended_unix:
                missing.append(login)
        return missing
