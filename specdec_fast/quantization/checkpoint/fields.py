"""Reads the fields of ``quantization_config`` with their types, and refuses those that nobody has read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from specdec_fast.errors import ConfigError

_REQUIRED: Any = object()
_OFF: tuple[Any, ...] = (None, False, "", [], {}, 0)  # an unknown field with such a value asks for nothing


class Fields:
    """The fields of one JSON object.

    A field's read method raises ConfigError, which names the field's path, if the field is absent without a default, or
    has another type or value than expected.
    """

    def __init__(self, values: Any, path: str) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is {values!r}; expected an object.")
        self._values = values
        self._path = path
        self._is_read: set[str] = set()

    def fault(self, name: str, expected: str) -> ConfigError:
        """Return the error of a field with an unexpected value."""
        return ConfigError(f"{self._path}.{name} is {self._values.get(name)!r}; expected {expected}.")

    def raw(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field of any type; null counts as absent."""
        self._is_read.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{self._path} has no field {name}, without which its codes cannot be read.")
        return default

    def choice(self, name: str, allowed: Iterable[Any], default: Any = _REQUIRED) -> Any:
        """Return a field with one of several values; capitals do not matter in strings."""
        value = self.raw(name, default)
        lowered = value.lower() if isinstance(value, str) else value
        for each in allowed:
            if type(each) is type(lowered) and each == lowered:
                return each
        raise self.fault(name, " or ".join(repr(each) for each in allowed))

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """Return a boolean field."""
        value: bool = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def group_size(self, name: str, default: Any = _REQUIRED) -> int | None:
        """Return the inputs of a group, a multiple of 16; None for -1: all inputs of an output."""
        value = self.raw(name, default)
        if value is None or (value == -1 and not isinstance(value, bool)):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value % 16 != 0:
            raise self.fault(name, "-1 or a positive multiple of 16")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty if absent."""
        value = self.raw(name, ())
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
            raise self.fault(name, "a list of strings")
        return tuple(value)

    def child(self, name: str) -> Fields:
        """Return the fields of an object in a field."""
        return Fields(self.raw(name), f"{self._path}.{name}")

    def children(self, name: str) -> dict[str, Fields]:
        """Return the objects in an object, by their names."""
        value = self.raw(name, {})
        if not isinstance(value, dict):
            raise self.fault(name, "an object")
        return {key: Fields(each, f"{self._path}.{name}.{key}") for key, each in value.items()}

    def skip(self, *names: str) -> None:
        """Count fields as read that say how codes were found, not what they mean."""
        self._is_read.update(names)

    def close(self) -> None:
        """Raise ConfigError for the first field that is set and has not been read."""
        for name, value in self._values.items():
            if name not in self._is_read and value not in _OFF:
                raise ConfigError(
                    f"{self._path}.{name} is {value!r}; this field is unknown, and could change what the codes mean."
                )


def pattern(expression: str, path: str) -> re.Pattern[str]:
    """Compile a regular expression of a config. Raises ConfigError if it is none."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{path} has {expression!r}, which is no regular expression: {error}.") from error
