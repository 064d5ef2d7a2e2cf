"""AWQ checkpoints of the version ``"gemm"``: 4-bit integers with zero points.

``qweight`` is int32 ``[in_features, out_features / 8]``, ``qzeros`` ``[groups, out_features / 8]``, both packed along
outputs, and ``scales`` ``[groups, out_features]``. Bits ``4 i`` to ``4 i + 3`` of a word belong to output
``_OUTPUT_OF[i]`` of its eight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.quantization.checkpoint.fields import Fields
from specdec_fast.quantization.checkpoint.integers import packed_integers, unpacked
from specdec_fast.quantization.checkpoint.linear import LinearFormat, LinearTensors, whole_rows
from specdec_fast.quantization.packed_weight import PackedWeight

_OUTPUT_OF = (0, 2, 4, 6, 1, 3, 5, 7)
# Fields about calibration, or about kernels of other programs.
_SKIPPED = (
    "quant_method", "method", "meta", "sym", "desc_act", "modules_to_fuse", "do_fuse", "fuse_max_seq_len", "lm_head",
    "damp_percent", "true_sequential", "act_group_aware", "exllama_config",
)  # fmt: skip
_PLACE_OF = [_OUTPUT_OF.index(output) for output in range(8)]


@dataclass(frozen=True)
class AWQFormat(LinearFormat):
    """The AWQ format; ``group_size`` inputs share a scale, all if it is None."""

    group_size: int | None

    @property
    def marker(self) -> str:
        return "qweight"

    def read_weight(
        self, tensors: LinearTensors, out_features: int, in_features: int
    ) -> tuple[PackedWeight, Tensor | None]:
        size = self.group_size or whole_rows(in_features)
        if out_features % 8 != 0 or (self.group_size is not None and in_features % size != 0):
            raise tensors.fault(
                "qweight", f"belongs to {in_features} inputs and {out_features} outputs, which groups of {size} inputs "
                "and words of 8 outputs do not divide.",
            )  # fmt: skip
        num_groups = -(-in_features // size)
        words = tensors.take("qweight", (torch.int32,), (in_features, out_features // 8))
        packed_zeros = tensors.take("qzeros", (torch.int32,), (num_groups, out_features // 8))
        scales = tensors.take_scales("scales", (num_groups, out_features)).t()
        return packed_integers(tensors, _by_output(words), _by_output(packed_zeros), scales, 4, size), None


def _by_output(words: Tensor) -> Tensor:
    """Unpack ``[rows, out_features / 8]``: uint8 ``[out_features, rows]``."""
    return unpacked(words, 4).view(len(words), -1, 8)[:, :, _PLACE_OF].flatten(1).t()


def read_fields(fields: Fields) -> tuple[AWQFormat, tuple[str, ...]]:
    """Return the format, and the names of modules without codes. Raises ConfigError, which names the field."""
    fields.skip(*_SKIPPED)
    # A backend is a kernel of another program, but for this one, which stands for another packing.
    if str(fields.raw("backend", "")).lower() == "llm-awq":
        raise fields.fault("backend", "a checkpoint of version 'gemm'")
    fields.choice("w_bit", (4,), 4)
    fields.choice("bits", (4,), 4)
    fields.flag("zero_point", True)  # files of this version have zeros in any case
    for name in ("format", "checkpoint_format", "version"):
        fields.choice(name, ("gemm",), "gemm")
    fields.choice("pack_dtype", ("int32",), "int32")
    size = fields.group_size("group_size", fields.raw("q_group_size", 128))
    skipped = fields.strings("modules_to_not_convert")
    fields.close()
    return AWQFormat(size), skipped
