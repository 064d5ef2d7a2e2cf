"""Recurrent ops on the tape: the places of their rows, and what else their instructions need."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.batch.recurrent_batch import LinearAttentionParams
from specdec_fast.program.plan.ir import ROWS, AttendLinearly, Convolve, Heads, Scan
from specdec_fast.program.record.operands import kept
from specdec_fast.program.record.row_views import NotLowerableError
from specdec_fast.program.record.tape import Tape


def convolve(
    tape: Tape,
    call: int,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    result: Tensor,
) -> None:
    """Record ``conv_rows_`` of ``[T, channels]`` with the state of a forward's recurrent call ``call``."""
    source = _heads(tape, rows, rows.dtype)
    out = tape.fresh_like(result, 0, ROWS)
    step = Convolve(
        state=call,
        dtype=rows.dtype,
        source=source.buffer,
        offset=source.offset,
        weight=_constant(tape, weight),
        bias=None if bias is None else _constant(tape, bias),
        activation=activation,
        out=out.buffer,
    )
    tape.instructions.append(step)
    tape.bind(result, out)


def attend_linearly(  # noqa: PLR0913, PLR0917  # the arguments of the op
    tape: Tape,
    call: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    params: LinearAttentionParams,
    result: Tensor,
) -> None:
    """Record ``linear_attention_rows_`` with the state of a forward's recurrent call ``call``."""
    num_key_heads, key_dim = key.shape[1:]
    num_value_heads, value_dim = value.shape[1:]
    query_heads, key_heads, value_heads = (_heads(tape, each, value.dtype) for each in (query, key, value))
    decays = _heads(tape, log_decay, torch.float32)
    betas = None if beta is None else _heads(tape, beta, torch.float32)
    out = tape.fresh_like(result, 0, ROWS)
    step = AttendLinearly(
        state=call,
        dtype=value.dtype,
        query=query_heads,
        key=key_heads,
        value=value_heads,
        log_decay=decays,
        beta=betas,
        shape=(num_key_heads, num_value_heads, key_dim, value_dim),
        decays_per_channel=log_decay.dim() == 3,
        scale=params.scale,
        delta_rule=params.delta_rule,
        l2norm_eps=params.l2norm_eps,
        skip=None if params.skip is None else _constant(tape, params.skip),
        out=out.buffer,
    )
    tape.instructions.append(step)
    tape.bind(result, out)


def scan(  # noqa: PLR0913, PLR0917  # the arguments of the op
    tape: Tape,
    call: int,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    result: Tensor,
) -> None:
    """Record ``selective_scan_rows_`` with the state of a forward's recurrent call ``call``."""
    if tape.value(A) is not None:
        raise NotLowerableError("a state matrix A that is computed from the batch")
    x_heads = _heads(tape, x, x.dtype)
    dt_heads = _heads(tape, dt, torch.float32)
    B_heads, C_heads = (_heads(tape, each, x.dtype) for each in (B, C))
    out = tape.fresh_like(result, 0, ROWS)
    step = Scan(
        state=call,
        dtype=x.dtype,
        x=x_heads,
        dt=dt_heads,
        B=B_heads,
        C=C_heads,
        num_groups=B.shape[1],
        A=kept(A),
        skip=None if skip is None else _constant(tape, skip),
        out=out.buffer,
    )
    tape.instructions.append(step)
    tape.bind(result, out)


def _heads(tape: Tape, tensor: Tensor, dtype: torch.dtype) -> Heads:
    """Return the place of ``[T, heads, size]``, of ``[T, heads]`` numbers, or of ``[T, channels]``."""
    if tape.value(tensor) is None:  # a number per head that does not depend on the row
        view = tape.fresh(ROWS, 0, (1, *tensor.shape[1:]), tensor.dtype)
        tape.row_op("copy", [tensor], view)
    else:
        view = tape.row_view(tensor)
    if view.domain != ROWS or view.axis != 0 or view.dtype != dtype:
        raise NotLowerableError(f"rows of a recurrent layer are not [T, ...] in {dtype}")
    last = len(view.sizes) - 1
    if view.strides[last] != 1 and view.sizes[last] != 1:
        view = tape.copied(view)
    return Heads(view.buffer, view.offset, view.strides[1] if view.sizes[1] != 1 else 0)


def _constant(tape: Tape, tensor: Tensor) -> Tensor:
    if tape.value(tensor) is not None or not tensor.is_contiguous():
        raise NotLowerableError("weights of a recurrent layer that are computed from the batch, or not contiguous")
    return kept(tensor)
