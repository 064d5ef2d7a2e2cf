"""Where an emission ends: the one rule that the oracle and the engine share (invariant I5)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specdec_fast.types import FinishReason


def cut_emission(
    tokens: Sequence[int], stop_ids: Collection[int], max_tokens: int
) -> tuple[list[int], FinishReason | None]:
    """Cut one step's tokens at the first stop id (kept) or at ``max_tokens``.

    Args:
        tokens: what the step would emit for one sequence, ``accepted + 1`` ids.
        stop_ids: EOS ids and the request's own stop ids.
        max_tokens: how many more tokens the sequence may emit, at least 1.

    Returns:
        The tokens to commit, and ``"stop"``, ``"length"`` or None when the sequence goes on. A stop id that
        arrives as the very last allowed token counts as ``"stop"``, as in transformers.

    """
    for i, token in enumerate(tokens[:max_tokens]):
        if token in stop_ids:
            return list(tokens[: i + 1]), "stop"
    if len(tokens) >= max_tokens:
        return list(tokens[:max_tokens]), "length"
    return list(tokens), None
