"""How a program launches recurrent ops: on views of its buffers, and on the states of the pool of each forward."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specdec_fast.batch.recurrent_batch import LinearAttentionParams, RecurrentBatch
from specdec_fast.ops import Ops
from specdec_fast.program.plan.ir import AttendLinearly, Convolve, Heads, Recurrent, Scan
from specdec_fast.program.triton.device_forward import DeviceForward

_Step = Callable[[DeviceForward], None]


def recurrent_step(step: Recurrent, ops: Ops) -> _Step:
    """Return a function that computes a recurrent instruction by one of ``ops``."""
    if isinstance(step, Convolve):
        return _convolve(step, ops)
    return _attend_linearly(step, ops) if isinstance(step, AttendLinearly) else _scan(step, ops)


def _convolve(step: Convolve, ops: Ops) -> _Step:
    source = Heads(step.source, step.offset, stride=1)

    def launch(forward: DeviceForward) -> None:
        rows = _view(forward, source, step.weight.shape[:1])
        state, batch = _state(forward, step)
        forward.memory[step.out] = ops.conv_rows_(rows, state[0], step.weight, step.bias, step.activation, batch)

    return launch


def _attend_linearly(step: AttendLinearly, ops: Ops) -> _Step:
    params = LinearAttentionParams(step.scale, step.delta_rule, step.l2norm_eps, step.skip)
    key_heads, value_heads, key_dim, value_dim = step.shape
    decays = (value_heads, key_dim) if step.decays_per_channel else (value_heads,)

    def launch(forward: DeviceForward) -> None:
        query, key = (_view(forward, heads, (key_heads, key_dim)) for heads in (step.query, step.key))
        value = _view(forward, step.value, (value_heads, value_dim))
        log_decay = _view(forward, step.log_decay, decays)
        beta = None if step.beta is None else _view(forward, step.beta, (value_heads,))
        pools, batch = _state(forward, step)
        result = ops.linear_attention_rows_(query, key, value, log_decay, beta, pools, batch, params)
        forward.memory[step.out] = result.flatten(1)

    return launch


def _scan(step: Scan, ops: Ops) -> _Step:
    channels, state_dim = step.A.shape

    def launch(forward: DeviceForward) -> None:
        x, dt = (_view(forward, rows, (channels,)) for rows in (step.x, step.dt))
        keys, queries = (_view(forward, heads, (step.num_groups, state_dim)) for heads in (step.B, step.C))
        pools, batch = _state(forward, step)
        forward.memory[step.out] = ops.selective_scan_rows_(x, dt, step.A, keys, queries, step.skip, pools, batch)

    return launch


def _view(forward: DeviceForward, heads: Heads, shape: tuple[int, ...]) -> Tensor:
    """Return ``[T, *shape]`` numbers of a buffer; those along the last of two axes are contiguous."""
    rows = forward.memory[heads.buffer]
    strides = (heads.stride, 1)[: len(shape)]
    return rows.as_strided((len(rows), *shape), (rows.stride(0), *strides), rows.storage_offset() + heads.offset)


def _state(forward: DeviceForward, step: Recurrent) -> tuple[tuple[Tensor, ...], RecurrentBatch]:
    """Return the tensors of a call's states, and the rows of the forward."""
    states = forward.pool.states
    batch = forward.batch.recurrent
    assert states is not None, "the pool has no states of recurrent layers"
    assert batch is not None, "the batch has no rows for recurrent layers"
    return states.tensors[step.state], batch
