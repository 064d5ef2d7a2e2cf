"""A ``_C.Program`` from a plan: its buffers and its instructions, one after the other."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from specdec_fast import _C  # after torch, whose OpenMP runtime it shares
from specdec_fast.ops.cpp import DTYPE_CODES, addresses_of_packed
from specdec_fast.program.plan.ir import (
    MAX_RANK,
    ROW_CODES,
    Append,
    Attend,
    AttendLinearly,
    Convolve,
    Exchange,
    Gather,
    GroupedLinear,
    GroupedPackedLinear,
    Heads,
    Linear,
    Operand,
    PackedLinear,
    Plan,
    RowOp,
    Scan,
)
from specdec_fast.program.record.row_views import NotLowerableError
from specdec_fast.ranks.operations import ranks_of


def built(plan: Plan) -> _C.Program:
    """Return the program of a plan; the plan must outlive it, because it reads the plan's constants in place."""
    program = _C.Program(DTYPE_CODES[plan.dtype], plan.kv_shapes, (*plan.arena_bytes, plan.scratch_bytes))
    for buffer in plan.buffers:
        program.add_buffer(buffer.place, buffer.domain, buffer.offset, buffer.row_bytes)
    for instruction in plan.instructions:
        _add(instruction, program, plan)
    return program


@singledispatch
def _add(instruction: object, program: _C.Program, plan: Plan) -> None:
    raise TypeError(f"no such instruction: {instruction!r}")


@_add.register
def _(op: RowOp, program: _C.Program, plan: Plan) -> None:
    rank = len(op.shape)
    table = op.inputs[0].source if op.code in ("embedding", "embedding_part") else None
    program.add_row_op(
        plan.buffers[op.writes[0]].domain,
        ROW_CODES.index(op.code),
        (1,) * (MAX_RANK - rank) + op.shape,
        [_operand(operand) for operand in op.inputs],
        _operand(op.out),
        op.scalar,
        op.by_position,
        table.shape[0] if isinstance(table, Tensor) else 0,
    )


@_add.register
def _(step: Linear, program: _C.Program, plan: Plan) -> None:
    out_features, in_features = step.weight.shape
    dtype = step.weight.dtype
    offset = step.offset * step.weight.dtype.itemsize
    bias = 0 if step.bias is None else step.bias.data_ptr()
    sizes = (step.num_vectors, in_features, out_features)
    weight = step.weight
    add = program.add_linear
    is_transposed = not weight.is_contiguous()
    add(DTYPE_CODES[dtype], step.source, step.out, offset, sizes, weight.data_ptr(), bias, is_transposed)


@_add.register
def _(step: PackedLinear, program: _C.Program, plan: Plan) -> None:
    program.add_packed_linear(
        DTYPE_CODES[step.dtype],
        step.source,
        step.out,
        step.offset * step.dtype.itemsize,
        step.num_vectors,
        addresses_of_packed(step.weight),
        0 if step.bias is None else step.bias.data_ptr(),
    )


@_add.register
def _(step: GroupedLinear, program: _C.Program, plan: Plan) -> None:
    num_experts, out_features, in_features = step.weight.shape
    dtype = step.weight.dtype
    weight = step.weight
    program.add_grouped_linear(
        DTYPE_CODES[dtype],
        (step.source, step.experts, step.out),
        (step.offset * dtype.itemsize, step.experts_offset * torch.float32.itemsize),
        (step.num_vectors, step.choices, in_features, out_features, num_experts),
        weight.data_ptr(),
        0 if step.bias is None else step.bias.data_ptr(),
        not weight.is_contiguous(),
    )


@_add.register
def _(step: GroupedPackedLinear, program: _C.Program, plan: Plan) -> None:
    program.add_grouped_packed_linear(
        DTYPE_CODES[step.dtype],
        (step.source, step.experts, step.out),
        (step.offset * step.dtype.itemsize, step.experts_offset * torch.float32.itemsize),
        (step.num_vectors, step.choices, len(step.weight.codes)),
        addresses_of_packed(step.weight),
        0 if step.bias is None else step.bias.data_ptr(),
    )


