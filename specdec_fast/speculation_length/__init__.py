"""Speculation length: how many draft tokens each sequence of a step gets, fixed or chosen by a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec_fast.errors import ConfigError
from specdec_fast.speculation_length.adaptive import AdaptiveLength
from specdec_fast.speculation_length.base import LengthPolicy, Profiler, StepObservation
from specdec_fast.speculation_length.fixed import FixedLength

# The values of ``num_draft_tokens`` besides integers and instances: called without an argument, or with the largest K.
LENGTH_POLICIES: dict[str, Callable[..., LengthPolicy]] = {"auto": AdaptiveLength}

__all__ = ["LENGTH_POLICIES", "LengthPolicy", "Profiler", "StepObservation", "make_length_policy"]


def make_length_policy(num_draft_tokens: Any) -> LengthPolicy:
    """Return the policy that ``num_draft_tokens`` asks for: an instance as it is, else a new one.

    Raises:
        ConfigError: it is no integer from 0 on, no name of ``LENGTH_POLICIES`` and no LengthPolicy.
    """
    if isinstance(num_draft_tokens, LengthPolicy):
        most = getattr(num_draft_tokens, "max_draft_tokens", None)
        if type(most) is not int or not 0 <= most < 2**63:
            name = type(num_draft_tokens).__name__
            raise ConfigError(f"max_draft_tokens of {name}: {most!r}; expected an int, the largest K that it gives.")
        return num_draft_tokens
    if isinstance(num_draft_tokens, str) and num_draft_tokens in LENGTH_POLICIES:
        return LENGTH_POLICIES[num_draft_tokens]()
    if isinstance(num_draft_tokens, int) and not isinstance(num_draft_tokens, bool) and 0 <= num_draft_tokens < 2**63:
        return FixedLength(num_draft_tokens)
    names = ", ".join(map(repr, LENGTH_POLICIES))
    raise ConfigError(
        f"num_draft_tokens={num_draft_tokens!r}: expected an integer >= 0, or {names}, or a LengthPolicy (an instance)."
    )
