"""The codes of a checkpoint in one process of a sharded model: each rank keeps its part of every linear."""

from __future__ import annotations

from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from specdec_fast.errors import NotYetSupportedError
from specdec_fast.models.quantized_linears import QuantizedLinear
from specdec_fast.models.sharded import LOCAL_STYLES, group_of, parts_of, styles_of
from specdec_fast.quantization.packed_weight import part_of
from specdec_fast.ranks.operations import mesh_of


class CodesOfRank:
    """Cuts linears with codes as the tensor-parallel plan of their model says; of a whole model they stay whole.

    Args:
        model: the model, the other weights of which are loaded, or sharded.

    """

    def __init__(self, model: PreTrainedModel) -> None:
        mesh = mesh_of(model)
        self._group = None if mesh is None else group_of(mesh)
        self._device = model.device
        self._styles = {} if mesh is None else styles_of(model)

    @property
    def is_whole(self) -> bool:
        """Whether the model is not sharded."""
        return self._group is None

    def part(self, name: str, linear: QuantizedLinear) -> QuantizedLinear:
        """Return this rank's part of a linear, on the device of the model.

        Raises:
            NotYetSupportedError: the plan divides its groups, or inputs that have another order, or has another style
                for it than those of linears.

        """
        style = self._styles.get(name)
        if self._group is None:
            return linear
        if style is None or style in LOCAL_STYLES:
            return linear.to(self._device)
        if style not in ("colwise", "rowwise"):
            raise _not_served(name, f"the plan gives it the style {style!r}")
        if style == "rowwise" and linear.permutation is not None:
            raise _not_served(name, "its inputs have another order (desc_act), and the plan divides them")
        outputs = slice(0, linear.out_features)
        inputs = slice(0, linear.in_features)
        bias: Tensor | None = linear.bias
        if style == "colwise":
            outputs = self._own(linear.out_features)
            bias = None if bias is None else bias[outputs]
        else:
            inputs = self._own(linear.in_features)
        try:
            weight = part_of(linear.packed, outputs, inputs)
        except ValueError as error:
            raise _not_served(name, str(error)) from error
        return QuantizedLinear(weight, bias, linear.dtype, linear.permutation).eval().to(self._device)

    def _own(self, size: int) -> slice:
        """Return this rank's part of an axis."""
        rank = distributed.get_rank(self._group)
        sizes = parts_of(size, distributed.get_world_size(self._group))
        start = sum(sizes[:rank])
        return slice(start, start + sizes[rank])

    def expect_no_experts(self, experts: list[nn.Module]) -> None:
        """Raise NotYetSupportedError if experts have codes, and the model is sharded."""
        if experts and not self.is_whole:
            raise NotYetSupportedError(
                "tp_size does not serve checkpoints with codes of experts yet; leave it out, or pass a checkpoint in "
                "bf16 and quantization='int4'."
            )


def _not_served(name: str, why: str) -> NotYetSupportedError:
    return NotYetSupportedError(
        f"tp_size does not serve the codes of {name}: {why}; take another number of processes, or leave it out."
    )
