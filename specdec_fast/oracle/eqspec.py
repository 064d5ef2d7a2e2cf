"""EQSPEC: one fixed batch, realigned after every step.

prefill all prompts, right-aligned
until every row has ended:
    draft     K tokens per row
    verify    one forward over [newest token, K draft tokens] of every row
    accept    per row, the draft tokens before the first that differs from the target's own token, and that token
    realign   unpad, append, repad: tokens, positions, mask and KV of every row whose number of emitted tokens
              differs from the growth of the longest row
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_fast.oracle.dense import DenseModel, Repad, repad_in_python
from specdec_fast.oracle.drafting import make_dense_drafter
from specdec_fast.oracle.step import OracleRun, StepRecord, StopRule, make_rows, paddings, prefill, speculative_step

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def eqspec(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    prompts: list[list[int]],
    limits: StopRule,
    num_draft_tokens: int = 5,
    repad: Repad = repad_in_python,
) -> OracleRun:
    """Decode all prompts as one batch until the last has ended.

    As in the published algorithm, finished rows stay in the batch: the models compute them, and they emit nothing.
    Outputs are in input order, and equal to ``autoregressive`` of every prompt. ``draft`` is a model with the same
    vocabulary, or None for prompt lookup; ``limits`` say where requests end; ``num_draft_tokens`` is K, at least 1;
    ``repad`` moves KV entries if rows emitted unequally: Python loops, or a fused op.
    """
    run = OracleRun()
    rows = make_rows(prompts, limits)
    target_rows = DenseModel(target, lag=1)
    drafter = make_dense_drafter(draft)
    models = [target_rows] + ([drafter.model] if drafter.model else [])
    with run.timer("prefill"):
        for model in models:
            prefill(model, rows)
    while not all(row.finished for row in rows):
        padding = paddings(rows)
        accepted, emitted = speculative_step(rows, target_rows, drafter, num_draft_tokens, run)
        with run.timer("realign"):
            new_length = max(len(row.token_ids) for row in rows)
            # padding_new - padding_old, that is (L_new - L_old) - emitted
            shifts = [new - old for new, old in zip(paddings(rows), padding, strict=True)]
            moved = sum(model.realign(padding, shifts, new_length, repad) for model in models)
        run.steps.append(StepRecord(accepted, emitted, moved, not any(padding), run.timer.lap()))
    run.outputs = [row.emitted_ids for row in rows]
    return run
