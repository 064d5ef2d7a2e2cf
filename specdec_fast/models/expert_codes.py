"""Codes of experts: from the linears of a checkpoint, or mxfp4, to one packed weight for all experts of a layer.

``transformers`` fuses the weights of a layer's experts into two parameters. Its own mapping of names says which linears
of the checkpoint belong to a parameter, and in which order. Their codes are fused in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from specdec_fast.errors import ConfigError
from specdec_fast.models.experts import entry_name, mixtures_of, use_own_function
from specdec_fast.models.quantized_linears import PackedExperts
from specdec_fast.quantization.checkpoint import mxfp4
from specdec_fast.quantization.checkpoint.config import CheckpointQuantization
from specdec_fast.quantization.checkpoint.files import CheckpointFiles
from specdec_fast.quantization.packed_weight import PackedWeight, stacked
from specdec_fast.quantization.same_format import by_output, in_one_format


@dataclass(frozen=True, eq=False)
class AwaitedExperts:
    """A parameter of experts whose codes are to be read.

    Attributes:
        name: of the module of experts.
        module: that module.
        attribute: the parameter in it.
        sizes: experts, outputs and inputs of the parameter.
        parts: modules of the checkpoint with the codes, for each part of the outputs by expert; empty for mxfp4, where
            the module of experts has them itself.
    """

    name: str
    module: Any
    attribute: str
    sizes: tuple[int, int, int]
    parts: tuple[tuple[str, ...], ...]

    @property
    def sources(self) -> set[str]:
        """The modules of the checkpoint that have the codes."""
        return {each for part in self.parts for each in part} or {self.name}

    def expect_codes(self) -> None:
        """Take the parameter out of the model, so that nothing waits for its numbers."""
        self.module.register_parameter(self.attribute, None)
        self.module._is_hf_initialized = True  # so that transformers initialises nothing in it

    def place(self, weight: PackedWeight, model: PreTrainedModel) -> None:
        """Give the model the weight."""
        delattr(self.module, self.attribute)
        setattr(self.module, self.attribute, PackedExperts(weight, model.dtype))
        use_own_function(self.module)

    def read(
        self, files: CheckpointFiles, quantization: CheckpointQuantization, only_sizes: bool = False
    ) -> PackedWeight:
        """Read the codes of all experts; with ``only_sizes`` codes are on the meta device.

        Raises ConfigError, which names file and tensor, if a tensor cannot be read, or codes cannot be held together.
        """
        num_experts, out_features, in_features = self.sizes
        if not self.parts:
            tensors = files.tensors_of(self.name, only_sizes)
            return stacked(mxfp4.read_experts(tensors, self.attribute, num_experts, out_features, in_features))
        rows = out_features // len(self.parts)
        names = [name for part in self.parts for name in part]
        each = [_read(name, files, quantization, rows, in_features, only_sizes) for name in names]
        try:
            each = in_one_format(each)
        except ValueError as error:
            raise ConfigError(f"the codes of {self.name}.{self.attribute} differ between experts: {error}") from error
        return stacked([by_output(each[expert::num_experts]) for expert in range(num_experts)])


def experts_with_codes(
    model: PreTrainedModel, files: CheckpointFiles, quantization: CheckpointQuantization, modules: set[str]
) -> list[AwaitedExperts]:
    """Return the parameters of experts whose codes are in ``modules`` of a checkpoint.

    Raises ConfigError if some experts of a layer have codes and others have none, or if the config and the tensors of
    one contradict each other.
    """
    if quantization.method == mxfp4.METHOD:
        return list(_of_mxfp4(model, files))
    found = []
    parts_of = _parts_by_parameter(model, modules)
    for name, module in mixtures_of(model).items():
        for attribute in (entry_name(module), "down_proj"):
            parts = parts_of.get(f"{name}.{attribute}")
            if parts is None:
                continue
            sizes = _sizes_of(module, attribute)
            each = AwaitedExperts(name, module, attribute, sizes, parts)
            for source in sorted(each.sources):
                files.has_codes(source, quantization)
            if module.is_transposed or any(len(part) != sizes[0] for part in parts) or sizes[1] % len(parts):
                counts = " and ".join(str(len(part)) for part in parts)
                raise ConfigError(f"{name}.{attribute} has {sizes[0]} experts, and the checkpoint codes of {counts}.")
            found.append(each)
    return found


def _of_mxfp4(model: PreTrainedModel, files: CheckpointFiles) -> Iterator[AwaitedExperts]:
    for name, module in mixtures_of(model).items():
        for attribute in (entry_name(module), "down_proj"):
            if f"{attribute}_blocks" in files.suffixes_of(name):
                yield AwaitedExperts(name, module, attribute, _sizes_of(module, attribute), ())


def _sizes_of(module: Any, attribute: str) -> tuple[int, int, int]:
    weight: Tensor = getattr(module, attribute)
    num_experts, out_features, in_features = (weight.mT if module.is_transposed else weight).shape
    return num_experts, out_features, in_features


def _parts_by_parameter(model: PreTrainedModel, modules: set[str]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return by parameter the modules whose weights transformers would fuse into it along experts and outputs."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    state = model.state_dict()
    found: dict[str, dict[str, list[str]]] = {}
    for module in sorted(modules, key=_by_numbers):
        name, pattern = rename_source_key(f"{module}.weight", renamings, converters, model.base_model_prefix, state)
        if pattern is not None:
            found.setdefault(name, {}).setdefault(pattern, []).append(module)
    result = {}
    for name, by_pattern in found.items():
        converter = next(each for each in converters if next(iter(by_pattern)) in each.source_patterns)
        if _fuses(converter):
            result[name] = tuple(tuple(by_pattern.get(each, ())) for each in converter.source_patterns)
    return result


def _fuses(converter: WeightConverter) -> bool:
    """Return whether a converter stacks experts, and at most concatenates outputs besides."""
    first, *others = converter.operations
    if not isinstance(first, MergeModulelist) or first.dim != 0:
        return False
    if not others:
        return len(converter.source_patterns) == 1
    return len(others) == 1 and isinstance(others[0], Concatenate) and others[0].dim == 1


def _by_numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", name)]


def _read(
    name: str,
    files: CheckpointFiles,
    quantization: CheckpointQuantization,
    out_features: int,
    in_features: int,
    only_sizes: bool,
) -> PackedWeight:
    linear_format = quantization.format_of(name)
    assert linear_format is not None
    tensors = files.tensors_of(name, only_sizes)
    if "bias" in tensors and not tensors.peek("bias").any():
        tensors.skip("bias")  # GPTQ stores a bias of zeros for every linear
    if "bias" in tensors:
        raise tensors.fault("bias", "is not 0, and the model's experts have no biases.")
    read = linear_format.read(tensors, out_features, in_features)
    if read.permutation is not None:
        raise tensors.fault("g_idx", "has groups whose inputs lie apart (act-order), which experts cannot have.")
    return read.weight
