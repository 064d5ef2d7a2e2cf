"""Regular expressions of schemas, narrowed to texts in which no mark begins."""

from __future__ import annotations

import re

BEGIN = "<"  # with which every mark that ends a value begins
# What no class may have. A surrogate is no character: the three bytes of one decode to three replacement characters.
NEVER = BEGIN + r"\ud800-\udfff"
_HEXADECIMAL = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\u\{([0-9a-fA-F]+)\}")
_SPACES = r"\s\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_WIDE = {
    ".": rf"[^{NEVER}\n\r]",
    r"\S": f"[^{NEVER}{_SPACES}]",
    r"\D": f"[^{NEVER}0-9]",
    r"\W": f"[^{NEVER}a-zA-Z0-9_]",
}
_EVERYTHING = ({r"\s", r"\S"}, {r"\d", r"\D"}, {r"\w", r"\W"})
_PART = re.compile(r"\\x[0-9a-fA-F]{2}|\\u\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL)


def narrowed(pattern: str) -> str:
    """Return an expression for the texts that a pattern matches and in which there is no ``<``.

    Raises:
        ValueError: the pattern asks for a ``<``, or it has something of which this is not known.
    """
    found = ""
    place = 0
    while place < len(pattern):
        part = _part(pattern, place)
        place += len(part)
        if part == "[":
            text, place = _narrowed_class(pattern, place)
            found += text
        elif part in _WIDE:
            found += _WIDE[part]
        elif _code(part) == ord(BEGIN):
            raise ValueError(f"it asks for {BEGIN!r}")
        else:
            found += part
    return found


def _narrowed_class(pattern: str, place: int) -> tuple[str, int]:
    """Return the character class that begins behind its bracket, without ``<``, and where it ends."""
    is_negated = pattern.startswith("^", place)
    place += is_negated
    first = place
    ranges: list[tuple[str, str]] = []  # the first and the last of each; one character twice
    while not pattern.startswith("]", place) or place == first:
        low = high = _part(pattern, place)
        place += len(low)
        if pattern.startswith("-", place) and not pattern.startswith("-]", place):
            high = _part(pattern, place + 1)
            place += 1 + len(high)
        ranges.append((low, high))
    items = {low for low, _ in ranges}
    if is_negated:
        return f"[^{NEVER}{pattern[first:place]}]", place + 1
    if items in _EVERYTHING:
        return f"[^{NEVER}]", place + 1
    if wide := items.intersection(_WIDE).difference("."):
        raise ValueError(f"it has {min(wide)} in a class")
    kept = "".join(_without_begin(low, high) for low, high in ranges)
    if not kept:
        raise ValueError(f"it asks for {BEGIN!r}")
    return f"[{kept}]", place + 1


def _without_begin(low: str, high: str) -> str:
    """Return a range of a class without ``<``."""
    first = _code(low)
    last = _code(high)
    if low == high:
        return "" if first == ord(BEGIN) else low
    if first is None or last is None:
        raise ValueError(f"it has the range {low}-{high}")
    if not first <= ord(BEGIN) <= last:
        return f"{low}-{high}"
    return (f"{low}-;" if first < ord(BEGIN) else "") + (f"=-{high}" if last > ord(BEGIN) else "")


def _part(pattern: str, place: int) -> str:
    """Return the character, or the escape, at a place."""
    found = _PART.match(pattern, place)
    if found is None:
        raise ValueError("it ends within a class or an escape")
    if found[0][:2] in (r"\p", r"\P", r"\c", r"\k"):
        raise ValueError(f"it has {found[0][:2]}")
    return found[0]


def _code(part: str) -> int | None:
    """Return the code of a character or an escape; None if it has none, as ``\\d``."""
    if (found := _HEXADECIMAL.fullmatch(part)) is not None:
        return int(next(group for group in found.groups() if group), 16)
    if part.startswith("\\"):
        return None if part[1].isalnum() else ord(part[1])
    return ord(part)
