"""Reading a configuration field by field: whatever is missing or of another type is named with its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.errors import UnsupportedModel

MOST_ITEMS = 1 << 31


class Fields:
    """The fields of one map of a configuration; ``path`` is where it stands, for messages."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def name_of(self, name: str) -> str:
        """A field's dotted path."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it stands, ``None`` where it is absent."""
        return self._values.get(name)

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST_ITEMS) -> int:
        """A whole number from ``least`` to ``most``.

        Raises:
            UnsupportedModel: naming the field and its value.
        """
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string that is not empty.

        Raises:
            UnsupportedModel: naming the field and its value.
        """
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "a string")
        return value

    def list_of(self, name: str, kind: type) -> list[Any]:
        """A list of one type.

        Raises:
            UnsupportedModel: naming the field and its value.
        """
        value = self._values.get(name)
        if not isinstance(value, list) or not all(
            isinstance(each, kind) and not isinstance(each, bool) for each in value
        ):
            raise self.wrong(name, f"a list of {kind.__name__} values")
        return value

    def inside(self, name: str) -> Fields:
        """The fields of a nested map.

        Raises:
            UnsupportedModel: naming the field.
        """
        value = self._values.get(name)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "a map")
        return Fields(value, self.name_of(name))

    def wrong(self, name: str, wanted: str) -> UnsupportedModel:
        """The error for a field that cannot be used."""
        found = "is missing" if name not in self._values else f"is {_shown(self._values[name])}"
        return UnsupportedModel(
            f"The configuration's field '{self.name_of(name)}' {found}; planning needs {wanted}.",
            remedy="Use the config.json that was published with the model.",
            field=self.name_of(name),
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
