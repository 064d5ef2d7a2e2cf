"""Loads a model from a GGUF file: an empty model, filled tensor by tensor, so that only the packed weights are held."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from specdec_fast.errors import ConfigError
from specdec_fast.models.experts import use_own_function
from specdec_fast.models.gguf.config import (
    EMBEDDINGS,
    LONG_ROPE_FACTORS,
    ROPE_FACTORS,
    generation_config,
    model_config,
)
from specdec_fast.models.quantized_linears import PackedExperts, QuantizedLinear
from specdec_fast.quantization.gguf.block_types import packed, weights_of
from specdec_fast.quantization.gguf.container import GGUFFile, StoredTensor, plain_values
from specdec_fast.quantization.packed_weight import PackedWeight, stacked
from specdec_fast.quantization.same_format import by_output

# Parameters of all experts of a layer, and what a file has instead.
_PARTS_OF_EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}


def load_gguf(file: GGUFFile, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    """Load the model in a GGUF file.

    Quantised weights of linears become :class:`QuantizedLinear`, with the file's own codes and scales. Quantised
    embeddings are dequantised for the lookup; an output layer that is tied to them has the codes.

    Args:
        file: whose header is read.
        dtype: of embeddings and of everything that is not quantised; None: that of the file's matrices if all of them
            are floats, else bf16.
        device: of the model; the meta device reads the header alone, and gives a model of the same sizes.

    Raises ConfigError if the file is of an architecture that is not served, lacks tensors, or has ones that are
    unknown, have other shapes than its metadata says, or scales that are not finite.
    """
    config = model_config(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or _dtype_of(file), trust_remote_code=False)
    model.generation_config = generation_config(file)
    model.eval()
    _fill_buffers(model, device)
    filling = _Filling(file, model, device)
    for tensor in file.tensors.values():
        filling.take(tensor)
    filling.finish()
    return model


class _Filling:
    """The weights of one model while they are filled."""

    def __init__(self, file: GGUFFile, model: PreTrainedModel, device: torch.device) -> None:
        architecture = file.value("general.architecture")
        self._file = file
        self._model = model
        self._device = device
        self._dtype = model.dtype
        self._is_tied = model.config.tie_word_embeddings
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        self._names = _names(model, architecture)
        self._packed: list[tuple[str, StoredTensor]] = []  # linears to replace when their biases are known
        self._of_experts: dict[str, list[StoredTensor]] = {}  # by parameter, in the file's order
        self._filled: set[str] = set()  # the file's names

    def take(self, tensor: StoredTensor) -> None:
        """Fill a weight, or note a linear that is replaced at the end."""
        if tensor.name == ROPE_FACTORS:
            return _divide_frequencies(self._model, self._plain(tensor, torch.float32))
        if tensor.name in LONG_ROPE_FACTORS:  # the config has them
            return None
        name = self._names.get(tensor.name)
        if name is None:
            raise self._error(tensor, f"is unknown in a {self._model.config.model_type}")
        module, attribute = _owner(self._model, name)
        expected = tuple(getattr(module, attribute).shape)
        parts = _parts_of_experts(attribute)
        if len(parts) > 1:
            expected = (expected[0], expected[1] // len(parts), expected[2])
        if tensor.shape != expected:
            raise self._error(tensor, f"has the shape {list(tensor.shape)}; the metadata asks for {list(expected)}")
        self._filled.add(tensor.name)
        if parts:
            self._of_experts.setdefault(name, []).append(tensor)
        elif tensor.block_type is None:
            _set(module, attribute, self._plain(tensor, self._dtype))
        elif type(module) is nn.Linear:
            self._packed.append((name, tensor))
        elif isinstance(module, nn.Embedding):
            _set(module, attribute, self._embeddings(tensor))
        else:
            raise self._error(tensor, f"is {tensor.type_name}; only weights of linears and embeddings may be quantised")
        return None

    def finish(self) -> None:
        """Replace the linears, tie the output layer, and check that nothing is missing."""
        for name, tensor in self._packed:
            self._replace(name, tensor)
        if self._is_tied:
            self._tie()
        absent = [stored for stored in self._names if stored not in self._filled]
        if absent:
            raise ConfigError(
                f"{str(self._file.path)!r} lacks tensors of {type(self._model).__name__}: {', '.join(absent[:3])} "
                f"({len(absent)} in all); take a complete file."
            )
        for name, tensors in self._of_experts.items():
            self._fill_experts(name, tensors)

    def _tie(self) -> None:
        output = self._model.get_output_embeddings()
        name = next(name for name, module in self._model.named_modules() if module is output)
        tensor = self._file.tensors[EMBEDDINGS]
        self._filled |= {stored for stored, own in self._names.items() if own == f"{name}.weight"}
        if tensor.block_type is None:
            output.weight = self._model.get_input_embeddings().weight
        else:
            self._replace(f"{name}.weight", tensor)

    def _fill_experts(self, name: str, tensors: list[StoredTensor]) -> None:
        """Fill a parameter of all experts of a layer, whose outputs are those of several tensors."""
        module, attribute = _owner(self._model, name)
        parts = _parts_of_experts(attribute)
        ordered = sorted(tensors, key=lambda each: [part in each.name for part in parts].index(True))
        if all(each.block_type is None for each in ordered):
            _set(module, attribute, torch.cat([self._plain(each, self._dtype) for each in ordered], dim=1))
            return
        types = sorted({each.type_name for each in ordered})
        if len(types) > 1:
            raise self._error(ordered[0], f"and {ordered[1].name!r} are {' and '.join(types)}; expected one type")
        by_part = [self._packed_experts(each) for each in ordered]
        weight = stacked([by_output(own) for own in zip(*by_part, strict=True)])
        delattr(module, attribute)
        setattr(module, attribute, PackedExperts(weight, self._dtype))
        use_own_function(module)

    def _packed_experts(self, tensor: StoredTensor) -> list[PackedWeight]:
        assert tensor.block_type is not None
        try:
            return [packed(rows, tensor.block_type) for rows in self._rows(tensor)]
        except ValueError as error:
            raise self._error(tensor, str(error)) from error

    def _replace(self, name: str, tensor: StoredTensor) -> None:
        module, _ = _owner(self._model, name)
        assert tensor.block_type is not None
        try:
            weight = packed(self._rows(tensor), tensor.block_type)
        except ValueError as error:
            raise self._error(tensor, str(error)) from error
        parent, attribute = _owner(self._model, name.rpartition(".")[0])
        setattr(parent, attribute, QuantizedLinear(weight, module.bias, self._dtype).eval())

    def _embeddings(self, tensor: StoredTensor) -> Tensor:
        assert tensor.block_type is not None
        try:
            return weights_of(self._rows(tensor), tensor.block_type, self._dtype)
        except ValueError as error:
            raise self._error(tensor, str(error)) from error

    def _rows(self, tensor: StoredTensor) -> Tensor:
        """Return the blocks ``[out_features, bytes]`` in the order of the model's outputs, which blocks never span."""
        if self._device.type == "meta":
            return torch.empty(tensor.data.shape, dtype=torch.uint8, device=self._device)
        raw = self._processor.process(weights=np.array(tensor.data), name=tensor.name).weights
        return torch.from_numpy(np.ascontiguousarray(raw)).to(self._device)

    def _plain(self, tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
        if tensor.block_type is not None:
            raise self._error(tensor, f"is {tensor.type_name}; expected floats")
        if self._device.type == "meta":
            return torch.empty(tensor.shape, dtype=dtype, device=self._device)
        values = plain_values(tensor).float().numpy()
        values = self._processor.process(weights=values, name=tensor.name).weights
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, dtype)

    def _error(self, tensor: StoredTensor, what: str) -> ConfigError:
        return ConfigError(f"tensor {tensor.name!r} of {str(self._file.path)!r} {what.removeprefix('it ')}.")


