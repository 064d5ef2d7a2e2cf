"""EXSPEC: a window of sequences, each with its own KV; sequences of equal length step together.

until the queue and the window are empty:
    fill      the window with up to W sequences, each prefilled alone
    group     B sequences of equal length if the window has them (nothing to realign), else its first B
    assemble  stack the group's KV; realign it by eqspec's repad if the lengths differ
    step      draft, verify, accept, as eqspec does
    split     every sequence gets its own KV back; finished sequences leave
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import torch

from specdec_fast.oracle.dense import DenseLayerKV, DenseModel, Repad, repad_in_python
from specdec_fast.oracle.drafting import make_dense_drafter
from specdec_fast.oracle.step import (
    OracleRun,
    Row,
    StepRecord,
    StopRule,
    make_rows,
    paddings,
    prefill,
    speculative_step,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OwnKV = dict[Row, list[DenseLayerKV]]  # each tensor [1, num_kv_heads, entries, head_dim]


def exspec(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    prompts: list[list[int]],
    limits: StopRule,
    num_draft_tokens: int = 5,
    batch_size: int = 8,
    window_size: int | None = None,
    repad: Repad = repad_in_python,
) -> OracleRun:
    """Decode all prompts through a window; finished sequences leave at once, and others take their place.

    ``batch_size`` is B, the largest number of sequences in a step; ``window_size`` W >= B, the number of sequences that
    hold KV, None: 2 B. ``repad`` aligns a group of unequal lengths. The rest, outputs too, is as in ``eqspec``.
    """
    run = OracleRun()
    rows = make_rows(prompts, limits)
    target_rows = DenseModel(target, lag=1)
    drafter = make_dense_drafter(draft)
    models = [target_rows] + ([drafter.model] if drafter.model else [])
    stores: list[OwnKV] = [{} for _ in models]
    waiting: deque[Row] = deque(rows)
    window: list[Row] = []
    while waiting or window:
        while waiting and len(window) < (window_size or 2 * batch_size):
            window.append(waiting.popleft())
            with run.timer("prefill"):
                for model, store in zip(models, stores, strict=True):
                    model.load([])
                    prefill(model, window[-1:])
                    store[window[-1]] = model.layers
        group = choose_group(window, batch_size)
        padding = paddings(group)
        with run.timer("assemble"):
            for model, store in zip(models, stores, strict=True):
                model.load(_stack([store[row] for row in group]))
        with run.timer("realign"):
            longest = max(len(row.token_ids) for row in group)
            unaligned = [0] * len(group)
            moved = sum(model.realign(unaligned, padding, longest, repad) for model in models)
        accepted, emitted = speculative_step(group, target_rows, drafter, num_draft_tokens, run)
        with run.timer("assemble"):
            for model, store in zip(models, stores, strict=True):
                store.update(_split(model, group, padding))
                for row in group:
                    if row.finished:
                        del store[row]
        window = [row for row in window if not row.finished]
        run.steps.append(StepRecord(accepted, emitted, moved, not any(padding), run.timer.lap()))
    run.outputs = [row.emitted_ids for row in rows]
    return run


def choose_group(window: list[Row], batch_size: int) -> list[Row]:
    """Choose ``batch_size`` sequences of equal length if the window has them, else its first ``batch_size``."""
    by_length: dict[int, list[Row]] = defaultdict(list)
    for row in window:
        by_length[len(row.token_ids)].append(row)
        if len(by_length[len(row.token_ids)]) == batch_size:
            return by_length[len(row.token_ids)]
    return window[:batch_size]


def _stack(owned: list[list[DenseLayerKV]]) -> list[DenseLayerKV]:
    """Stack the KV of several sequences; every row begins in column 0, with zeros after the shorter ones."""
    filled = [layers for layers in owned if layers]
    if not filled:  # no sequence has an entry yet: prompts of one or two tokens
        return []
    num_columns = max(layers[0][0].shape[2] for layers in filled)

    def stack(layer: int, which: int) -> torch.Tensor:
        sample = filled[0][layer][which]
        out = sample.new_zeros(len(owned), sample.shape[1], num_columns, sample.shape[3])
        for row, layers in enumerate(owned):
            if layers:
                entries = layers[layer][which]
                out[row, :, : entries.shape[2]] = entries[0]
        return out

    return [(stack(layer, 0), stack(layer, 1)) for layer in range(len(filled[0]))]


def _split(model: DenseModel, group: list[Row], padding: list[int]) -> OwnKV:
    """Return every sequence's own entries, without those of rejected tokens."""
    layers_of = {}
    for i, (row, start) in enumerate(zip(group, padding, strict=True)):
        stop = start + max(0, len(row.token_ids) - model.lag)
        layers_of[row] = [(k[i : i + 1, :, start:stop], v[i : i + 1, :, start:stop]) for k, v in model.layers]
    return layers_of
