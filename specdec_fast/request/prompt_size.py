"""How much work a prompt is, as far as it shows before it is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from specdec_fast.request.prompt_options import PromptOptions

SHORT = 32_768  # characters, or token ids, of a short prompt at most; it is encoded in some hundredths of a second


def size_of(prompt: Any, options: PromptOptions) -> int:
    """Return the characters or token ids of a prompt and of what its chat template gets; more than ``SHORT`` if many.

    A number in messages or in variables of a template counts as much as it says, because a template may repeat
    something so often. An object of unknown kind counts as many.
    """
    is_ids = isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Integral)
    if is_ids or isinstance(prompt, str):
        return len(prompt)
    size = 0
    rest: list[Any] = [prompt, options.chat_template, options.chat_template_kwargs, options.tools]
    while rest and size <= SHORT:
        value = rest.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, (int, float, type(None))):
            number = abs(value or 0)
            size += 1 + (int(number) if number < SHORT else SHORT)  # NaN is not less
        elif isinstance(value, (Mapping, list, tuple)):
            size += len(value)
            if size <= SHORT:  # the elements are looked at only if there are few
                rest += value.values() if isinstance(value, Mapping) else value
        else:
            return SHORT + 1
    return size