def _names(model: PreTrainedModel, architecture: str) -> dict[str, str]:
    """Return the model's names of its weights by the file's."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    by_name = get_tensor_name_map(number, model.config.num_hidden_layers)
    names: dict[str, str] = {}
    for name in model.state_dict():
        if parts := _parts_of_experts(name.rpartition(".")[2]):
            layer = re.search(r"\.(\d+)\.", name)
            assert layer is not None
            names |= {f"blk.{layer[1]}.{part}.weight": name for part in parts}
        else:
            names[by_name.get_name(name, try_suffixes=(".weight", ".bias")) or name] = name
    return names


def _parts_of_experts(attribute: str) -> tuple[str, ...]:
    """Return the file's tensors, as its names have them, for a parameter of all experts; their outputs follow."""
    return _PARTS_OF_EXPERTS.get(attribute, ())


def _dtype_of(file: GGUFFile) -> torch.dtype:
    matrices = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if matrices <= {"F32"}:
        return torch.float32
    return torch.float16 if matrices <= {"F16", "F32"} else torch.bfloat16


def _owner(model: nn.Module, name: str) -> tuple[Any, str]:
    parent, _, attribute = name.rpartition(".")
    return model.get_submodule(parent), attribute


def _set(module: nn.Module, attribute: str, values: Tensor) -> None:
    setattr(module, attribute, nn.Parameter(values, requires_grad=False))


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers, which no checkpoint has: frequencies of rotations and factors of embeddings."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, torch.empty_like(buffer, device=device))
        if buffers:
            model._init_weights(module)  # as from_pretrained does; weights are on the meta device still


def _divide_frequencies(model: PreTrainedModel, factors: Tensor) -> None:
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            for name in ("inv_freq", "original_inv_freq"):
                setattr(module, name, getattr(module, name) / factors)
