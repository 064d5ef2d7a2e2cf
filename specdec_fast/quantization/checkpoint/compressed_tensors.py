"""Checkpoints of compressed-tensors: ``pack-quantized``, ``int-quantized`` and ``float-quantized``.

* ``pack-quantized``: ``weight_packed`` int32 ``[out_features, in_features * bits / 32]``, a code plus half its range;
  ``weight_zero_point`` packed in the same way along outputs, ``[out_features * bits / 32, groups]``.
* ``int-quantized``: ``weight`` int8, ``weight_zero_point`` int8 of the scales' shape.
* ``float-quantized``: ``weight`` float8_e4m3fn.

``weight_scale`` has one number per tensor, channel (output), group of inputs, or block. Rows keep the model's dtype,
also if the checkpoint was made for rounded ones (``input_activations``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.quantization.checkpoint.fields import Fields, pattern
from specdec_fast.quantization.checkpoint.float8 import blocks_of, per_output, read_block, take_codes
from specdec_fast.quantization.checkpoint.integers import order_of_groups, packed_integers, unpacked
from specdec_fast.quantization.checkpoint.linear import LinearFormat, LinearTensors, whole_rows
from specdec_fast.quantization.packed_weight import FLOAT8, PackedWeight, pack

PACKED = "pack-quantized"
INTEGER = "int-quantized"
FLOAT = "float-quantized"
_NAIVE = "naive-quantized"  # one of the two above, by the type of weights
_MIXED = "mixed-precision"  # groups say which
_STRATEGIES = {
    PACKED: ("channel", "group"),
    INTEGER: ("tensor", "channel", "group"),
    FLOAT: ("tensor", "channel", "group", "block"),
}


@dataclass(frozen=True)
class CompressedTensorsFormat(LinearFormat):
    """A format of compressed-tensors.

    Attributes:
        layout: ``PACKED``, ``INTEGER`` or ``FLOAT``.
        bits: of a code: 4 or 8.
        strategy: what shares a scale: ``"tensor"``, ``"channel"``, ``"group"`` or ``"block"``.
        block: outputs and inputs that share a scale; of a group ``(1, group_size)``; None for the other strategies.
        is_symmetric: whether there are no zero points.
    """

    layout: str
    bits: int
    strategy: str
    block: tuple[int, int] | None
    is_symmetric: bool

    @property
    def marker(self) -> str:
        return "weight_packed" if self.layout == PACKED else "weight_scale"

    def read_weight(
        self, tensors: LinearTensors, out_features: int, in_features: int
    ) -> tuple[PackedWeight, Tensor | None]:
        size = whole_rows(in_features) if self.block is None else self.block[1]
        if self.strategy == "group" and in_features % size != 0:
            raise tensors.fault("weight_scale", f"has groups of {size}, which do not divide {in_features} inputs.")
        scales = self._scales(tensors, out_features, in_features)
        tensors.skip("input_scale", "input_zero_point", "output_scale", "output_zero_point")
        if self.layout == FLOAT:
            codes = take_codes(tensors, out_features, in_features)
            self._drop_zeros(tensors)
            return pack(codes, scales, None, None, size, FLOAT8), None
        if self.layout == INTEGER:
            weight = tensors.take("weight", (torch.int8,), (out_features, in_features))
            codes = weight.view(torch.uint8) ^ 128
            zeros = self._zeros(tensors, scales, out_features)
            return packed_integers(tensors, codes, zeros, scales, 8, size), None
        codes = self._packed_codes(tensors, out_features, in_features)
        zeros = self._packed_zeros(tensors, out_features, scales.shape[1])
        if "weight_g_idx" in tensors and (tensors.peek("weight_g_idx") == -1).all():  # older versions: in order
            tensors.skip("weight_g_idx")
        order = None
        if "weight_g_idx" in tensors and self.strategy == "group":
            order = order_of_groups(tensors, "weight_g_idx", in_features, size, scales.shape[1])
        if order is not None:
            codes = codes[:, order]
        return packed_integers(tensors, codes, zeros, scales, self.bits, size), order

    def _scales(self, tensors: LinearTensors, out_features: int, in_features: int) -> Tensor:
        if self.strategy == "tensor":
            return tensors.take_scales("weight_scale", (), (1,), (1, 1)).reshape(1, 1).expand(out_features, 1)
        if self.block is None:
            return tensors.take_scales("weight_scale", (out_features, 1), (out_features,)).reshape(out_features, 1)
        scales = tensors.take_scales("weight_scale", blocks_of(self.block, out_features, in_features))
        return per_output(scales, self.block, out_features)

    def _packed_codes(self, tensors: LinearTensors, out_features: int, in_features: int) -> Tensor:
        shape = tensors.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
        if shape != [out_features, in_features]:
            raise tensors.fault("weight_shape", f"is {shape}; expected {[out_features, in_features]}.")
        num_words = -(-in_features * self.bits // 32)
        words = tensors.take("weight_packed", (torch.int32,), (out_features, num_words))
        return unpacked(words, self.bits)[:, :in_features]

    def _packed_zeros(self, tensors: LinearTensors, out_features: int, num_groups: int) -> Tensor | None:
        if self.is_symmetric:
            self._drop_zeros(tensors)
            return None
        num_words = -(-out_features * self.bits // 32)
        words = tensors.take("weight_zero_point", (torch.int32,), (num_words, num_groups))
        return unpacked(words.t(), self.bits)[:, :out_features].t()

    def _zeros(self, tensors: LinearTensors, scales: Tensor, out_features: int) -> Tensor | None:
        if self.is_symmetric:
            self._drop_zeros(tensors)
            return None
        shapes: list[tuple[int, ...]] = [tuple(scales.shape)]
        if self.strategy == "tensor":
            shapes = [(), (1,), (1, 1)]
        elif self.strategy == "channel":
            shapes.append((out_features,))
        zeros = tensors.take("weight_zero_point", (torch.int8,), *shapes).long() + 128
        return zeros.reshape(-1, scales.shape[1]).expand(scales.shape)

    def _drop_zeros(self, tensors: LinearTensors) -> None:
        """Drop the zero points that older versions stored for symmetric weights, all of them 0."""
        suffix = "weight_zero_point"
        if suffix in tensors and not tensors.peek(suffix).float().any():
            tensors.skip(suffix)


@dataclass(frozen=True)
class Targets:
    """Which modules a group of the config is about: names, regular expressions after ``re:``, or class names."""

    names: tuple[str, ...]
    expressions: tuple[re.Pattern[str], ...]

    def rank(self, name: str, class_name: str) -> int | None:
        """Return how closely they match: 0 by the module's name, 1 by an expression, 2 by its class, None: not."""
        if name in self.names:
            return 0
        if any(expression.match(name) for expression in self.expressions):
            return 1
        return 2 if class_name in self.names else None


