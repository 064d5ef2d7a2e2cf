"""The probe: the short text that every model is checked with, and what a model's own code raises during it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specdec_fast.errors import SpecDecError, UnsupportedModelError
from specdec_fast.ranks.operations import ExchangingModule, mesh_of

PROBE_LENGTH = 8  # tokens


def probe_of(vocab_size: int, device: torch.device) -> Tensor:
    """Return the probe's ids, ``[PROBE_LENGTH]`` int64; UnsupportedModelError if the vocabulary has fewer than two."""
    if vocab_size < 2:
        raise UnsupportedModelError(
            f"a vocabulary of size {vocab_size} leaves the model nothing to choose; expected at least two ids."
        )
    return torch.arange(PROBE_LENGTH, device=device) % vocab_size


@contextmanager
def named_failures(model: nn.Module) -> Iterator[None]:
    """Turn every exception of a block, except this library's own errors, into an UnsupportedModelError.

    It names the submodule of ``model``, which the block probes, and the cause.
    """
    try:
        yield
    except SpecDecError:
        raise
    except Exception as error:
        where = _innermost(model, error)
        fails = f"cannot compute a text of {PROBE_LENGTH} tokens, without this library either: "
        if not _fails_alone(model):
            fails = f"cannot run on a paged KV cache: {_known_cause(model)}"
        raise UnsupportedModelError(
            f"{type(model).__name__} {fails}{f'in {where}: ' if where else ''}{type(error).__name__}: {error}"
        ) from error


def _fails_alone(model: Any) -> bool:
    """Return whether the unmodified model cannot compute a short text: its sizes do not fit, for example.

    A part of a sharded model is not tried: the other ranks would have to compute it too, and may not have failed.
    """
    if any(isinstance(module, ExchangingModule) for module in model.modules()):
        return False
    if mesh_of(model) is not None:
        return False
    try:
        size = model.get_input_embeddings().num_embeddings
        with torch.inference_mode():
            model(input_ids=probe_of(size, model.device)[None])
    except Exception:
        return True
    return False


def _known_cause(model: nn.Module) -> str:
    """Return what the model's class says of its attention, if it says that the engine cannot replace it."""
    if getattr(model, "_supports_attention_backend", True):
        return ""
    return "its class does not declare that it attends through transformers' AttentionInterface; "


def _innermost(model: nn.Module, error: Exception) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    innermost = ""
    step = error.__traceback__
    while step is not None:
        innermost = names.get(id(step.tb_frame.f_locals.get("self")), "") or innermost
        step = step.tb_next
    return innermost
