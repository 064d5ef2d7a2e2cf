"""The tape on which ``tracer.py`` records, as instructions, what a run of a model does to the rows of its batch."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams
from specdec_fast.program.plan.ir import (
    LOGIT_ROWS,
    MAX_RANK,
    OF_ROW,
    OVER_VECTORS,
    ROWS,
    Append,
    Attend,
    Buffer,
    Exchange,
    Gather,
    GroupedLinear,
    GroupedPackedLinear,
    Heads,
    Instruction,
    Linear,
    Operand,
    PackedLinear,
    RowOp,
)
from specdec_fast.program.record.operands import FLOATS, WHOLE, kept, lengths_of, operand_of, sizes_of, strides_of
from specdec_fast.program.record.row_views import NotLowerableError, RowView, collapsed, dense, row_axis
from specdec_fast.program.record.tape_values import Complex, Extent, Index, OfAllRows, Overwritten, Preceding, Value
from specdec_fast.quantization.packed_weight import PackedWeight


class Tape:
    """The instructions so far, and the value of every tensor of the run.

    ``num_rows`` and ``num_logit_rows`` (whose logits are wanted) are numbers that are no size of the model.
    ``kv_dtype`` is that of the pages; ``max_positions`` those that the batch may have, None: no limit.
    """

    def __init__(
        self, num_rows: int, num_logit_rows: int, kv_dtype: torch.dtype, max_positions: int | None = None
    ) -> None:
        self.kv_dtype = kv_dtype
        self.max_positions = max_positions
        self.counts = {ROWS: num_rows, LOGIT_ROWS: num_logit_rows}
        self.instructions: list[Instruction] = []
        self.buffers: list[Buffer] = []
        self.inputs: int | None = None  # the buffer of what the rows take besides their tokens; None: nothing
        self._values: dict[int, tuple[Tensor, Value]] = {}  # by id; a kept tensor keeps its id

    def value(self, tensor: Any) -> Value | None:
        """Return the value of a tensor; None for a constant or an object that is no tensor."""
        known = self._values.get(id(tensor))
        return None if known is None else known[1]

    def bind(self, tensor: Tensor, value: Value) -> None:
        """Record the value of a tensor."""
        self._values[id(tensor)] = (tensor, value)

    def bind_inputs(self, tensor: Tensor) -> None:
        """Record that ``tensor`` ``[T, size]`` is what the rows take besides their tokens."""
        view = self.fresh(ROWS, 0, (1, tensor.shape[1]), tensor.dtype)
        self.inputs = view.buffer
        self.bind(tensor, view)

    def of_memory(self, tensor: Tensor) -> list[tuple[Tensor, Value]]:
        """Return the tensors whose memory is that of ``tensor``, itself included, with their values."""
        memory = tensor.untyped_storage().data_ptr()
        return [each for each in self._values.values() if each[0].untyped_storage().data_ptr() == memory]

    def of_buffer(self, buffer: int) -> list[tuple[Tensor, RowView | Complex]]:
        """Return the tensors whose numbers are in a buffer, with their values."""
        pairs: list[tuple[Tensor, RowView | Complex]] = []
        for tensor, value in self._values.values():
            view = value.parts if isinstance(value, Complex) else value
            if isinstance(value, RowView | Complex) and isinstance(view, RowView) and view.buffer == buffer:
                pairs.append((tensor, value))
        return pairs

    def row_view(self, tensor: Tensor) -> RowView:
        """Return the places of a tensor's numbers; it is neither the batch's integers, nor a constant, nor outdated."""
        value = self.value(tensor)
        if isinstance(value, RowView):
            return value
        if isinstance(value, Overwritten):
            raise NotLowerableError("numbers that were changed in place through another tensor of the same memory")
        kinds = {
            Index: "integers of the batch",
            Preceding: "positions minus the numbers of rows",
            Extent: "a number of the whole batch",
            Complex: "complex numbers",
            OfAllRows: "choices of all rows",
        }
        what = next((text for kind, text in kinds.items() if isinstance(value, kind)), "a constant")
        raise NotLowerableError(f"an operation on {what} where numbers of rows are expected")

    def numbers(self, tensor: Tensor, like: Tensor | None = None) -> RowView:
        """Return the places of a tensor's numbers; token ids and positions are written to a buffer.

        Integers of the batch get the shape and dtype of ``like``; None: their own.
        """
        value = self.value(tensor)
        if not isinstance(value, Index) or value.kind == "logit_rows":
            return self.row_view(tensor)
        like = tensor if like is None else like
        axis = self.index_axis(like)
        out = self.fresh(ROWS, axis, (1,) * like.dim(), like.dtype)
        place = Operand(out.buffer, out.dtype, 0, (0,), 1)
        self.instructions.append(RowOp(OF_ROW[value.kind], (1,), (), place, scalar=float(value.added)))
        return out.expanded(axis, tuple(1 if d == axis else size for d, size in enumerate(like.shape)))

    def index_axis(self, tensor: Tensor) -> int:
        """Return the axis of a tensor of integers of the batch that counts the rows; they repeat along the others."""
        axes = [d for d, size in enumerate(tensor.shape) if size in self.counts.values()]
        if len(axes) != 1:
            raise NotLowerableError(f"integers of the batch in a shape {list(tensor.shape)}")
        return axes[0]

    def fresh(self, domain: int, axis: int, sizes: tuple[int, ...], dtype: torch.dtype) -> RowView:
        """Return a view of a new buffer; ``sizes`` has 1 at ``axis``, the axis of the rows."""
        if dtype not in (*FLOATS, *WHOLE):
            raise NotLowerableError(f"numbers of {dtype}")
        strides = tuple(0 if size == 1 else stride for size, stride in zip(sizes, dense(sizes), strict=True))
        stored = torch.float32 if dtype in WHOLE else dtype
        view = RowView(len(self.buffers), domain, axis, sizes, strides, 0, stored)
        self.buffers.append(Buffer(domain, view.size, stored))
        return view

    def fresh_like(self, tensor: Tensor, axis: int, domain: int) -> RowView:
        """Return a view of a new buffer in the shape of ``tensor``."""
        if tensor.shape[axis] != self.counts[domain]:
            raise NotLowerableError(f"a result of shape {list(tensor.shape)} has other rows than its input")
        sizes = tuple(1 if d == axis else size for d, size in enumerate(tensor.shape))
        return self.fresh(domain, axis, sizes, tensor.dtype)

    def row_op(self, code: str, inputs: list[RowView | Tensor | float], out: RowView, **more: Any) -> None:
        """Record one operation whose inputs are broadcast to each other; ``out`` has their shape.

        For operations along the last axis, only the axes before it are broadcast. Every operand has its own length of
        the last axis; a number has that of the operand before it.
        """
        inputs = [self._of_one_row(each, out) if isinstance(each, Tensor) else each for each in inputs]
        rank = max(len(out.sizes), *(len(each.sizes) for each in inputs if isinstance(each, RowView)), 0)
        views = [*inputs, out]
        sizes = [sizes_of(each, rank) for each in views]
        for each in views:
            if isinstance(each, RowView) and each.axis - len(each.sizes) != out.axis - len(out.sizes):
                raise NotLowerableError(f"{code} of tensors whose rows are different axes")
            if isinstance(each, RowView) and each.domain != out.domain:
                raise NotLowerableError("all rows and rows whose logits are wanted are mixed")
        over_vectors = code in OVER_VECTORS
        common = [each[:-1] if over_vectors else each for each in sizes]
        shape = tuple(max(axis) for axis in zip(*common, strict=True))
        if common[-1] != shape:
            raise NotLowerableError(f"{code} gives a shape {list(sizes[-1])} from one of {list(shape)}")
        strides = [strides_of(each, shape, rank) for each in views]
        head, collapsed_strides = collapsed(shape, [each[: len(shape)] for each in strides])
        lengths = [head[-1]] * len(views)
        if over_vectors:
            lengths = lengths_of(views, sizes)
            head = (*head, lengths[0])
            collapsed_strides = [(*o, s[-1]) for o, s in zip(collapsed_strides, strides, strict=True)]
        if len(head) > MAX_RANK:
            raise NotLowerableError(f"{code} over more than {MAX_RANK} axes")
        operands = [operand_of(*each) for each in zip(views, collapsed_strides, lengths, strict=True)]
        self.instructions.append(RowOp(code, head, tuple(operands[:-1]), operands[-1], **more))

    def _of_one_row(self, constant: Tensor, out: RowView) -> Tensor:
        """Return what one row sees of a constant, such as zeros, that a forward has made for every row of the batch."""
        axis = constant.dim() + out.axis - len(out.sizes)
        if axis < 0 or constant.shape[axis] != self.counts[out.domain]:
            return constant
        first = constant.narrow(axis, 0, 1)
        return first if torch.equal(constant, first.expand_as(constant)) else constant

    def copied(self, view: RowView, dtype: torch.dtype | None = None) -> RowView:
        """Return a copy of the numbers, contiguous in a buffer of their own."""
        out = self.fresh(view.domain, view.axis, view.sizes, dtype or view.dtype)
        self.row_op("copy", [view], out)
        return out

    def linear(self, view: RowView, weight: Tensor, bias: Tensor | None, result: Tensor) -> None:
        """Record a linear layer over the last axis; ``weight`` ``[out, in]`` may be a transposed ``[in, out]``."""
        is_matrix = weight.is_contiguous() or weight.t().is_contiguous()
        is_plain = is_matrix and (bias is None or (bias.dim() == 1 and bias.is_contiguous()))
        dtypes = {view.dtype, weight.dtype, view.dtype if bias is None else bias.dtype}
        if not is_plain or len(dtypes) > 1 or view.axis == len(view.sizes) - 1:
            raise NotLowerableError("a linear layer with weights that are not plain, or of another dtype")
        num_vectors = view.size // view.sizes[-1]
        if not view.is_dense or (num_vectors > 1 and view.size != self.buffers[view.buffer].size):
            view = self.copied(view)
        out = self.fresh_like(result, view.axis, view.domain)
        bias = None if bias is None else kept(bias)
        self.instructions.append(Linear(view.buffer, view.offset, num_vectors, kept(weight), bias, out.buffer))
        self.bind(result, out)

    def quantized_linear(self, view: RowView, weight: PackedWeight, bias: Tensor | None, result: Tensor) -> None:
        """Record the op ``quantized_linear`` over the last axis."""
        if view.axis == len(view.sizes) - 1 or (bias is not None and bias.dtype != view.dtype):
            raise NotLowerableError("a quantised linear along the rows, or with a bias of another dtype")
        num_vectors = view.size // view.sizes[-1]
        if not view.is_dense or (num_vectors > 1 and view.size != self.buffers[view.buffer].size):
            view = self.copied(view)
        out = self.fresh_like(result, view.axis, view.domain)
        bias = None if bias is None else kept(bias)
        step = PackedLinear(view.buffer, view.offset, num_vectors, view.dtype, weight, bias, out.buffer)
        self.instructions.append(step)
        self.bind(result, out)

    def grouped_linear(
        self, rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor
    ) -> None:
        """Record the op ``grouped_linear``."""
        view = self.row_view(rows)
        chosen = self.row_view(expert_ids)
        is_plain = (weight.is_contiguous() or weight.mT.is_contiguous()) and (bias is None or bias.is_contiguous())
        dtypes = {view.dtype, weight.dtype, view.dtype if bias is None else bias.dtype}
        if not is_plain or len(dtypes) > 1 or (view.axis, chosen.axis) != (0, 0) or view.domain != chosen.domain:
            raise NotLowerableError("experts with weights that are not plain, or of another dtype")
        view, chosen = (each if each.is_dense else self.copied(each) for each in (view, chosen))
        out = self.fresh_like(result, 0, view.domain)
        step = GroupedLinear(
            source=view.buffer,
            offset=view.offset,
            num_vectors=view.sizes[1],
            experts=chosen.buffer,
            experts_offset=chosen.offset,
            choices=chosen.sizes[1],
            weight=kept(weight),
            bias=None if bias is None else kept(bias),
            out=out.buffer,
        )
        self.instructions.append(step)
        self.bind(result, out)

    def grouped_quantized_linear(
        self, rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None, result: Tensor
    ) -> None:
        """Record the op ``grouped_quantized_linear``."""
        view = self.row_view(rows)
        chosen = self.row_view(expert_ids)
        is_plain = bias is None or (bias.is_contiguous() and bias.dtype == view.dtype)
        if not is_plain or (view.axis, chosen.axis) != (0, 0) or view.domain != chosen.domain:
            raise NotLowerableError("quantised experts with a bias that is not plain, or of another dtype")
        view, chosen = (each if each.is_dense else self.copied(each) for each in (view, chosen))
        out = self.fresh_like(result, 0, view.domain)
        step = GroupedPackedLinear(
            source=view.buffer,
            offset=view.offset,
            num_vectors=view.sizes[1],
            experts=chosen.buffer,
            experts_offset=chosen.offset,
            choices=chosen.sizes[1],
            dtype=view.dtype,
            weight=weight,
            bias=None if bias is None else kept(bias),
            out=out.buffer,
        )
        self.instructions.append(step)
        self.bind(result, out)

    def gather(self, view: RowView, result: Tensor) -> None:
        """Record that only the rows whose logits are wanted are kept."""
        if view.domain != ROWS:
            raise NotLowerableError("rows are chosen twice")
        if not view.is_dense or view.size != self.buffers[view.buffer].size:
            view = self.copied(view)
        out = self.fresh_like(result, view.axis, LOGIT_ROWS)
        self.instructions.append(Gather(view.buffer, out.buffer))
        self.bind(result, out)

    def exchange(self, rows: Tensor, ranks: int, widths: tuple[int, ...], result: Tensor) -> None:
        """Record a sum over the ranks of a sharded model (``widths`` is empty), or the concatenation of their rows."""
        view = self.row_view(rows)
        if view.axis == len(view.sizes) - 1 or (widths and view.size != view.sizes[-1]):
            raise NotLowerableError("an exchange between ranks along the rows, or of several vectors of a row")
        if not view.is_dense or view.size != self.buffers[view.buffer].size:
            view = self.copied(view)
        out = self.fresh_like(result, view.axis, view.domain)
        self.instructions.append(Exchange(ranks, view.dtype, view.domain, view.buffer, out.buffer, widths))
        self.bind(result, out)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Record that ``[T, num_kv_heads, head size]`` keys and values are written into pages."""
        self.instructions.append(Append(layer, self._heads(keys), self._heads(values)))

    def attend(self, layer: int, query: Tensor, params: AttentionParams, result: Tensor) -> None:
        """Record attention, from ``[T, num_heads, key_head_dim]`` queries to ``[T, num_heads, value_head_dim]``."""
        heads = self._heads(query)
        out = self.fresh_like(result, 0, ROWS)
        step = Attend(
            layer=layer,
            num_heads=query.shape[1],
            query=heads,
            out=out.buffer,
            scale=params.scale,
            sliding_window=params.sliding_window,
            softcap=params.softcap,
            sinks=None if params.sinks is None else self._constant(params.sinks),
            attention_chunk=params.attention_chunk,
        )
        self.instructions.append(step)
        self.bind(result, out)

    def _constant(self, tensor: Tensor) -> Tensor:
        if self.value(tensor) is not None or not tensor.is_contiguous():
            raise NotLowerableError("attention sinks that are computed from the batch, or not contiguous")
        return kept(tensor)

    def _heads(self, tensor: Tensor) -> Heads:
        view = self.row_view(tensor)
        if view.domain != ROWS or view.axis != 0 or len(view.sizes) != 3 or view.dtype != self.kv_dtype:
            raise NotLowerableError(f"queries, keys or values are not [T, heads, head_dim] in {self.kv_dtype}")
        if view.strides[2] != 1 and view.sizes[2] != 1:
            view = self.copied(view)
        return Heads(view.buffer, view.offset, view.strides[1])

    def reshaped(self, view: RowView, shape: tuple[int, ...]) -> RowView:
        """Return the view in the shape of a PyTorch tensor, rows included; numbers are copied if necessary."""
        before, after = (prod(view.sizes[part]) for part in (slice(0, view.axis), slice(view.axis + 1, None)))
        axis = row_axis(shape, before, after, self.counts[view.domain])
        sizes = tuple(1 if d == axis else size for d, size in enumerate(shape))
        viewed = view.viewed(axis, sizes)
        if viewed is None:
            viewed = self.copied(view).viewed(axis, sizes)
        assert viewed is not None, "contiguous numbers have a view of every shape"
        return viewed