def read_targets(targets: tuple[str, ...], path: str) -> Targets:
    """Divide targets by kind. Raises ConfigError for one that is no regular expression."""
    expressions = [pattern(each.removeprefix("re:"), path) for each in targets if each.startswith("re:")]
    return Targets(tuple(each for each in targets if not each.startswith("re:")), tuple(expressions))


def read_fields(fields: Fields) -> tuple[list[tuple[Targets, CompressedTensorsFormat]], Targets]:
    """Return the formats with the modules that have them, and the modules that have none.

    Raises ConfigError, which names the field that cannot be read.
    """
    fields.skip("quant_method", "global_compression_ratio", "version")
    # "frozen" says nothing about the file: older versions leave it in configs of weights that are codes.
    fields.choice("quantization_status", ("compressed", "frozen"), "compressed")
    if fields.raw("sparsity_config", {}):
        fields.child("sparsity_config").choice("format", ("dense",))
    layout = fields.choice("format", (*_STRATEGIES, _NAIVE, _MIXED))
    groups = []
    for group in fields.children("config_groups").values():
        targets = read_targets(group.strings("targets"), "quantization_config.config_groups")
        groups.append((targets, _read_group(group, layout)))
    if not groups:
        raise fields.fault("config_groups", "at least one group")
    ignored = read_targets(fields.strings("ignore"), "quantization_config.ignore")
    fields.close()
    return groups, ignored


def _read_group(group: Fields, layout: str) -> CompressedTensorsFormat:
    layout = group.choice("format", (*_STRATEGIES, _NAIVE), *(() if layout == _MIXED else (layout,)))
    group.skip("input_activations")  # rows keep the model's dtype
    weights = group.child("weights")
    group.close()
    if layout == _NAIVE:
        layout = FLOAT if weights.choice("type", ("int", "float")) == "float" else INTEGER
    weights.skip("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
    weights.choice("type", ("float",) if layout == FLOAT else ("int",))
    weights.choice("dynamic", (False,), False)
    bits = weights.choice("num_bits", (8,) if layout == FLOAT else (4, 8))
    is_symmetric = weights.flag("symmetric", True)
    if layout == FLOAT and not is_symmetric:
        raise weights.fault("symmetric", "true for weights of fp8")
    size = weights.group_size("group_size", -1)
    block = None if size is None else (1, size)
    unnamed = "channel" if size is None else "group"
    if weights.raw("group_size", None) is None:
        unnamed = "tensor"
    strategy = weights.choice("strategy", _STRATEGIES[layout], unnamed)
    if (strategy == "group") != (size is not None):
        raise weights.fault("group_size", f"a multiple of 16 for strategy 'group', null otherwise, not {strategy!r}")
    if strategy == "block":
        block = read_block(weights, "block_structure", weights.raw("block_structure"))
    weights.close()
    return CompressedTensorsFormat(layout, bits, strategy, block, is_symmetric)
