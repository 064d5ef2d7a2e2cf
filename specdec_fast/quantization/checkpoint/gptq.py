"""GPTQ checkpoints: 4- and 8-bit integers with zero points, with and without act-order.

``qweight`` is int32 ``[in_features * bits / 32, out_features]``, packed along inputs; ``qzeros`` int32
``[groups, out_features * bits / 32]``, packed along outputs; ``scales`` ``[groups, out_features]``; ``g_idx``
``[in_features]`` the group of each input. A weight is ``scale * (code - zero)``. The format ``"gptq"`` stores zeros one
lower, which was subtracted from the packed words; ``"gptq_v2"`` stores them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_fast.quantization.checkpoint.fields import Fields
from specdec_fast.quantization.checkpoint.integers import order_of_groups, packed_integers, unpacked
from specdec_fast.quantization.checkpoint.linear import LinearFormat, LinearTensors, whole_rows
from specdec_fast.quantization.packed_weight import PackedWeight

_ONE_EACH = {4: 0x11111111, 8: 0x01010101}
# Fields about calibration, or about kernels of other programs.
_SKIPPED = (
    "quant_method", "method", "sym", "desc_act", "lm_head", "damp_percent", "damp_auto_increment", "true_sequential",
    "static_groups", "act_group_aware", "mse", "model_name_or_path", "model_file_base_name", "meta", "backend",
    "dataset", "tokenizer", "batch_size", "pad_token_id", "model_seqlen", "max_input_length", "cache_block_outputs",
    "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "use_cuda_fp16",
    "use_exllama", "disable_exllama", "exllama_config",
)  # fmt: skip


@dataclass(frozen=True)
class GPTQFormat(LinearFormat):
    """A GPTQ format.

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale; None: all.
        zeros_are_lower: whether zeros are stored one lower.
    """

    bits: int
    group_size: int | None
    zeros_are_lower: bool

    @property
    def marker(self) -> str:
        return "qweight"

    def read_weight(
        self, tensors: LinearTensors, out_features: int, in_features: int
    ) -> tuple[PackedWeight, Tensor | None]:
        size = self.group_size or whole_rows(in_features)
        num_groups = -(-in_features // size)
        per_word = 32 // self.bits
        words = tensors.take("qweight", (torch.int32,), (-(-in_features // per_word), out_features))
        packed_zeros = tensors.take("qzeros", (torch.int32,), (num_groups, -(-out_features // per_word)))
        scales = tensors.take_scales("scales", (num_groups, out_features)).t()
        codes = unpacked(words.t(), self.bits)[:, :in_features]
        if self.zeros_are_lower:
            packed_zeros = packed_zeros + _ONE_EACH[self.bits]  # carries undo the borrows of the subtraction
        zeros = unpacked(packed_zeros, self.bits)[:, :out_features].t()
        order = None
        if "g_idx" in tensors:
            order = order_of_groups(tensors, "g_idx", in_features, size, num_groups)
        if order is not None:
            codes = codes[:, order]
        return packed_integers(tensors, codes, zeros, scales, self.bits, size), order


def read_fields(fields: Fields) -> tuple[GPTQFormat, dict[str, GPTQFormat]]:
    """Return the format of all linears, and those of linears whose names match a regular expression.

    Raises ConfigError, which names the field that cannot be read.
    """
    fields.skip(*_SKIPPED)
    fields.choice("is_marlin_format", (False,), False)
    fields.choice("pack_dtype", ("int32",), "int32")
    layout = fields.choice("format", ("gptq", "gptq_v2"), "gptq")
    layout = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), layout)
    everywhere = GPTQFormat(fields.choice("bits", (4, 8)), fields.group_size("group_size", 128), layout == "gptq")
    by_pattern = {}
    dynamic = fields.raw("dynamic", {})
    for expression, each in fields.children("dynamic").items() if dynamic else ():
        if expression.startswith("-:"):
            continue  # these linears have no codes
        each.skip("sym", "desc_act", "damp_percent", "mse")
        size = each.group_size("group_size", everywhere.group_size or -1)
        changed = replace(everywhere, bits=each.choice("bits", (4, 8), everywhere.bits), group_size=size)
        each.close()
        by_pattern[expression.removeprefix("+:")] = changed
    fields.close()
    return everywhere, by_pattern
