"""How many draft tokens each sequence of a step gets: a fixed K, or one chosen from cost and acceptance."""

from __future__ import annotations

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import Drafter
from specdec_fast.models.hf_model import RaggedModel
from specdec_fast.models.profiling import forward_seconds, is_rough
from specdec_fast.speculation_length.adaptive import AdaptiveLength, StepCosts
from specdec_fast.speculation_length.base import LengthPolicy, StepObservation
from specdec_fast.speculation_length.cost_model import CostCurve, row_counts, unknown_cost
from specdec_fast.speculation_length.fixed import FixedLength
from specdec_fast.speculation_length.profile_overhead import profile_overhead

__all__ = ["LengthPolicy", "StepObservation", "make_length_policy"]

_CATCHING_UP = 64  # rows at which a draft model's forward is measured for the price of a prompt


def make_length_policy(config: EngineConfig, target: RaggedModel, drafter: Drafter | None) -> LengthPolicy:
    """Build what ``config.num_draft_tokens`` asks for; to adapt, measure the forwards of both models first.

    Args:
        config: K and the largest batch.
        target: with the row rule it will be run with.
        drafter: None for plain decoding.

    """
    if drafter is None:
        return FixedLength(0)
    if not config.is_adaptive:
        return FixedLength(config.most_draft_tokens)
    most, num = config.most_draft_tokens, config.max_batch_size
    measured = forward_seconds(target, row_counts(num * (most + 1)), num)
    verify = CostCurve(measured, is_rough=is_rough(measured))
    drafting = drafter.forward_seconds(row_counts(max(num, _CATCHING_UP)))
    if drafting is None:
        costs = StepCosts(verify, unknown_cost(num))
    else:
        once, largest = drafting.pop(0, 0.0), max(drafting)
        entry_seconds, is_asynchronous = drafting[largest] / largest, target.layout.device.type != "cpu"
        costs = StepCosts(
            verify, CostCurve(drafting, is_rough=is_rough(drafting)), once, entry_seconds, is_asynchronous
        )
    return AdaptiveLength(most, profile_overhead(costs, most, num))
