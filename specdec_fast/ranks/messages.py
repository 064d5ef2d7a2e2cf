"""Messages of rank 0 to the other ranks of a target that ``tp_size`` shards: which forwards to compute, on which pages.

Rank 0 alone schedules, drafts and accepts. The others hold their part of the weights and of the KV entries, and repeat
every operation of rank 0 that reads or writes these. Pools of pages have numbers, and all ranks name the same page by
the same number, so a batch on the pages of rank 0 is one on the pages of every rank.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, RowPadding
from specdec_fast.batch.recurrent_batch import RecurrentBatch


class LoadTarget(NamedTuple):
    """Load the target together with the other ranks. Answered: how it runs there, or the failure of this rank."""

    source: str
    config: Any  # an EngineConfig
    most_draft_tokens: int
    num_threads: int
    folder: str  # in which the ranks find each other
    on_one_gpu: bool


class Loaded(NamedTuple):
    """How a rank runs forwards; all ranks must do the same."""

    has_program: bool
    row_padding: RowPadding


class Failure(NamedTuple):
    """What failed in a rank."""

    text: str
    is_memory: bool  # whether memory ran out
    was_aborted: bool  # whether only another rank failed


class MakePool(NamedTuple):
    """Allocate pages for ``num_tokens`` positions, and the first state slots. Answered: None, or the failure."""

    pool: int
    num_tokens: int
    page_size: int
    row_padding: RowPadding
    has_states: bool  # whether it has state slots of its own; a larger pool takes those of the one that it replaces
    most_draft_tokens: int  # for which a slot has room


class CopyPages(NamedTuple):
    """Copy all pages of a pool into the first pages of a larger one, which takes its state slots."""

    source: int
    destination: int


class DropPools(NamedTuple):
    """Free pools that rank 0 has freed."""

    pools: list[int]


class ComputeForward(NamedTuple):
    """Compute the rows of a batch; see ``RaggedModel.forward``."""

    pool: int
    batch: dict[str, Any]  # from ``packed``
    logit_rows: np.ndarray | None
    num_slots: int  # of states, which the pool of rank 0 has; 0 without recurrent layers
    num_growths: int  # of these; graphs are recorded again in all ranks after a growth that has failed in one, too
    has_taps: bool  # whether rank 0 takes the hidden states of its taps


class MoveEntries(NamedTuple):
    """Move the KV entries of accepted rows of trees; the arguments of ``compact_kv_``."""

    pool: int
    table: np.ndarray
    moves: list[np.ndarray]


class UseTaps(NamedTuple):
    """Compute hidden states for a drafter from now on; see ``RaggedModel.use_taps``."""

    ids: tuple[int | str, ...]


class UseGraphs(NamedTuple):
    """Replay forwards of few rows as graphs from now on; see ``RaggedModel.use_graphs``."""

    limits: Any  # of ``runner/graphs/buckets.py``


class GatherEnd(NamedTuple):
    """Give rank 0 this rank's part of an end of the target; see ``whole_end``."""

    is_output: bool


class Restart(NamedTuple):
    """A forward has failed in some rank: forget its exchanges. Answered: None, or the failure of this rank."""


def packed(batch: RaggedBatch) -> dict[str, Any]:
    """Return a batch for a message: arrays in place of tensors."""
    values = _arrays_of(batch)
    if batch.cu_seqlens_q is batch.cu_seqlens:
        del values["cu_seqlens_q"]
    if batch.recurrent is not None:
        values["recurrent"] = _arrays_of(batch.recurrent)
    return values


def _arrays_of(batch: RaggedBatch | RecurrentBatch) -> dict[str, Any]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value.cpu().numpy() if isinstance(value, Tensor) else value for name, value in values.items()}


def unpacked(values: dict[str, Any], device: torch.device) -> RaggedBatch:
    """Return the batch of which ``packed`` made ``values``."""
    values = {name: on_device(value, device) for name, value in values.items()}
    if (recurrent := values["recurrent"]) is not None:
        values["recurrent"] = RecurrentBatch(**{name: on_device(each, device) for name, each in recurrent.items()})
    return RaggedBatch(**{"cu_seqlens_q": values["cu_seqlens"]} | values)


def on_device(value: Any, device: torch.device) -> Any:
    """Return the tensor of an array; anything else as it is."""
    return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
