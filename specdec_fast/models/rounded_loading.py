"""Rounds weights while ``transformers`` loads them: one parameter at a time, so that no whole model exists besides.

``transformers`` gives each parameter to a quantiser when it has read it from the files, has fused those of experts, and
has converted it to the model's dtype. What it keeps is a parameter without numbers, which a module with the codes
replaces at the end. Parameters that are tied to others are rounded at the end, when they are tied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specdec_fast.errors import ConfigError
from specdec_fast.freed_memory import return_freed_memory
from specdec_fast.models.parameter_shapes import ParameterShapes
from specdec_fast.models.rounded_models import WeightToRound, replace_weights, weights_to_round
from specdec_fast.quantization.packed_weight import PackedWeight

_NAME = "specdec_fast_rounding"  # among the quantisers of transformers
_BYTES_BETWEEN_RETURNS = 128 << 20  # the C library keeps what is free between the codes


@register_quantization_config(_NAME)
class RoundingConfig(QuantizationConfigMixin):
    """An argument ``quantization_config`` of ``from_pretrained``: rounds weights as ``round_weights`` does.

    Args:
        quantization: a name in ``ROUNDINGS``.
        device: where weights are rounded; transformers loads them onto the CPU.
        quant_method: the name under which transformers finds the loader.
    """

    def __init__(self, quantization: str, device: str = "cpu", quant_method: str = _NAME) -> None:
        self.quantization = quantization
        self.device = device
        self.quant_method = quant_method


@register_quantizer(_NAME)
class _RoundingLoader(HfQuantizer):
    """Rounds each parameter when transformers has read it, and replaces their modules after the last one."""

    quantization_config: RoundingConfig

    def __init__(self, quantization_config: RoundingConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._all: list[WeightToRound] = []
        self._awaited: dict[str, WeightToRound] = {}
        self._rounded: dict[str, PackedWeight] = {}
        self._error: ConfigError | None = None
        self._bytes_read = 0

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def preprocess_model(self, model: PreTrainedModel, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        self._dtype = dtype
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self._shapes = ParameterShapes(model)
        try:
            self._all = weights_to_round(model, self.quantization_config.quantization, must_run=True)
        except Exception:  # without weights it cannot say which of them it reads; when they are loaded, it can
            return
        tied = {name for pair in getattr(model, "all_tied_weights_keys", {}).items() for name in pair}
        for each in self._all:
            # Of others, transformers chooses the dtype.
            if each.name not in tied and each.parameter.dtype == self._dtype:
                self._awaited[each.name] = each

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._awaited

    def get_quantize_ops(self) -> ConversionOps:
        return _Round(self)

    def take(self, name: str, weight: Tensor) -> bool:
        """Round a parameter; return whether transformers need not keep it."""
        target = self._awaited.get(name)
        if target is None:
            return False
        self._shapes.note(name, weight)
        if self._error is None and not self._shapes.others:
            try:
                self._rounded[name] = target.rounded(weight.to(self.quantization_config.device))
                self._bytes_read += weight.nbytes
            except ConfigError as error:  # transformers would log it, and go on
                self._error = error
        if self._bytes_read >= _BYTES_BETWEEN_RETURNS:
            self._bytes_read = 0
            return_freed_memory()
        getattr(target.module, target.attribute)._is_hf_initialized = True
        return True

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.remove_quantization_config(model)
        self._shapes.note_all(model)
        self._shapes.expect_none()
        if self._error is not None:
            raise self._error
        quantization = self.quantization_config.quantization
        replace_weights(model, quantization, self._all or weights_to_round(model, quantization), self._rounded)
        for parameter in model.parameters():  # they lie in mapped files, which stay mapped as long as one does
            parameter.data = parameter.data.clone()
        return_freed_memory()


class _Round(ConversionOps):
    """Passes what is not rounded on to transformers."""

    def __init__(self, loader: _RoundingLoader) -> None:
        self._loader = loader

    def convert(
        self, input_dict: dict[str, Any], *args: Any, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        kept = {}
        for name, value in input_dict.items():
            if not self._loader.take(name, value[0] if isinstance(value, list) else value):
                kept[name] = value
            elif missing_keys is not None:
                missing_keys.discard(name)
        return kept
