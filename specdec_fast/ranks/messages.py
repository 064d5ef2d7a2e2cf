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
from specdec_fast.device_copy import all_to_device, all_to_host

_RECURRENT = "recurrent."  # in front of the names of a ``RecurrentBatch``


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
    rows: dict[str, Any]  # from ``packed``
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


def packed(batch: RaggedBatch, logit_rows: Tensor | None) -> dict[str, Any]:
    """Return what a forward computes for a message: arrays in place of tensors, which come to the host in one copy."""
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if batch.cu_seqlens_q is batch.cu_seqlens:
        del values["cu_seqlens_q"]
    if batch.recurrent is not None:
        values["recurrent"] = None
        values |= {_RECURRENT + field.name: getattr(batch.recurrent, field.name) for field in fields(batch.recurrent)}
    values["logit_rows"] = logit_rows
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return values | dict(zip(tensors, all_to_host(list(tensors.values())), strict=True))


def unpacked(values: dict[str, Any], device: torch.device) -> tuple[RaggedBatch, Tensor | None]:
    """Return the batch and the ``logit_rows`` of which ``packed`` made ``values``, in one copy to the device."""
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    values = values | dict(zip(arrays, all_to_device(list(arrays.values()), device), strict=True))
    logit_rows = values.pop("logit_rows")
    of_states = {name: values.pop(name) for name in list(values) if name.startswith(_RECURRENT)}
    if of_states:
        values["recurrent"] = RecurrentBatch(**{name.removeprefix(_RECURRENT): v for name, v in of_states.items()})
    return RaggedBatch(**{"cu_seqlens_q": values["cu_seqlens"]} | values), logit_rows


def on_device(value: Any, device: torch.device) -> Any:
    """Return the tensor of an array; anything else as it is."""
    return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
