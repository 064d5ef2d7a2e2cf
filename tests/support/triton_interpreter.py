"""Triton's interpreter without its largest wastes; what kernels compute is the same.

It replaces the functions of ``triton.language`` at every call of a device function, which takes a third of the time of
our kernels; here it does so once per launch. For every sum and product of integers it also computes whether that
overflows, and does nothing with the result, because only its debug mode asserts it; that is another third.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _OncePerLaunch:
    """In place of the interpreter's own function: a call inside a launch replaces only what is not yet replaced."""

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._scopes: list[Any] = []
        self._languages: frozenset[str] = frozenset()

    def __call__(self, fn: Any) -> _OncePerLaunch:
        languages = _languages_of(fn)
        if not languages <= self._languages:
            self._scopes.append(self._patch(fn))
            self._languages |= languages
        return self

    def restore(self) -> None:
        """End a launch."""
        while self._scopes:
            self._scopes.pop().restore()
        self._languages = frozenset()


@cache
def _languages_of(fn: Any) -> frozenset[str]:
    """Return which of the modules that the interpreter changes a kernel's file names."""
    seen = list(fn.__globals__.values())
    return frozenset(module.__name__ for module in (tl, tl.core) if any(value is module for value in seen))


def speed_up() -> None:
    """Install it: the scopes, if this Triton's interpreter can undo what it replaces."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _OncePerLaunch(interpreter._patch_lang)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
