"""Opening the catalog for one read: by its path, closed again afterwards, every failure a typed one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from appliance.catalog.connections import reading_engine
from appliance.catalog.failures import diagnose
from appliance.errors import CatalogUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sqlalchemy import Connection, RowMapping, Select

BUSY_TIMEOUT_SECONDS = 1.0
LARGEST_PAGE = 1_000


class Reader:
    """Reads the catalog at ``path``. Safe to share between threads; every method may raise ``CatalogUnavailable``."""

    def __init__(self, path: Path, *, busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS) -> None:
        self._path = path
        self._engine = reading_engine(path, busy_timeout_seconds=busy_timeout_seconds)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One connection.

        Raises:
            CatalogUnavailable: whatever goes wrong with it.
        """
        try:
            with self._engine.connect() as connection:
                yield connection
        except Exception as error:
            failure = diagnose(error)
            raise CatalogUnavailable(
                f"The catalog cannot be read. {failure.sentence}", remedy=failure.remedy, path=str(self._path)
            ) from error


def page(connection: Connection, query: Select[Any], limit: int) -> Sequence[RowMapping]:
    """The first rows of a query, at most ``LARGEST_PAGE``."""
    return connection.execute(query.limit(max(1, min(limit, LARGEST_PAGE)))).mappings().all()
