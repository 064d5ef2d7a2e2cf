"""Taps: the hidden states of a model that a drafter asks for.

Tap l is the residual stream after l layers (0: the embeddings), before the final norm; ``"final"`` is the input of the
output layer, after the final norm. The last entry of ``hidden_states`` of transformers is ``"final"``, not tap L.
"""

from __future__ import annotations

from typing import Any

from specdec_fast.errors import ConfigError, DrafterError

FINAL = "final"


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return the taps of EAGLE-3 for a target of ``num_layers`` layers: 2, L // 2, L - 3 (arXiv 2503.01840).

    Raises:
        ConfigError: two of them are the same layer, or they are not in rising order: below 7 layers.

    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise ConfigError(
            f"a target of {num_layers} layers has no default taps, because {taps} are not three different layers in "
            f"rising order; pass three ids from 0 to {num_layers}."
        )
    return taps


def checked_taps(taps: Any, num_layers: int) -> tuple[int | str, ...]:
    """Return the taps of a drafter, checked against the number of layers of the target.

    Raises:
        DrafterError: they are not a tuple or list of different ids, each from 0 to ``num_layers`` or ``"final"``.

    """
    if not isinstance(taps, (tuple, list)):
        raise DrafterError(f"a drafter's taps are {taps!r}; expected a tuple of layer ids, and {FINAL!r} if it likes.")
    wrong = [tap for tap in taps if tap != FINAL and not (type(tap) is int and 0 <= tap <= num_layers)]
    if wrong:
        raise DrafterError(
            f"a drafter's taps {tuple(taps)} contain {wrong[0]!r}; the target has {num_layers} layers, so expected ids "
            f"from 0 (the embeddings) to {num_layers}, or {FINAL!r}."
        )
    if len(set(taps)) < len(taps):
        raise DrafterError(f"a drafter's taps {tuple(taps)} contain an id twice; pass different ids.")
    return tuple(taps)
