"""Chooses the executor of a model's forward program; no other module names an executor for a backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.kv_cache.page_pool import KVPages, PagePool, Spans
from specdec_fast.ops import Ops
from specdec_fast.ops.registry import BACKENDS
from specdec_fast.program.plan.ir import (
    Append,
    Attend,
    AttendLinearly,
    Convolve,
    GroupedLinear,
    GroupedPackedLinear,
    Linear,
    PackedLinear,
    Plan,
    Scan,
)
from specdec_fast.program.record.row_views import NotLowerableError


class TokenChoice(NamedTuple):
    """How a drafting loop chooses tokens."""

    vocab_size: int  # number of ids that may be chosen
    sampling: Sampling | None  # how the first forward chooses; None: greedily. There may be no penalties.
    # of a drafter with a vocabulary of its own, [vocab_size] int64: the target's id of each. None: they are the
    # same.
    target_ids: Tensor | None = None
    num_target_ids: int = 0  # the target's number of ids, if there are target_ids
    # of a drafter whose rows take ids of its own, [num_target_ids] int64: its id of each of the target's. None: they
    # take the target's.
    drafter_ids: Tensor | None = None
    num_choosable: int = 0  # with drafter_ids: the target's ids below it may be chosen, in place of all of the drafter


class Projection(NamedTuple):
    """What rows take besides their tokens, if another program computes it from hidden states."""

    # its logits are what the rows take. It has no KV entries, and reads neither tokens nor positions.
    program: ForwardProgram
    hidden_states: list[Tensor]  # its inputs, piece by piece, each [n, ...] and contiguous


class TreeRules(NamedTuple):
    """The trees that a drafting loop grows, one per sequence; see ``trees/growing.py``."""

    depths: list[int]  # the largest depth of each, at least 1
    num_nodes: list[int]  # the largest number of nodes of each, at least 1
    width: int  # nodes of a frontier, and children named for each
    # of the nodes of a static tree, the likeliest first: an earlier node, or -1. Empty: dynamic trees.
    parents: list[int]
    ranks: list[int]  # of these nodes' tokens
    greedy_temperature: float  # of the probabilities by which the tokens of greedy requests are ranked


class DraftedTrees(NamedTuple):
    """The nodes of trees: token ids int64, parents int32 and scores fp32 as in ``Draft``, each ``[sum(counts)]``."""

    token_ids: Tensor
    parents: Tensor
    scores: Tensor
    counts: list[int]


class ForwardProgram(Protocol):
    """What an executor builds from a ``Plan``; see ``program/cpp/executor.py``. Sizes of memory are bytes."""

    def __call__(
        self,
        token_ids: Tensor,
        batch: RaggedBatch,
        pages: KVPages,
        logit_rows: Tensor | None,
        hidden_states: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Compute one batch; return its logits, and write its taps into ``hidden_states``."""

    @property
    def seconds(self) -> float:
        """The time of all forwards so far, without the choice of tokens."""

    def draft(
        self,
        spans: Spans,
        token_ids: list[int],
        num_draft_tokens: list[int],
        choice: TokenChoice,
        inputs: Tensor | Projection | None = None,
    ) -> Tensor:
        """Compute spans, then row after row on the tokens chosen before; return all chosen tokens."""

    def draft_trees(
        self, spans: Spans, token_ids: list[int], rules: TreeRules, choice: TokenChoice, inputs: Tensor | Projection
    ) -> DraftedTrees:
        """Compute spans, then level after level of the trees behind them; return the trees."""

    def verify(
        self,
        spans: Spans,
        last_tokens: list[int],
        draft_tokens: Tensor,
        sampling: Sampling | None,
        hidden_states: Tensor | None = None,
    ) -> tuple[Tensor, list[list[int]], list[list[int]] | None, float]:
        """Verify the draft tokens of every sequence; return logits, emissions, accepted rows, seconds of choosing."""

    @property
    def held_bytes(self) -> int:
        """Memory that the program keeps now."""

    def bytes_for(self, num_rows: int, num_logit_rows: int) -> int:
        """Return the memory that it keeps after a forward of so many rows, if no larger forward came before."""

    def working_bytes(self, num_rows: int, num_logit_rows: int) -> int:
        """Return an upper bound of the memory that one of its operations allocates and frees in such a forward."""

    def release(self) -> None:
        """Free what it keeps; the next forward allocates it again."""


