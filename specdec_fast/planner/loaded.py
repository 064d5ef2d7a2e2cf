"""The memory of loaded models, from the models themselves."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from specdec_fast.errors import DrafterError
from specdec_fast.planner.budget import EngineMemory, EngineSetting, Part, SpreadMemory
from specdec_fast.runner.model_memory import forward_memory, logits_bytes, storage_bytes, weights_of
from specdec_fast.runner.ragged_model import RaggedModel

_SAMPLING_BYTES = 8  # a float64 score per id, in each thread that samples


class HoldsMemory(Protocol):
    """The part of a drafter's contract that concerns memory."""

    def weights(self) -> Iterable[Tensor]:
        """Return the tensors of its weights."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of its KV entries of one position."""

    def bytes_per_sequence(self, most_draft_tokens: int) -> int:
        """Return the bytes of its recurrent states of one sequence, in an engine of this K."""

    @property
    def estimates_memory(self) -> bool:
        """Whether ``step_bytes`` is an estimate."""

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        """Return the memory that it needs beside weights, KV entries and recurrent states."""


def loaded_memory(
    target: RaggedModel, drafter: HoldsMemory | None, page_size: int, states_for: int | None = None
) -> EngineMemory:
    """Return the memory of an engine of loaded models; the target has the row padding with which it will run.

    ``states_for`` is that of ``EngineMemory``. Raises DrafterError if the drafter's weights are no tensors, or it names
    a number of bytes that is none.
    """
    target_bytes = storage_bytes(weights_of(target.model))
    part, *parts = [_target_part(target, device) for device in target.layout.all_devices]
    memory_of = EngineMemory
    if parts:
        others = tuple(EngineMemory(each, None, page_size, True, states_for) for each in parts)
        memory_of = partial(SpreadMemory, others=others)  # type: ignore[assignment]
    if drafter is None:
        return memory_of(part, None, page_size, target.program is None, states_for)
    own = {address: size for address, size in _weights_of(drafter).items() if address not in target_bytes}

    def drafter_terms(setting: EngineSetting) -> dict[str, int]:
        num_bytes = drafter.step_bytes(setting.batch_size, setting.num_draft_tokens, setting.max_prefill_tokens)
        return {"drafter steps": _checked_bytes("step_bytes", num_bytes)}

    def drafter_states(most_draft_tokens: int) -> int:
        return _checked_bytes("bytes_per_sequence", drafter.bytes_per_sequence(most_draft_tokens))

    per_token = _checked_bytes("bytes_per_token", drafter.bytes_per_token)
    drafts = Part(sum(own.values()), per_token, drafter_terms, drafter_states if drafter_states(0) else None)
    is_estimate = target.program is None or drafter.estimates_memory
    return memory_of(part, drafts, page_size, is_estimate, states_for)


def _target_part(target: RaggedModel, device: torch.device) -> Part:
    """Return the part of a target on one of the devices of its layers; what steps need is counted on each."""
    weights = weights_of(target.model)
    layout = target.layout
    if layout.is_spread:
        weights = (tensor for tensor in weights if tensor.device == device)
        layout = layout.on_device(device)
    states = layout.bytes_per_slot if layout.states else None
    size = sum(storage_bytes(weights).values())
    return Part(size, layout.bytes_per_token, partial(_target_terms, target), states)


def _weights_of(drafter: HoldsMemory) -> dict[int, int]:
    try:
        return storage_bytes(drafter.weights())
    except (TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise DrafterError(f"a drafter's weights cannot be counted: {error}; expected dense tensors.") from error


def _checked_bytes(name: str, value: int) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise DrafterError(f"a drafter's {name} is {value!r}; expected a number of bytes, an integer from 0 on.")
    return value


def _target_terms(target: RaggedModel, setting: EngineSetting) -> dict[str, int]:
    rows = setting.num_rows
    prefill_rows = target.row_padding.largest
    if setting.max_prefill_tokens is not None:
        prefill_rows = min(prefill_rows, setting.max_prefill_tokens)
    memory = forward_memory(target, {(rows, rows), (prefill_rows, min(rows, prefill_rows))})
    sampling = torch.get_num_threads() * target.vocab_size * _SAMPLING_BYTES
    terms = {
        "target arenas": memory.held,
        "logits": rows * logits_bytes(target),
        "working memory": max(memory.working, sampling),
    }
    # Twice: beside rows of prompts, those that are verified are copied out of the whole.
    tapped = target.empty_hidden_states(2 * max(rows, prefill_rows))
    return terms if tapped is None else terms | {"hidden states": tapped.nbytes}
