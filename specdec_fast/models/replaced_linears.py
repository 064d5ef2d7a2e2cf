"""A model's linears during a forward: the op ``linear``, or PyTorch's in chunks of sizes with the same order of sums.

For one row, PyTorch's linears read weights at a third of the memory's bandwidth; for another number of rows they add in
another order. The op is faster for few rows, and has one order for any number. If the op is not chosen, rows are
computed in chunks (``row_counts.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from specdec_fast.model_watch import OwnForward, replaced_forward
from specdec_fast.models.placement import moves_rows
from specdec_fast.models.quantized_linears import QuantizedLinear
from specdec_fast.models.row_counts import FUNCTIONS, chunks, is_aligned, kind_of, sizes_of
from specdec_fast.ops import Ops
from specdec_fast.ops.checks import FLOATS, stored
from specdec_fast.torch_threads import in_invariant_call, invariant_call

# With fewer weights, the call of the op takes longer than the products, and the op is used for its bits alone. The
# choice must depend on shape alone, because another choice in another engine would give other bits.
SMALLEST = 1 << 18
_PLAIN = (Tensor, nn.Parameter)  # no subclasses, which may compute something else


class Linears:
    """The linears of one model, replaced within ``attached``.

    The ``forward`` of a module is replaced if it only calls ``torch.nn.functional.linear``, or ``addmm`` as in GPT-2's
    ``Conv1D``. With ``sees_all``, these functions are intercepted wherever the model calls them, which costs some
    microseconds per call of any PyTorch function. Only one thread at a time may run within ``attached``.
    """

    def __init__(self, model: nn.Module, ops: Ops) -> None:
        self._own = ops.without_checks.linear if ops.is_invariant("linear") else None
        self._quantized = ops.without_checks.quantized_linear
        self.sees_all = False  # whether calls outside of modules are intercepted
        # ``real_rows`` of the current forward's ``PagedCache``; None computes all rows at once
        self.real_rows: Mapping[int, int] | None = None
        self._exchanged = [(module, name) for module in model.modules() if (name := _function_of(module))]
        self._forwards = [
            (m.__dict__, OwnForward(self._moving if hasattr(m, "_hf_hook") else self._forward, m, name))
            for m, name in self._exchanged
        ]

    def served(self, are_chunked: bool) -> list[nn.Module]:
        """Return the modules that the op ``linear`` computes, with or without chunks."""
        smallest = 0 if are_chunked else SMALLEST
        plain = (each for each in self._exchanged if each[1] != _QUANTIZED)
        return [m for m, name in plain if self._serves(name, m.weight, m.bias, smallest)]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Replace the forwards of modules by attributes of the instances, which hide the methods of their class."""
        previous = [attributes.get("forward") for attributes, _ in self._forwards]
        with _Intercepted(self) if self.sees_all else nullcontext():
            try:
                for attributes, forward in self._forwards:
                    attributes["forward"] = forward
                yield
            finally:
                for (attributes, _), before in zip(self._forwards, previous, strict=True):
                    if before is None:
                        attributes.pop("forward", None)
                    else:  # replaced by another engine over the same model, within whose forward this one runs
                        attributes["forward"] = before

    def compute(self, function: str, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute one linear of ``[..., in_features]``: ``[..., out_features]``, zeros in rows of padding.

        ``function`` is a name in ``row_counts.FUNCTIONS``; ``weight`` is ``[out_features, in_features]`` for
        ``linear``, ``[in_features, out_features]`` for ``addmm``.
        """
        if rows.is_neg() or weight.is_neg() or (bias is not None and bias.is_neg()):  # spares three calls of `stored`
            rows = stored(rows)
            weight = stored(weight)
            bias = None if bias is None else stored(bias)
        flat = rows.reshape(-1, rows.shape[-1])
        num_rows = len(flat)
        num_real = len(flat)
        if self.real_rows is not None:
            num_real = self.real_rows.get(num_rows, num_rows)
        smallest = SMALLEST if self.real_rows is None else 0
        if self._own is not None and self._serves(function, weight, bias, smallest) and rows.dtype == weight.dtype:
            out = invariant_call(self._own, flat[:num_real], weight, bias)
        elif self.real_rows is None:
            out = invariant_call(FUNCTIONS[function], flat, weight, bias)
        else:
            out = invariant_call(_in_chunks, function, flat, num_real, weight, bias)
        if len(out) != num_rows:
            out = pad(out, (0, 0, 0, num_rows - len(out)))
        return out.view(*rows.shape[:-1], out.shape[-1])

    def _serves(self, function: str, weight: Any, bias: Any, smallest: int) -> bool:
        """Return whether the op computes a linear; the answer is the same for all linears of one shape."""
        if self._own is None or function != "linear" or type(weight) not in _PLAIN or weight.numel() < smallest:
            return False
        tensors = [weight] if bias is None else [weight, bias]
        return weight.dtype in FLOATS and all(t.is_contiguous() and t.dtype == weight.dtype for t in tensors)

    def _forward(self, module: Any, function: str, rows: Tensor) -> Tensor:
        if function == _QUANTIZED:
            return self._multiply(module, rows)
        return self.compute(function, rows, module.weight, module.bias)

    def _moving(self, module: Any, function: str, rows: Tensor) -> Tensor:
        """Compute a linear whose replaced hook would have moved the rows to its device."""
        return self._forward(module, function, rows.to(module.weight.device))

    def _multiply(self, module: QuantizedLinear, rows: Tensor) -> Tensor:
        """Compute a quantised linear, whose op has one order for any number of rows; zeros in rows of padding."""
        flat = module.ordered(stored(rows).reshape(-1, rows.shape[-1]))
        num_rows = len(flat)
        num_real = num_rows if self.real_rows is None else self.real_rows.get(num_rows, num_rows)
        out: Tensor = invariant_call(self._quantized, flat[:num_real], module.packed, module.bias)
        if num_real != num_rows:
            out = pad(out, (0, 0, 0, num_rows - num_real))
        return out.view(*rows.shape[:-1], module.out_features)


_QUANTIZED = "quantized"


def _function_of(module: nn.Module) -> str | None:
    if isinstance(module, QuantizedLinear):
        return _QUANTIZED if replaced_forward(module) is None else None
    is_own = replaced_forward(module) is None or moves_rows(module)
    if not is_own or type(getattr(module, "weight", None)) not in _PLAIN:
        return None  # other code has replaced it, or it is quantised
    if type(module).forward is nn.Linear.forward:
        return "linear"
    return "addmm" if type(module) is Conv1D else None


def _in_chunks(function: str, flat: Tensor, num_rows: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the first ``num_rows`` rows of ``flat``, and the rows after them that fill the last chunk."""
    if 0 in weight.stride():  # expanded; numbers to try sizes with need memory of their own
        weight = weight.contiguous()
    sizes = chunks(sizes_of(kind_of(function, weight, bias)), num_rows)
    flat = flat.contiguous()
    if (missing := sum(sizes) - len(flat)) > 0:
        flat = pad(flat, (0, 0, 0, missing))
    outputs = []
    start = 0
    for size in sizes:
        piece = flat[start : start + size]
        outputs.append(FUNCTIONS[function](piece if is_aligned(piece) else piece.clone(), weight, bias))
        start += size
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[: len(flat) - max(0, missing)]


# A name in row_counts.FUNCTIONS, rows, weight and bias. Arguments below have the names of PyTorch's arguments.
_Call = tuple[str, Tensor, Tensor, Tensor | None]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Call:
    return "linear", input, weight, bias


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **others: Any) -> _Call | None:
    return None if others or input.dim() != 1 else ("addmm", mat1, mat2, input)


