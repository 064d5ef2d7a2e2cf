"""``draft="auto"``: the target's own 4-bit copy where the planner's model of costs says that it pays, else n-grams."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from specdec_fast.config import EngineConfig
from specdec_fast.drafters.base import Drafter
from specdec_fast.drafters.self_draft.drafter import SelfDrafter
from specdec_fast.models.quantized_linears import how_quantised
from specdec_fast.models.rounded_models import tensors_after_rounding, weights_to_round
from specdec_fast.planner.choice import MOST_DRAFT_TOKENS, expected_tokens
from specdec_fast.runner.graphs.buckets import GraphLimits
from specdec_fast.runner.profiling import forward_seconds
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.speculation_length.step_costs import StepCosts

_COPY = "self"
_OTHERWISE = "ngram"  # costs no memory and next to no time
_ACCEPTANCE = 0.9  # of a copy's draft tokens: .92 and .94 of greedy tokens agreed on two trained targets
_LEAST_GAIN = 1.1  # times plain decoding: what is expected is no more exact than that


class DraftChoice(NamedTuple):
    """What ``draft="auto"`` stands for."""

    draft: str | Drafter  # what ``make_drafter`` takes
    name: str  # of the drafter
    why: str  # the reason, for people


class _Gain(NamedTuple):
    """The best expected speed with a drafter, relative to plain decoding."""

    ratio: float
    plain: float  # seconds of a plain step
    step: float  # of a step with draft tokens
    num_draft_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.ratio:.2f} times the speed of plain decoding (a step takes {self.plain * 1e3:.3g} ms, one with "
            f"{self.num_draft_tokens} draft tokens {self.step * 1e3:.3g} ms)"
        )


def choose_draft(
    target: RaggedModel, config: EngineConfig, can_afford: Callable[[str], bool], make: Callable[[str], Drafter]
) -> DraftChoice:
    """Choose between a 4-bit copy of the target and n-grams, for batches of ``max_batch_size`` sequences.

    The target's forwards are timed. A copy saves the time of the bytes that it does not read, at best; if drafting with
    it can pay, it is made, and timed too. The choice changes no output, and may differ between machines.

    Args:
        target: the model that will verify.
        config: the engine's settings.
        can_afford: whether the memory that is left has room for a drafter with this name.
        make: makes the drafter with this name.

    Raises:
        ConfigError, NotYetSupportedError: from ``make``: a weight cannot be rounded, or a module be copied.
    """
    if (obstacle := _obstacle(target)) is not None:
        return DraftChoice(_OTHERWISE, _OTHERWISE, obstacle)
    if not can_afford(_COPY):
        why = f"memory_bytes={config.memory_bytes} has no room for a copy of the target in 4 bits"
        return DraftChoice(_OTHERWISE, _OTHERWISE, why)
    size = config.max_batch_size
    lengths = config.num_draft_tokens
    candidates = [lengths] if isinstance(lengths, int) else list(range(1, MOST_DRAFT_TOKENS + 1))
    target.use_graphs(GraphLimits(size, max(candidates) + 1))  # so that steps are timed as they will run
    counts = sorted({1, size, *(size * (1 + k) for k in candidates)})
    verify = forward_seconds(target, counts, most_sequences=size)
    saved = verify[1] * (1 - _share_of_copy(target))
    at_best = _gain(size, candidates, verify, {count: verify[count] - saved for count in {1, size}})
    if at_best.ratio < _LEAST_GAIN:
        return DraftChoice(_OTHERWISE, _OTHERWISE, f"{_expected(size)} at best {at_best}")
    copy = make(_COPY)
    gain = _gain(size, candidates, verify, copy.forward_seconds(sorted({1, size})))
    if gain.ratio < _LEAST_GAIN:
        return DraftChoice(_OTHERWISE, _OTHERWISE, f"{_expected(size)} {gain}")
    return DraftChoice(copy, copy.name, f"{_expected(size)} {gain}")


def _expected(size: int) -> str:
    return f"with a copy of the target in 4 bits, at batch size {size}, the planner expects"


def _obstacle(target: RaggedModel) -> str | None:
    """Return why no copy can draft, or None."""
    if (how := how_quantised(target.model)) is not None:
        return f"the target is quantised already ({how}), so a copy of it in 4 bits gains nothing"
    if target.layout.states:
        return "draft rows of a copy of the target would advance the states of its recurrent layers"
    if target.layout.is_spread:
        return "the layers of the target lie on several devices, and a copy of it would be made for one"
    if target.is_sharded:
        return "the target is sharded over processes, and no copy of a part is made"
    if not weights_to_round(target.model, SelfDrafter.quantization):
        return "the target has no linears to round"
    return None


def _share_of_copy(target: RaggedModel) -> float:
    """Return the bytes of the rounded weights over those that they have in the target."""
    model = target.model
    _, few = tensors_after_rounding(model, SelfDrafter.quantization)
    return few / sum(each.parameter.nbytes for each in weights_to_round(model, SelfDrafter.quantization))


def _gain(size: int, candidates: list[int], verify: dict[int, float], draft: dict[int, float] | None) -> _Gain:
    """Return the gain with the best of the candidates for K."""
    seconds = StepCosts(verify, draft, max(candidates)).profile(size)
    emitted = expected_tokens([_ACCEPTANCE] * max(candidates))
    gains = [_Gain(emitted[k] * seconds[0] / seconds[k], seconds[0], seconds[k], k) for k in candidates]
    return max(gains)
