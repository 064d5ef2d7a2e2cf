"""The Triton kernel of a fusion of row operations, as source.

Each program computes one row, or a part of it: the numbers that the fusion stores fall into *units*, and a unit that
needs no sum over a whole row is divided into parts of an axis. Values that two units need are computed by both. The
compiled kernel, to which no number of rows is passed, orders every sum, so a row's bits depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from specdec_fast.program.plan.ir import LOGIT_ROWS, Append, Plan, RowOp
from specdec_fast.program.triton.launches import RowFusion
from specdec_fast.program.triton.row_code import Pointers
from specdec_fast.program.triton.row_index import Axis, CutError, Place, SplitError, of_axis, padded, place_of
from specdec_fast.program.triton.row_values import Values

_TILE = 1024  # numbers that a program computes of a unit without a sum over a whole row
_PER_WARP = 512  # numbers of the widest tensor: 16 of each thread
_MOST_WARPS = 16
OF_BATCH = ("token_ids", "positions", "slot_mapping", "logit_rows")  # tensors of the batch, of any alignment


@dataclass(frozen=True)
class RowKernel:
    """The kernel of a fusion."""

    source: str  # a module with the function row_kernel of as many pointers as there are tensors
    # what each pointer is: a buffer's row 0, a constant, the name of a tensor of the batch, or "keys N" and
    # "values N", the pages of a layer
    tensors: tuple[int | Tensor | str, ...]
    num_tiles: int  # programs per row
    num_warps: int  # warps per program


@dataclass(frozen=True)
class _Store:
    buffer: int  # from which the numbers are read, at the end of the fusion
    place: Place  # in a row of it
    target: int | str  # the same buffer, or the pages of a layer
    target_place: Place
    numbers_per_slot: int = 0


@dataclass
class _Unit:
    stores: list[_Store]
    reduced: dict[int, list[tuple[Axis, ...]]]
    size: int


def row_kernel(plan: Plan, fusion: RowFusion) -> RowKernel:
    """Return the kernel of a fusion; NotEmittableError if a step reads what it has written (``launches.halves``)."""
    row_sizes = row_sizes_of(plan, fusion)
    pointers = Pointers()
    body = ""
    num_tiles = 0
    widest = 1
    units = _units(plan, fusion, row_sizes)
    for unit in units:
        values, stores = _evaluated(fusion, pointers, row_sizes, unit.stores)
        tile = _tile(values, stores)
        if tile is not None:
            values, stores = _evaluated(fusion, pointers, row_sizes, stores, tile)
        tiles = 1 if tile is None else -(-tile[0].size // tile[1])
        body += _block(values, tile, num_tiles, tiles, len(units) > 1 or tiles > 1)
        num_tiles = num_tiles + tiles
        widest = max(widest, values.widest)
    warps = max(1, min(_MOST_WARPS, widest // _PER_WARP))
    return RowKernel(_source(pointers, body, fusion.domain), tuple(pointers.tensors), num_tiles, warps)


def row_sizes_of(plan: Plan, fusion: RowFusion) -> dict[int, int]:
    """Return the numbers from one row to the next, for every buffer of a fusion."""
    sizes: dict[int, int] = {}
    for step in fusion.steps:
        if isinstance(step, RowOp):
            for operand in (*step.inputs, step.out):
                if isinstance(operand.source, int):
                    sizes[operand.source] = plan.buffers[operand.source].row_bytes // operand.dtype.itemsize
        else:
            for heads in (step.key, step.value):
                sizes[heads.buffer] = plan.buffers[heads.buffer].row_bytes // plan.dtype.itemsize
    return sizes


def _units(plan: Plan, fusion: RowFusion, row_sizes: dict[int, int]) -> list[_Unit]:
    """Group what the fusion stores: what needs the same sums is computed together."""
    units: list[_Unit] = []
    for stores in _targets(plan, fusion):
        values, _ = _evaluated(fusion, Pointers(), row_sizes, stores)
        size = sum(prod(axis.size for axis in store.place.axes) for store in stores)
        same = next((unit for unit in units if unit.reduced.keys() & values.reduced.keys()), None)
        if same is None:
            units.append(_Unit(stores, values.reduced, size))
        else:
            same.stores += stores
            same.reduced |= values.reduced
    summed = [unit for unit in units if any(() in axes for axes in unit.reduced.values())]
    for unit in [unit for unit in units if not unit.reduced]:
        whole = next((other for other in summed if other.size == unit.size), None)
        if whole is not None:  # the same numbers, such as a residual and its norm
            whole.stores = unit.stores + whole.stores
            units.remove(unit)
    return units


def _targets(plan: Plan, fusion: RowFusion) -> list[list[_Store]]:
    """Return what the fusion stores, buffer by buffer; tensors of one shape share their axes."""
    axes: dict[tuple[int, int], Axis] = {}

    def coordinates(shape: Sequence[int]) -> list[Place]:
        return [of_axis(axes.setdefault((d, size), Axis(size))) for d, size in enumerate(shape)]

    targets: list[list[_Store]] = []
    for buffer in sorted(fusion.stored):
        stores = []
        for step in fusion.steps:
            if isinstance(step, RowOp) and step.out.source == buffer and 0 not in step.shape_of(step.out):
                place = place_of(step.out.offset, step.out.strides, coordinates(step.shape_of(step.out)))
                stores.append(_Store(buffer, place, buffer, place))
        targets.append(stores)
    for step in fusion.steps:
        if isinstance(step, Append):
            shape = plan.kv_shapes[step.layer]
            for heads, size, name in (
                (step.key, shape.key_head_dim, "keys"),
                (step.value, shape.value_head_dim, "values"),
            ):
                at = coordinates((shape.num_kv_heads, size))
                place = place_of(heads.offset, (heads.stride, 1), at)
                target = place_of(0, (size, 1), at)
                store = _Store(heads.buffer, place, f"{name} {step.layer}", target, shape.num_kv_heads * size)
                targets.append([store])
    return targets


def _evaluated(
    fusion: RowFusion,
    pointers: Pointers,
    row_sizes: dict[int, int],
    stores: list[_Store],
    tile: tuple[Axis, int] | None = None,
) -> tuple[Values, list[_Store]]:
    """Return the code that computes and stores; axes are split and cut until every place is a sum over axes."""
    while True:
        values = Values(fusion.steps, pointers, row_sizes, tile)
        for store in stores:
            if len(store.place.axes) == 1:
                values.share(store.place.axes[0])
        try:
            written = [_written(values, pointers, row_sizes, store, len(fusion.steps)) for store in stores]
        except (SplitError, CutError) as error:
            stores = [each for store in stores for each in _divided(store, error)]
            continue
        values.lines += written  # after every load, so that nothing is read that has been overwritten
        return values, stores


def _written(values: Values, pointers: Pointers, row_sizes: dict[int, int], store: _Store, end: int) -> str:
    value = values.read(store.buffer, store.place, end)
    index = values.index(store.target_place)
    pointer = pointers.name(store.target)
    mask = values.mask(index.axes)
    if isinstance(store.target, str):
        slot = values.line(f"tl.load({pointers.name('slot_mapping')} + row).to(tl.int64)")
        base = f"{pointer} + {slot.text} * {store.numbers_per_slot}"
    else:
        base = f"{pointer} + row * {row_sizes[store.target]}"
    text = f"{values.aligned(value, index.axes)}.to({pointer}.dtype.element_ty)"
    return f"tl.store({base} + ({index.text}), {text}{f', mask={mask}' if mask else ''})"


def _divided(store: _Store, error: SplitError | CutError) -> list[_Store]:
    if error.axis not in store.place.axes:
        return [store]
    return [
        replace(
            store,
            place=store.place.replaced(error.axis, part),
            target_place=store.target_place.replaced(error.axis, part),
        )
        for part in error.parts()
    ]


def _tile(values: Values, stores: list[_Store]) -> tuple[Axis, int] | None:
    """Return an axis whose parts programs compute, and the size of a part; None if one program computes all."""
    common = set.intersection(*(set(store.place.axes) for store in stores))
    common.intersection_update(*(axes for each in values.reduced.values() for axes in each))
    if not common or values.widest <= _TILE:
        return None
    axis = min(common, key=lambda each: each.number)
    block = max(1, min(padded(axis), _TILE * padded(axis) // values.widest))
    return None if block >= axis.size else (axis, block)


def _block(values: Values, tile: tuple[Axis, int] | None, first: int, count: int, is_branch: bool) -> str:
    lines = []
    for axis, name in values.axes.items():
        start = f"(tile - {first}) * {tile[1]} + " if tile is not None and axis is tile[0] else ""
        lines.append(f"{name} = {start}tl.arange(0, {values.block(axis)})")
    lines += values.lines
    if not is_branch:
        return "".join(f"    {line}\n" for line in lines)
    head = f"    if (tile >= {first}) & (tile < {first + count}):\n"
    return head + "".join(f"        {line}\n" for line in lines)


def _source(pointers: Pointers, body: str, domain: int) -> str:
    row = "    wait(OVERLAPS)\n    row = tl.program_id(0).to(tl.int64)\n    tile = tl.program_id(1)\n"
    if "+ source)" in body:
        source = f"tl.load({pointers.name('logit_rows')} + row)" if domain == LOGIT_ROWS else "row"
        row += f"    source = {source}\n"
    names = [f"p{i}" for i in range(len(pointers.tensors))]
    batch = [
        name
        for name, tensor in zip(names, pointers.tensors, strict=True)
        if isinstance(tensor, str) and tensor in OF_BATCH
    ]
    arguments = ", ".join([*names, "OVERLAPS: tl.constexpr"])
    return f"@triton.jit(do_not_specialize={batch})\ndef row_kernel({arguments}):\n{row}{body}"