@_add.register
def _(step: Append, program: _C.Program, plan: Plan) -> None:
    program.add_append(step.layer, _heads(step.key, plan), _heads(step.value, plan))


@_add.register
def _(step: Attend, program: _C.Program, plan: Plan) -> None:
    params = (step.scale, step.sliding_window or 0, step.softcap or 0.0, step.attention_chunk or 0)
    sinks = (0, 0) if step.sinks is None else (step.sinks.data_ptr(), DTYPE_CODES[step.sinks.dtype])
    program.add_attend(step.layer, step.num_heads, _heads(step.query, plan), step.out, params, sinks)


@_add.register
def _(step: Convolve, program: _C.Program, plan: Plan) -> None:
    bias = 0 if step.bias is None else step.bias.data_ptr()
    program.add_convolve(
        (step.state, DTYPE_CODES[step.dtype], step.source, step.out),
        step.offset * step.dtype.itemsize,
        (step.weight.data_ptr(), bias),
        (*step.weight.shape, step.activation == "silu"),
    )


@_add.register
def _(step: AttendLinearly, program: _C.Program, plan: Plan) -> None:
    heads = [(each, step.dtype) for each in (step.query, step.key, step.value)]
    heads += [(each, torch.float32) for each in (step.log_decay, step.beta or step.log_decay)]
    program.add_attend_linearly(
        (step.state, DTYPE_CODES[step.dtype], step.out),
        [_rows(*each) for each in heads],
        (step.decays_per_channel, step.beta is not None, step.delta_rule),
        step.shape,
        (step.scale, -1.0 if step.l2norm_eps is None else step.l2norm_eps),
        0 if step.skip is None else step.skip.data_ptr(),
    )


@_add.register
def _(step: Scan, program: _C.Program, plan: Plan) -> None:
    heads = ((step.x, step.dtype), (step.dt, torch.float32), (step.B, step.dtype), (step.C, step.dtype))
    program.add_scan(
        (step.state, DTYPE_CODES[step.dtype], step.out),
        [_rows(*each) for each in heads],
        (step.A.data_ptr(), 0 if step.skip is None else step.skip.data_ptr()),
        (*step.A.stride(), *step.A.shape, step.num_groups),
    )


@_add.register
def _(step: Gather, program: _C.Program, plan: Plan) -> None:
    program.add_gather(step.source, step.out)


@_add.register
def _(step: Exchange, program: _C.Program, plan: Plan) -> None:
    ranks = ranks_of(step.ranks).native
    if ranks is None:
        raise NotLowerableError("its processes share no memory through which a program could exchange numbers")
    widths = [width * step.dtype.itemsize for width in step.widths]
    program.add_exchange(ranks, DTYPE_CODES[step.dtype], step.domain, (step.source, step.out), widths)


def _heads(heads: Heads, plan: Plan) -> tuple[int, int, int]:
    return _rows(heads, plan.dtype)


def _rows(heads: Heads, dtype: torch.dtype) -> tuple[int, int, int]:
    return heads.buffer, heads.offset * dtype.itemsize, heads.stride


def _operand(operand: Operand) -> tuple[int, int, int, int, float, int, tuple[int, ...], int]:
    """Return place, dtype, buffer, address, immediate, offset, strides, length, as csrc/bind_program.cpp takes them."""
    strides = (0,) * (MAX_RANK - len(operand.strides)) + operand.strides
    code = DTYPE_CODES[operand.dtype]
    source = operand.source
    if isinstance(source, Tensor):
        return 1, code, 0, source.data_ptr(), 0.0, operand.offset, strides, operand.length
    if isinstance(source, float):
        return 2, code, 0, 0, source, 0, strides, operand.length
    return 0, code, source, 0, 0.0, operand.offset, strides, operand.length