class DeviceProgram(Protocol):
    """A program of launches, which CUDA graphs may record; see ``program/triton/executor.py``."""

    def __call__(
        self,
        batch: RaggedBatch,
        pool: PagePool,
        logit_rows: Tensor | None,
        hidden_states: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Compute one batch of ``T`` rows, as ``HFModel.forward`` does, on a pool of the program's layout.

        Args as in ``cpp.executor.Program.__call__``: ``logit_rows [R]``, ``hidden_states [T, taps, H]`` and ``inputs
        [T, input_size]``, or None.
        """


class Programs(NamedTuple):
    """A model's program: one that computes whole steps in a call, or one of launches."""

    program: ForwardProgram | None
    device_program: DeviceProgram | None


Executor = Callable[[Plan], Programs]


def _cpp(plan: Plan, ops: Ops) -> Programs:
    return Programs(importlib.import_module("specdec_fast.program.cpp.executor").Program(plan), None)


def _triton(plan: Plan, ops: Ops) -> Programs:
    return Programs(None, importlib.import_module("specdec_fast.program.triton.executor").TritonProgram(plan, ops))


# Backend whose ops the executor computes to the type of its devices and what makes a program, which alone imports it.
EXECUTORS = {"cpp": ("cpu", _cpp), "triton": ("cuda", _triton)}

# The ops that an executor computes itself: in every program, and by instruction. Models have linears, so another
# backend of that op is noticed before a model is recorded.
_IN_EVERY_PROGRAM = ("append_kv_", "linear", "paged_attention", "verify_chain")
_OF_INSTRUCTION = {
    Append: "append_kv_",
    Attend: "paged_attention",
    Linear: "linear",
    PackedLinear: "quantized_linear",
    GroupedLinear: "grouped_linear",
    GroupedPackedLinear: "grouped_quantized_linear",
    Convolve: "conv_rows_",
    AttendLinearly: "linear_attention_rows_",
    Scan: "selective_scan_rows_",
}


def executor_for(ops: Ops, device: torch.device, *others: torch.device) -> tuple[Executor | None, str | None]:
    """Return a function that makes a program of a ``Plan``, and None; or None and the reason why there is no executor.

    An executor computes ops itself, or lets the engine's ops compute rows of any number, so the engine must have chosen
    the executor's backend for these ops: otherwise a program would have other bits than the chosen ops. Ops that a plan
    does not use may have any backend, or none; for an op of the plan the function raises a NotLowerableError.
    """
    if others:
        return None, f"its layers lie on several devices ({', '.join(map(str, (device, *others)))})"
    backends = [backend for backend, (device_type, _) in EXECUTORS.items() if device_type == device.type]
    for backend in backends:
        if not _other_backends(ops, backend, _IN_EVERY_PROGRAM):
            return partial(_build, ops, backend), None
    return None, _why_none(ops, backends) or f"no executor runs on {device.type}"


def _build(ops: Ops, backend: str, plan: Plan) -> Programs:
    used = {_OF_INSTRUCTION[type(step)] for step in plan.instructions if type(step) in _OF_INSTRUCTION}
    if others := _other_backends(ops, backend, used):
        raise NotLowerableError(f"programs run on {backend}, here {others}")
    _, make = EXECUTORS[backend]
    return make(plan, ops)


def _other_backends(ops: Ops, backend: str, used: Iterable[str]) -> str:
    others: dict[str, list[str]] = {}
    for op in sorted(used):
        if (other := ops.chosen.get(op, "no backend")) != backend:
            others.setdefault(other, []).append(op)
    return "; ".join(f"{other} serves {', '.join(names)}" for other, names in others.items())


def _why_none(ops: Ops, backends: list[str]) -> str:
    reasons = [
        f"programs run on {backend}, here {_other_backends(ops, backend, _IN_EVERY_PROGRAM)}" for backend in backends
    ]
    problems = [problem for backend in backends if (problem := BACKENDS[backend].why_unavailable())]
    return "; ".join([*reasons, *problems])
