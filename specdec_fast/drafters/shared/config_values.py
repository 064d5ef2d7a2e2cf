"""Values of a checkpoint's ``config.json``, checked: a wrong one is a ConfigError that names the file and the field.

A null is a missing value.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from specdec_fast.errors import ConfigError

MOST_PARTS = 1000  # layers, heads or blocks of a drafter: the names of their weights are listed before any is read
_LARGEST_INTEGER = 2**31 - 1
_LARGEST_NUMBER = 1e18  # what every integer and float of torch holds


def read_json(folder: Path, kind: str) -> dict[str, Any]:
    """Return what ``config.json`` says; else raise ``ConfigError``, which names the ``kind`` of drafter."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {str(path)!r} ({error}); expected the folder of {kind}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r} holds a {type(found).__name__}; expected a JSON object.")
    return found


def positive_integer(
    folder: Path, found: dict[str, Any], name: str, default: int | None, most: int = _LARGEST_INTEGER
) -> int:
    """Return an integer from 1 to ``most``, ``default`` where none is given; else raise ``ConfigError``."""
    value = default if found.get(name) is None else found[name]
    if type(value) is not int or not 1 <= value <= most:
        raise wrong_value(folder, name, value, f"a positive integer up to {most}")
    return value


def positive_number(folder: Path, found: dict[str, Any], name: str, default: float) -> float:
    """Return a positive finite number, ``default`` where none is given; else raise ``ConfigError``."""
    value = default if found.get(name) is None else found[name]
    if type(value) not in (int, float) or not 0 < value < _LARGEST_NUMBER:
        raise wrong_value(folder, name, value, f"a positive number below {_LARGEST_NUMBER:g}")
    return float(value)


def flag(folder: Path, found: dict[str, Any], name: str, default: bool) -> bool:
    """Return true or false (also written as 1 or 0), ``default`` where none is given; else raise ``ConfigError``."""
    value = default if found.get(name) is None else found[name]
    if type(value) not in (bool, int) or value not in (0, 1):
        raise wrong_value(folder, name, value, "true or false")
    return bool(value)


def mapping(folder: Path, found: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a JSON object, empty where none is given; else raise ``ConfigError``."""
    value = {} if found.get(name) is None else found[name]
    if not isinstance(value, dict):
        raise wrong_value(folder, name, value, "a JSON object")
    return value


def names(folder: Path, found: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return a list of strings as a tuple, empty where none is given; else raise ``ConfigError``."""
    value = [] if found.get(name) is None else found[name]
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise wrong_value(folder, name, value, "a list of names")
    return tuple(value)


def wrong_value(folder: Path, name: str, value: object, expected: str) -> ConfigError:
    """Return the error of a value that is not what was expected."""
    return ConfigError(f"{str(folder / 'config.json')!r}: {name} is {reprlib.repr(value)}; expected {expected}.")