def _matmul(input: Tensor, other: Tensor, **others: Any) -> _Call | None:
    return None if others else ("addmm", input, other, None)


_CALLS: dict[Any, Callable[..., _Call | None]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__), _matmul),
}


_BATCHED = (torch.bmm, Tensor.bmm)


class _Intercepted(TorchFunctionMode):
    """Computes linears wherever a model calls PyTorch's functions; a mode applies to the calling thread alone."""

    def __init__(self, linears: Linears) -> None:
        super().__init__()
        self._linears = linears

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BATCHED and len(args) == 2 and not kwargs and _are_linears(*args) and not in_invariant_call():
            each = zip(*args, strict=True)  # one linear after the other, as of the experts of Llama-4
            return torch.stack([self._linears.compute("addmm", rows, weight, None) for rows, weight in each])
        call = _CALLS[func](*args, **kwargs) if func in _CALLS and not in_invariant_call() else None
        if call is None or not _is_linear(*call[1:3]):
            return func(*args, **kwargs)
        return self._linears.compute(*call)


def _is_linear(rows: Tensor, weight: Tensor) -> bool:
    plain = type(weight) in _PLAIN and type(rows) is Tensor and rows.dtype == weight.dtype
    return plain and weight.dim() == 2 and rows.dim() >= 2 and weight.is_floating_point()


def _are_linears(rows: Any, weights: Any) -> bool:
    """Return whether ``[n, rows, in_features]`` are multiplied by as many weights ``[in_features, out_features]``."""
    plain = type(weights) is nn.Parameter and type(rows) is Tensor and rows.dtype == weights.dtype
    return plain and weights.is_floating_point()
