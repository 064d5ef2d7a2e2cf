"""The Triton kernel of linears with row operations before and after them, as source.

Sums of products are those of ``triton_kernels/linear.py``: the same tiles, the same functions. A tile of two matrices
that a fusion combines, such as gate and up, has half its rows of each. What the kernel computes besides is written by
``tile_values.py`` from the fusion's steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec_fast.program.plan.ir import Plan, RowOp
from specdec_fast.program.triton.fused_linear import FusedLinear
from specdec_fast.program.triton.launches import RowFusion
from specdec_fast.program.triton.row_code import TYPES, NotEmittableError, Pointers
from specdec_fast.program.triton.row_index import Axis, CutError, Place, SplitError, of_axis, padded
from specdec_fast.program.triton.row_kernel import row_kernel, row_sizes_of
from specdec_fast.program.triton.tile_values import (
    OF_OUTPUTS,
    OF_TWO_OUTPUTS,
    WITH_STATISTICS,
    TileNames,
    TileValues,
    WholeRows,
    WithStatistics,
)

_CHOICES = (
    "ALIGNMENT",
    "BLOCK_ROWS",
    "BLOCK_OUT",
    "BLOCK_IN",
    "PREFETCHED",
    "PIECE",
    "WARP_SIZE",
    "OVERLAPS",
)  # of a launch
_WARPS = 4  # of a linear's program for few rows
_ROWS = 16  # of such a program
_LOADED = 8192  # numbers of whole rows that a program has at once: 64 of each thread


@dataclass(frozen=True)
class LinearKernel:
    """The kernel of a ``FusedLinear``."""

    # a module with the function row_kernel: of the vectors if they are in memory, the matrices, their biases, the
    # outputs and their sizes if they are stored, the tensors, the number of rows, and the stride of the vectors
    source: str
    tensors: tuple[int | Tensor | str, ...]  # as those of RowKernel


@dataclass(frozen=True)
class _Code:
    lines: list[str]
    loaded: set[int]


def linear_kernel(plan: Plan, fused: FusedLinear, all_rows: bool = False) -> LinearKernel:
    """Return the kernel of fused linears; ``all_rows``: whether ``fused.gather`` takes all rows in their order.

    Raises NotEmittableError if a fusion is not elementwise where it must be, or a program writes what another reads.
    """
    pointers = Pointers()
    try:
        beginning = (
            _loaded_vectors(fused) if fused.before is None else _computed_vectors(plan, fused, pointers, all_rows)
        )
        end = _Code(_STORE, set()) if fused.after is None else _end(plan, fused, fused.after, pointers)
    except (SplitError, CutError):
        raise NotEmittableError(-1, "a row is read in another order than it is written") from None
    if fused.after is not None and (beginning.loaded | end.loaded) & fused.after.stored:
        raise NotEmittableError(-1, "a program would write what another one reads")
    return LinearKernel(_source(fused, pointers, beginning.lines, end.lines), tuple(pointers.tensors))


def _loaded_vectors(fused: FusedLinear) -> _Code:
    lines = [
        "row_at = rows + tl.multiple_of(number * stride_rows_row, ALIGNMENT)[:, None]",
        *_loop(fused, ["inputs = tl.load(row_at + feature, mask=inside & within, other=0.0)"]),
    ]
    return _Code(lines, {fused.steps[0].source})


def _computed_vectors(plan: Plan, fused: FusedLinear, pointers: Pointers, all_rows: bool) -> _Code:
    """Write statistics of the rows, and then the loop, which computes the vectors from them part by part."""
    fusion = fused.before
    step = fused.steps[0]
    assert fusion is not None
    _expect(fusion, WITH_STATISTICS)
    axis = Axis(fused.in_features)
    is_gathered = fused.gather is not None and not all_rows
    pieces = _pieces(plan, fusion, axis.size)
    inside = "" if axis.size == padded(axis) else f"(columns < {axis.size})"
    names = TileNames("some_source" if is_gathered else "some", "among", "columns", inside)
    whole = WholeRows(fusion.steps, pointers, row_sizes_of(plan, fusion), axis, names, pieces)
    values = WithStatistics(whole, TileNames("source" if is_gathered else "row", "inside", "feature", "within"))
    buffer = fused.steps[0].source if fused.gather is None else fused.gather.source
    value = values.read(buffer, Place(step.offset).plus(of_axis(axis)), len(fusion.steps))
    result = f"inputs = tl.where(inside & within, {value.text}, 0.0).to({TYPES[fused.dtype]})"
    lines = _statistics(values, whole, pieces, pointers.name("logit_rows") if is_gathered else None)
    return _Code([*lines, *_loop(fused, [*values.lines, result])], values.loaded | whole.loaded)


def _pieces(plan: Plan, fusion: RowFusion, size: int) -> tuple[int, int, int, int]:
    """Return arguments of ``linear_parts.load_rows`` with which a sum has the order of the row's own kernel.

    There a warp has 32 threads, and each loads 16 bytes, or less if the row is shorter than that.
    """
    warps = row_kernel(plan, fusion).num_warps
    length = padded(Axis(size))
    written = {buffer for step in fusion.steps for buffer in step.writes}
    sizes = {
        operand.dtype.itemsize
        for step in fusion.steps
        if isinstance(step, RowOp)
        for operand in step.inputs
        if isinstance(operand.source, int) and operand.source not in written
    }
    if warps > _WARPS or len(sizes) != 1:
        raise NotEmittableError(-1, "the row's own kernel adds in an order that this one does not have")
    of_threads = warps * (16 // sizes.pop())
    # Several short rows at once, so that each thread has as many numbers of a row as in the row's own kernel.
    count = _WARPS if length < 2 * 32 * of_threads else max(1, min(_ROWS, _LOADED // length))
    return size, count, length, of_threads


def _statistics(
    values: WithStatistics, whole: WholeRows, pieces: tuple[int, int, int, int], logit_rows: str | None
) -> list[str]:
    """Write the loop over groups of rows that computes their statistics, ``[BLOCK_ROWS, 1]`` each."""
    lines = [] if logit_rows is None else [f"source = tl.load({logit_rows} + row, mask=inside, other=0)"]
    if not values.collected:
        return lines
    _, count, length, _ = pieces
    body = [
        f"some = row_group * BLOCK_ROWS + group * {count} + tl.arange(0, {count})[:, None]",
        "among = some < num_rows",
        f"columns = tl.arange(0, {length})[None, :]",
        *([] if logit_rows is None else [f"some_source = tl.load({logit_rows} + some, mask=among, other=0)"]),
        *whole.lines,
        *(f"{name} = collected({text}, {name}, group, {count}, {_ROWS})" for name, text in values.collected.items()),
    ]
    return [
        *lines,
        *(f"{name} = tl.zeros([{_ROWS}], tl.float32)" for name in values.collected),
        f"groups_of_rows = tl.cdiv(tl.minimum(num_rows - row_group * BLOCK_ROWS, BLOCK_ROWS), {count})",
        "for group in tl.range(0, groups_of_rows, num_stages=1):",
        *_indented(body),
        *(f"{name} = {name}[:, None]" for name in values.collected),
    ]


def _loop(fused: FusedLinear, inputs: list[str]) -> list[str]:
    size = fused.in_features
    body = [
        "feature = first + tl.arange(0, BLOCK_IN)[None, :]",
        f"within = (feature < {size}) | ({size} % BLOCK_IN == 0)",
        "weights = tl.load(weight_at + feature, mask=weight_mask & within, other=0.0)",
        *inputs,
        "part = with_products(part, weights, inputs)",
    ]
    pieces = [
        "part = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)",
        f"for first in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, {size}), BLOCK_IN):",
        *_indented(body),
        "sums = part if PIECES == 1 else sums + part",
    ]
    return [
        f"PIECES: tl.constexpr = ({size} + PIECE - 1) // PIECE",
        "sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)",
        "for piece in range(PIECES):",
        *_indented(pieces),
    ]


_STORE = [
    "out_at = out + row * out_features + output[None, :]",
    "tl.store(out_at, sums.to(out.dtype.element_ty).T, mask=inside & (output < out_features)[None, :])",
]


def _end(plan: Plan, fused: FusedLinear, fusion: RowFusion, pointers: Pointers) -> _Code:
    """Write what the fusion computes from the outputs of the tile, and what it stores of that."""
    matrices = fused.matrices()
    _expect(fusion, OF_OUTPUTS if len(matrices) == 1 else OF_TWO_OUTPUTS)
    axis = Axis(matrices[0][0].shape[0])
    registers = {(buffer, offset): f"numbers_{i}" for i, (_, _, buffer, offset) in enumerate(matrices)}
    sizes = row_sizes_of(plan, fusion)
    names = TileNames("row", "inside", "part", "within_out")
    values = TileValues(fusion.steps, pointers, sizes, axis, names, registers)
    stores = []
    for buffer in sorted(fusion.stored):
        for step in fusion.steps:
            if not isinstance(step, RowOp) or step.out.source != buffer:
                continue
            shape = step.shape_of(step.out)
            if [size for size in shape if size != 1] != [axis.size]:
                raise NotEmittableError(-1, "what is stored has another shape than the outputs")
            place = Place(step.out.offset).plus(of_axis(axis).times(step.out.strides[shape.index(axis.size)]))
            pointer = pointers.name(buffer)
            value = values.read(buffer, place, len(fusion.steps))
            address = f"{pointer} + row * {sizes[buffer]} + ({values.index(place).text})"
            stores.append(f"tl.store({address}, {value.text}.to({pointer}.dtype.element_ty), mask=inside & within_out)")
    return _Code([*_outputs(fused, axis.size), *values.lines, *stores], values.loaded)


def _outputs(fused: FusedLinear, size: int) -> list[str]:
    """Write the outputs of the tile as the linear alone would store them, ``[BLOCK_ROWS, part]``."""
    rounded = "{0}.to(" + TYPES[fused.dtype] + ").to(tl.float32).T"
    if len(fused.matrices()) == 1:
        lines = ["part = output[None, :]", f"numbers_0 = {rounded.format('sums')}"]
    else:
        lines = [
            "part = (tile.to(tl.int64) * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2))[None, :]",
            "sums_0, sums_1 = sums_of_pair(sums, BLOCK_OUT, BLOCK_ROWS)",
            *(f"numbers_{i} = {rounded.format(f'sums_{i}')}" for i in range(2)),
        ]
    return [*lines, f"within_out = part < {size}"]


def _expect(fusion: RowFusion, codes: frozenset[str]) -> None:
    other = next((step for step in fusion.steps if not isinstance(step, RowOp) or step.code not in codes), None)
    if other is not None:
        raise NotEmittableError(-1, f"a linear's kernel does not compute {getattr(other, 'code', 'an append')}")


def _matrices(fused: FusedLinear) -> list[str]:
    count = len(fused.matrices())
    if fused.after is None:
        weights, biases, sizes = (
            f"({', '.join(f'{name}_{i}' for i in range(count))},)" for name in ("weight", "bias", "out_features")
        )
        biases = weights if fused.steps[0].bias is None else biases
        arguments = f"tile, {weights}, {biases}, out, {sizes}, num_rows.to(tl.int64), {count}, BLOCK_OUT"
        return [
            f"weight, bias, out, out_features, tile = matrix_of({arguments})",
            "output = tile.to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)",
        ]
    lines = [f"out_features = {fused.matrices()[0][0].shape[0]}"]
    if count == 1:
        lines.append("output = tile.to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)")
        chosen = "{0} = {0}_0"
    else:
        lines.append("output = outputs_of_pair(tile, BLOCK_OUT)")
        tensors = [tensor for matrix in fused.matrices() for tensor in matrix[:2] if tensor is not None]
        aligned = 16 if all(tensor.data_ptr() % 16 == 0 for tensor in tensors) else 1
        chosen = f"{{0}} = pair_of({{0}}_0, {{0}}_1, BLOCK_OUT, {aligned})"
    names = ["weight"] if fused.steps[0].bias is None else ["weight", "bias"]
    return [*lines, *(chosen.format(name) for name in names)]


def _source(fused: FusedLinear, pointers: Pointers, beginning: list[str], end: list[str]) -> str:
    size = fused.in_features
    matrices = range(len(fused.matrices()))
    has_bias = fused.steps[0].bias is not None
    is_pair = fused.after is not None and len(matrices) == 2
    names = [f"p{i}" for i in range(len(pointers.tensors))]
    batch = [name for name, tensor in zip(names, pointers.tensors, strict=True) if isinstance(tensor, str)]
    arguments = [
        *(["rows"] if fused.before is None else []),
        *(f"weight_{i}" for i in matrices),
        *(f"bias_{i}" for i in matrices if has_bias),
        *(["out", *(f"out_features_{i}" for i in matrices)] if fused.after is None else []),
        *names,
        "num_rows",
        *(["stride_rows_row"] if fused.before is None else []),
        *(f"{name}: tl.constexpr" for name in (_CHOICES)),
    ]
    unspecialised = [*batch, *({"num_rows", "stride_rows_row"} & {*arguments})]
    matrix = "weight[:, None]" if is_pair else "weight"
    # As in ``linear``; and all weights while the statistics are computed, before which no weights are loaded.
    prefetched = "PREFETCHED" if fused.before is None else max(256, padded(Axis(size)))
    bias = "sums += tl.load(bias + output, mask=output < out_features, other=0.0).to(tl.float32)[:, None]"
    body = [
        "groups = tl.cdiv(num_rows, BLOCK_ROWS)",
        "tile, row_group = tl.program_id(0) // groups, (tl.program_id(0) % groups).to(tl.int64)",
        *_matrices(fused),
        f"weight_at, weight_mask = (weight + output * {size})[:, None], (output < out_features)[:, None]",
        "if OVERLAPS:",
        f"    prefetch_rows({matrix}, output, out_features, {size}, {prefetched})",
        "wait(OVERLAPS)",
        "number = row_group * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)",
        "row, inside = number[:, None], (number < num_rows)[:, None]",
        *beginning,
        *([bias] if has_bias else []),
        *end,
    ]
    head = f"@triton.jit(do_not_specialize={sorted(unspecialised)})\ndef row_kernel({', '.join(arguments)}):\n"
    return head + "".join(f"    {line}\n" for line in body)


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
