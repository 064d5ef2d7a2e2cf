"""How often a drafter agrees with its target at its taps, and at the taps beside them.

Tools count layers differently, and a tap that is off by one looks like a bad drafter. So the same drafter is measured
with all layers shifted by -1, 0 and +1, on texts that the target writes.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

from torch import nn

from specdec_fast.config import EngineConfig
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ConfigError
from specdec_fast.sampling_params import SamplingParams

OFFSETS = (-1, 0, 1)
_SURE = 3.0  # standard errors of a difference that is no accident


class Agreement(NamedTuple):
    """What was measured at one offset."""

    offset: int  # added to every tap
    taps: tuple[int | str, ...]  # the layers after that; "final" for a drafter of the output layer's input
    num_accepted: int  # draft tokens that were the target's own
    num_drafts: int  # draft tokens, one per step

    @property
    def rate(self) -> float:
        """The share of draft tokens that were accepted."""
        return self.num_accepted / max(1, self.num_drafts)

    def is_above(self, other: Agreement) -> bool:
        """Return whether the rate is higher by more than three standard errors of the difference."""
        variances = [each.rate * (1 - each.rate) / max(1, each.num_drafts) for each in (self, other)]
        return self.rate - other.rate > _SURE * sqrt(sum(variances))


def agreements(
    target: nn.Module, drafter: str, config: EngineConfig, prompts: list[Any], num_tokens: int
) -> list[Agreement]:
    """Decode the prompts greedily with one draft token per step, at every offset at which the taps are layers.

    Args:
        target: a loaded model.
        drafter: as ``Engine`` takes it, with taps. Without ones that ``EngineConfig.tap_layers`` sets (``"final"``), it
            is measured at offset 0 only.
        config: ``tap_layers`` are the taps at offset 0, None: those that the checkpoint names.
        prompts: as ``Engine.generate`` takes them; at least one.
        num_tokens: tokens to write in all, rounded up to equally many per prompt.

    Raises ConfigError if the drafter reads no hidden states, a RequestError if a prompt cannot be served.
    """
    config = replace(config, num_draft_tokens=1, draft_tree="chain")
    engine = Engine(target, drafter, config)
    taps = engine.drafter.taps
    if not taps:
        raise ConfigError(f"{engine.drafter.name} reads no layers of the target, so there are no taps to compare.")
    layers = tuple(tap for tap in taps if isinstance(tap, int))
    has_neighbours = len(layers) == len(taps)  # "final" has none: then the agreement alone is measured
    params = SamplingParams(max_new_tokens=-(-num_tokens // len(prompts)), ignore_eos=True)
    result = []
    for offset in OFFSETS if has_neighbours else (0,):
        measured = engine
        shifted = taps
        if offset:
            moved = tuple(tap + offset for tap in layers)
            if min(moved) < 0 or max(moved) > engine.target.hf.num_layers:
                continue
            measured = Engine(target, drafter, replace(config, tap_layers=moved))
            shifted = moved
        stats = [output.raise_for_error().stats for output in measured.generate(prompts, params, progress=False)]
        num_accepted = sum(each.num_accepted_tokens for each in stats)
        num_drafted = sum(each.num_draft_tokens for each in stats)
        result.append(Agreement(offset, shifted, num_accepted, num_drafted))
    return result


def better(measured: list[Agreement]) -> Agreement | None:
    """Return the offset that agrees more often than offset 0 by more than three standard errors, the best; or None."""
    unshifted = next(each for each in measured if each.offset == 0)
    return max((each for each in measured if each.is_above(unshifted)), key=lambda each: each.rate, default=None)
