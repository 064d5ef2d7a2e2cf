"""Finds an operation of a model that mixes rows, so that a row's bits may depend on other rows.

The check recognises the axis of rows by its size, a prime number that divides no size of the model. An operation that
is not known to keep rows separate counts as mixing them. Linears and attention (``invariant_call``) are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_fast.torch_threads import in_invariant_call

_PRIMES = (31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79)
# Operations that copy numbers within a row, or make new ones.
_COPYING = frozenset((
    "_reshape_alias", "_unsafe_view", "arange", "cat", "clone", "constant_pad_nd", "contiguous", "copy_", "embedding",
    "empty", "empty_like", "empty_strided", "fill_", "full", "full_like", "gather", "index", "index_select",
    "lift_fresh", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "repeat",
    "repeat_interleave", "scalar_tensor", "select_scatter", "slice_scatter", "split_with_sizes_copy", "stack", "tril",
    "triu", "zero_", "zeros", "zeros_like",
))  # fmt: skip
_ELEMENTWISE = frozenset(("complex", "polar"))  # torch does not tag them as such
# Operations along dimensions that an argument names: the argument's place, and its default (None: all dimensions).
_ALONG: dict[str, tuple[int, Sequence[int] | None]] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin", "max", "min", "var", "var_mean",
                     "std", "std_mean", "prod", "logsumexp"), (1, None)),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "scatter", "scatter_"), (1, None)),
    **dict.fromkeys(("linalg_vector_norm", "norm"), (2, None)),
    "topk": (2, (-1,)),
    "sort": (1, (-1,)),
}  # fmt: skip
_NORMS = frozenset(("native_layer_norm", "_fused_rms_norm", "rms_norm"))
_FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # the place of the first factor among the arguments


def sizes_of_rows(model: nn.Module, most: int) -> tuple[int, int] | None:
    """Return two numbers of rows, at most ``most``, that divide no size in ``model``."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    primes = [p for p in _PRIMES if p <= most and all(size % p for size in sizes)]
    return (primes[-1], primes[-2]) if len(primes) > 1 else None


class RowMixing(TorchDispatchMode):
    """Checks the operations of a model while it computes; ``counts`` are the sizes of the axes of rows."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__()
        self._counts = counts
        self.mixing_op: str | None = None  # the first operation that may mix rows, and why; None if there is none

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # the library's own ops compute each row from that row alone
        is_known = self.mixing_op is not None or func.namespace == "specdec_fast" or in_invariant_call()
        if not is_known and any(map(self._has_rows, _tensors((args, kwargs)))):
            reason = self._reason(func, args, kwargs)
            if (
                reason is not None and func._can_decompose()
            ):  # in inference mode some operations are composite; their parts are checked
                with self:
                    return func.decompose(*args, **kwargs)
            self.mixing_op = None if reason is None else f"{func}: {reason}"
        return func(*args, **kwargs)

    def _has_rows(self, tensor: Tensor) -> bool:
        return any(self._is_rows(size) for size in tensor.shape)

    def _is_rows(self, size: int) -> bool:
        return size > 0 and any(size % count == 0 for count in self._counts)

    def _reason(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        namespace, name = func.name().split("::")
        name = name.split(".")[0]
        if namespace not in ("aten", "prim"):
            return "it is none of PyTorch's own operations"
        if torch.Tag.pointwise in func.tags or func.is_view or name in _COPYING or name in _ELEMENTWISE:
            return None
        if name in _FIRST_FACTOR:
            is_sum = args[_FIRST_FACTOR[name]].shape[-1] > 1
            return "it adds products, outside of a linear" if is_sum else None
        if name in _NORMS:
            count = len(args[1])
            return "it computes along the rows" if any(map(self._is_rows, args[0].shape[-count:])) else None
        if name not in _ALONG:
            return "it is not known to keep rows separate"
        place, default = _ALONG[name]
        dims = args[place] if len(args) > place else kwargs.get("dim", default)
        looked_at = (dims,) if isinstance(dims, int) else dims or range(args[0].dim())
        return "it computes along the rows" if any(self._is_rows(args[0].shape[d]) for d in looked_at) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
