"""Loads checkpoints that hold their own codes: ``transformers`` loads what is plain, and this module the linears.

``transformers`` calls a quantiser before and after it loads weights. Before, each linear with codes becomes a module
without weights; after, a :class:`QuantizedLinear`, one after the other. So no weight exists in full precision.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specdec_fast.errors import ConfigError
from specdec_fast.models.codes_of_rank import CodesOfRank
from specdec_fast.models.expert_codes import experts_with_codes
from specdec_fast.models.parameter_shapes import ParameterShapes
from specdec_fast.models.quantized_linears import QuantizedLinear
from specdec_fast.models.rounded_models import linears_to_round
from specdec_fast.quantization.checkpoint.config import READABLE, read_quantization_config
from specdec_fast.quantization.checkpoint.files import open_folder

_NAME = "specdec_fast_codes"  # among the quantisers of transformers
_OTHER_MODULES = (
    "Only codes of linears, and of experts whose weights transformers stacks, can be read; let transformers convert "
    "them to bf16, if it can, and pass the loaded model."
)


def fields_of_codes(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return a config's ``quantization_config`` if codes of its method are read here."""
    fields = getattr(config, "quantization_config", None)
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    return fields if method in READABLE else None


def config_with_codes(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Change a model's config such that ``from_pretrained`` loads its codes; return None if none are read here.

    Raises ConfigError, which names the field, if its ``quantization_config`` has one that cannot be read.
    """
    fields = fields_of_codes(config)
    if fields is None:
        return None
    read_quantization_config(fields)
    config.quantization_config = {"quant_method": _NAME, "fields": fields}
    return config


@register_quantization_config(_NAME)
class _Codes(QuantizationConfigMixin):
    """The ``quantization_config`` of a checkpoint, in ``fields``, for ``_CodesLoader``."""

    def __init__(self, fields: dict[str, Any], quant_method: str = _NAME) -> None:
        self.fields = fields
        self.quant_method = quant_method


class _Awaited(nn.Module):
    """Stands for a linear until its codes are read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.has_bias = linear.bias is not None


class ModelCodes:
    """The codes that a folder has for a model whose weights are not loaded.

    Modules that have codes lose their weights at once. Raises ConfigError if codes belong to no linear and no experts,
    or if ``fields`` (``quantization_config``) and the tensors contradict each other.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, fields: dict[str, Any]) -> None:
        self._quantization = read_quantization_config(fields)
        self._files = open_folder(folder)
        unexpected = model._keys_to_ignore_on_load_unexpected or ()
        left = {
            name
            for name in self._files.modules_with_codes(self._quantization)
            if not any(re.search(pattern, f"{name}.weight") for pattern in unexpected)
        }
        suffixes: set[str] = set()
        for name, module in linears_to_round(model).items():
            if isinstance(module, nn.Linear) and self._files.has_codes(name, self._quantization):
                left.discard(name)
                suffixes.update(self._files.suffixes_of(name))
                _expect_own_weight(model, name)
                model.set_submodule(name, _Awaited(module))
        self._experts = experts_with_codes(model, self._files, self._quantization, left)
        for each in self._experts:
            left -= each.sources
            suffixes.update(suffix for source in each.sources for suffix in self._files.suffixes_of(source))
            each.expect_codes()
        if left:
            raise ConfigError(
                f"the tensors of codes of {min(left)} belong to no plain linear of {type(model).__name__} ({len(left)} "
                "such modules in all). " + _OTHER_MODULES
            )
        names = {rf"\.{suffix}$" for suffix in suffixes}
        fused = {re.escape(f"{each.name}.{each.attribute}") for each in self._experts}
        model._keys_to_ignore_on_load_unexpected = {*unexpected, *names, *fused}

    def place(self, model: PreTrainedModel, only_sizes: bool = False) -> None:
        """Give the model modules with the codes, one after the other; with ``only_sizes`` codes on the meta device.

        Of a sharded model they have this rank's part of the codes. Raises ConfigError, which names file and tensor, if
        one cannot be read; NotYetSupportedError if the codes cannot be divided as the plan says.
        """
        of_rank = CodesOfRank(model)
        of_rank.expect_no_experts([each.module for each in self._experts])
        for name, module in list(model.named_modules()):
            if isinstance(module, _Awaited):
                linear = self._linear(name, module, model.dtype, only_sizes)
                model.set_submodule(name, of_rank.part(name, linear))
        for each in self._experts:
            each.place(each.read(self._files, self._quantization, only_sizes), model)

    def _linear(self, name: str, module: _Awaited, dtype: torch.dtype, only_sizes: bool) -> QuantizedLinear:
        linear_format = self._quantization.format_of(name)
        assert linear_format is not None
        tensors = self._files.tensors_of(name, only_sizes)
        if module.has_bias and "bias" not in tensors:
            raise tensors.fault("bias", "is missing, and the model's linear has one.")
        if not module.has_bias and "bias" in tensors and not tensors.peek("bias").any():
            tensors.skip("bias")  # GPTQ stores a bias of zeros for every linear
        if not module.has_bias and "bias" in tensors:
            raise tensors.fault("bias", "is not 0, and the model's linear has no bias.")
        read = linear_format.read(tensors, module.out_features, module.in_features)
        bias: Tensor | None = None if read.bias is None else read.bias.to(dtype)
        return QuantizedLinear(read.weight, bias, dtype, read.permutation).eval()


@register_quantizer(_NAME)
class _CodesLoader(HfQuantizer):
    """Replaces linears with codes before and after ``transformers`` loads the other weights."""

    quantization_config: _Codes
    _codes: ModelCodes
    _shapes: ParameterShapes

    def __init__(self, quantization_config: _Codes, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False  # what transformers loads is plain; older versions keep the file's dtype otherwise

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        folder = Path(kwargs["checkpoint_files"][0]).parent
        self._codes = ModelCodes(model, folder, self.quantization_config.fields)
        self._shapes = ParameterShapes(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self._shapes.note_all(model)
        self._shapes.expect_none()
        self._codes.place(model)
        self.remove_quantization_config(model)


def _expect_own_weight(model: PreTrainedModel, name: str) -> None:
    tied = getattr(model, "all_tied_weights_keys", {})
    if f"{name}.weight" in tied:
        raise ConfigError(
            f"the checkpoint has codes of {name}, whose weight is that of {tied[f'{name}.weight']} by the "
            "model's config (tie_word_embeddings); correct the config if the two differ."
        )
