"""The memory of a model in bytes: its weights, its KV entries, and what its forwards need."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_fast.models.quantized_linears import quantized_linears
from specdec_fast.runner.ragged_model import RaggedModel

# Of a forward that PyTorch runs: tensors that are alive at the same time, each as wide as the inputs and outputs of the
# widest linear together. An estimate: PyTorch frees a tensor when the last reference is gone.
_LIVE_TENSORS = 4


class ForwardBytes(NamedTuple):
    """Memory of a model's forwards besides weights, KV entries and logits."""

    held: int  # bytes that stay allocated between forwards: a program's arenas, at the largest size so far
    working: int  # bytes that are allocated while a forward runs: an upper bound for a program, an estimate for PyTorch
    is_estimate: bool  # whether PyTorch runs the forwards, so that ``working`` is an estimate


def weights_of(model: nn.Module) -> Iterable[Tensor]:
    """Return the parameters and buffers of a model; a tensor that stands at two places may come twice."""
    yield from model.parameters()
    yield from model.buffers()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum(storage_bytes(tensors).values())


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, by its address; on the meta device, which has none, by the tensor's id."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[id(tensor) if tensor.is_meta else storage.data_ptr()] = storage.nbytes()
    return sizes


def logits_bytes(model: RaggedModel) -> int:
    """Return the bytes of the logits of one row."""
    return model.vocab_size * model.layout.dtype.itemsize


def forward_memory(model: RaggedModel, row_counts: Collection[tuple[int, int]]) -> ForwardBytes:
    """Return the memory of forwards; ``row_counts`` are numbers of rows, and of those whose logits are wanted."""
    program = model.program
    if program is None:
        rows = max(count + model.row_padding.padding(count) for count, _ in row_counts)
        return ForwardBytes(0, rows * estimated_row_bytes(model.model, model.layout.dtype.itemsize), is_estimate=True)
    held = max(program.bytes_for(*counts) for counts in row_counts)
    return ForwardBytes(held, max(program.working_bytes(*counts) for counts in row_counts), is_estimate=False)


def estimated_row_bytes(model: PreTrainedModel, itemsize: int) -> int:
    """Estimate what a forward that PyTorch runs needs per row, from the model's widest matrix within its layers."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    inside = (parameter for parameter in model.parameters() if id(parameter) not in outside and parameter.dim() > 1)
    widths = [sum(parameter.shape[-2:]) for parameter in inside]
    quantized = (module for module in quantized_linears(model).values() if all(module is not end for end in ends))
    widths += [module.in_features + module.out_features for module in quantized]
    return _LIVE_TENSORS * itemsize * max(widths, default=0)
