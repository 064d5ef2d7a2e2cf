"""The instructions of a forward program: what a model's forward computes for each row (see ``specdec_fast/program/``).

Sizes and strides count numbers of one row of the ragged batch; the row index is implicit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_fast.kv_cache.layer_layout import KVShape
    from specdec_fast.quantization.packed_weight import PackedWeight

# In the order of RowCode in csrc/program/rowwise.h.
UNARY = (
    "copy", "neg", "abs", "square", "sqrt", "rsqrt", "reciprocal", "exp", "sin", "cos", "sigmoid", "silu", "tanh",
    "relu", "gelu", "gelu_tanh", "floor", "log", "log1p", "expm1",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")  # 1 where it holds, else 0
REDUCTIONS = ("mean", "sum")
# Along the last axis, of which every operand has its own length. topk and argmax return places, gather and scatter take
# them.
OVER_VECTORS = (*REDUCTIONS, "layer_norm", "softmax", "topk", "argmax", "gather", "scatter")
OF_ROW = {"token_ids": "token_id", "positions": "position"}  # operations without inputs, by the tensor of the batch
ROW_CODES = (*UNARY, *BINARY, *COMPARISONS, "where", *OVER_VECTORS, *OF_ROW.values(), "embedding", "embedding_part")
MAX_RANK = 4

# Domains: the rows of the batch, or those whose logits are wanted.
ROWS = 0
LOGIT_ROWS = 1


@dataclass(frozen=True)
class Buffer:
    """``size`` numbers per row of ``domain``."""

    domain: int
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Operand:
    """Numbers of a buffer, of a constant, or one number repeated."""

    source: int | Tensor | float  # the index of a buffer, a constant, or a float
    dtype: torch.dtype  # type of the numbers
    offset: int  # offset of the first number from the beginning of the row
    strides: tuple[int, ...]  # one stride per axis of the operation
    length: int  # length of the last axis


class BufferUse:
    """Which buffers an instruction or a launch uses, by their indices."""

    @property
    def reads(self) -> list[int]:
        """The buffers that it reads."""
        raise NotImplementedError

    @property
    def writes(self) -> list[int]:
        """The buffers that it writes."""
        raise NotImplementedError


class OneResult(BufferUse):
    """An instruction that writes one buffer."""

    out: int  # the index of the buffer

    @property
    def writes(self) -> list[int]:
        return [self.out]


@dataclass(frozen=True, eq=False)
class RowOp(BufferUse):
    """One operation on every row: elementwise, or over the last axis."""

    code: str  # one of ROW_CODES
    shape: tuple[int, ...]  # at most MAX_RANK axes; every operand has its own length of the last one
    # operands; for an embedding, its table, and the one index of the row if the model has computed it
    inputs: tuple[Operand, ...]
    out: Operand  # the operand for the result
    # epsilon of a norm; the number added to a position or token id; 1 if topk sorts its result; the first id of a table
    # that has a part of the vocabulary
    scalar: float = 0.0
    by_position: bool = False  # whether an embedding without an index is looked up by position instead of token id

    def shape_of(self, operand: Operand) -> tuple[int, ...]:
        """Return the shape of one of its operands."""
        return (*self.shape[:-1], operand.length)

    @property
    def reads(self) -> list[int]:
        return [operand.source for operand in self.inputs if isinstance(operand.source, int)]

    @property
    def writes(self) -> list[int]:
        assert isinstance(self.out.source, int)
        return [self.out.source]


@dataclass(frozen=True)
class Heads:
    """``[heads, head_dim]`` numbers in a buffer's row; those of a head are contiguous, heads are ``stride`` apart."""

    buffer: int
    offset: int
    stride: int


@dataclass(frozen=True, eq=False)
class Linear(OneResult):
    """``num_vectors`` vectors per row times ``weight [out_features, in_features]``: it or its ``mT`` is contiguous."""

    source: int
    offset: int
    num_vectors: int
    weight: Tensor
    bias: Tensor | None
    out: int

    @property
    def reads(self) -> list[int]:
        return [self.source]


@dataclass(frozen=True, eq=False)
class PackedLinear(OneResult):
    """``num_vectors`` vectors per row times a packed weight; see ``ops/quantized_linear.py``."""

    source: int
    offset: int
    num_vectors: int
    dtype: torch.dtype  # of vectors, bias and result
    weight: PackedWeight
    bias: Tensor | None
    out: int

    @property
    def reads(self) -> list[int]:
        return [self.source]


@dataclass(frozen=True, eq=False)
class GroupedLinear(OneResult):
    """``choices`` products per row, each with the weights of another expert; see ``ops/grouped_linear.py``."""

    # source, offset: buffer and offset of ``num_vectors`` inputs of ``in_features`` numbers: one for all choices, or
    # one for each
    source: int
    offset: int
    num_vectors: int
    experts: int  # experts, experts_offset: buffer and offset of ``choices`` expert ids, whole numbers in fp32
    experts_offset: int
    choices: int
    weight: Tensor  # ``[num_experts, out_features, in_features]``; it or its ``mT`` is contiguous
    bias: Tensor | None  # ``[num_experts, out_features]``, or None
    out: int

    @property
    def reads(self) -> list[int]:
        return [self.source, self.experts]


@dataclass(frozen=True, eq=False)
class GroupedPackedLinear(OneResult):
    """``GroupedLinear`` with a packed weight; see ``ops/grouped_quantized_linear.py``."""

    source: int
    offset: int
    num_vectors: int
    experts: int
    experts_offset: int
    choices: int
    dtype: torch.dtype  # of vectors, bias and result
    weight: PackedWeight  # of all experts
    bias: Tensor | None
    out: int

    @property
    def reads(self) -> list[int]:
        return [self.source, self.experts]


@dataclass(frozen=True)
class Append(BufferUse):
    """Write a layer's keys and values into pages."""

    layer: int
    key: Heads
    value: Heads

    @property
    def reads(self) -> list[int]:
        return [self.key.buffer, self.value.buffer]

    @property
    def writes(self) -> list[int]:
        return []  # it writes pages


@dataclass(frozen=True, eq=False)
class Attend(OneResult):
    """Attend over the pages of a layer."""

    layer: int
    num_heads: int
    query: Heads
    out: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None  # [num_heads], read in place
    attention_chunk: int | None = None

    @property
    def reads(self) -> list[int]:
        return [self.query.buffer]


@dataclass(frozen=True)
class Gather(OneResult):
    """Take the rows whose logits are wanted."""

    source: int
    out: int

    @property
    def reads(self) -> list[int]:
        return [self.source]


@dataclass(frozen=True)
class Exchange(OneResult):
    """Sum a buffer over the ranks of a sharded model, or concatenate their rows; see ``ranks/operations.py``."""

    ranks: int  # the number of the ranks
    dtype: torch.dtype
    domain: int  # of both buffers
    source: int
    out: int
    widths: tuple[int, ...]  # numbers per row of every rank; (): a sum

    @property
    def reads(self) -> list[int]:
        return [self.source]


@dataclass(frozen=True, eq=False)
class Convolve(OneResult):
    """Convolve the channels of a row over a sequence's last inputs; see ``ops/conv_rows.py``."""

    state: int  # number of the recurrent call in a forward, and so of its state
    dtype: torch.dtype  # of rows, weight and result
    source: int  # buffer of ``channels`` numbers per row
    offset: int
    weight: Tensor  # [channels, kernel], contiguous
    bias: Tensor | None  # [channels], contiguous
    activation: str | None
    out: int

    @property
    def reads(self) -> list[int]:
        return [self.source]


@dataclass(frozen=True, eq=False)
class AttendLinearly(OneResult):
    """Advance and read a state by linear attention; see ``ops/linear_attention_rows.py``."""

    state: int  # number of the recurrent call in a forward, and so of its state
    dtype: torch.dtype  # of queries, keys, values and result
    query: Heads
    key: Heads
    value: Heads
    log_decay: Heads  # fp32
    beta: Heads | None  # fp32
    # key heads, value heads, key_dim, value_dim
    shape: tuple[int, int, int, int]
    decays_per_channel: bool  # whether there is a decay for every key channel; else one per head
    scale: float
    delta_rule: bool
    l2norm_eps: float | None
    skip: Tensor | None  # [value_heads] fp32
    out: int

    @property
    def reads(self) -> list[int]:
        heads = (self.query, self.key, self.value, self.log_decay, self.beta)
        return [each.buffer for each in heads if each is not None]


@dataclass(frozen=True, eq=False)
class Scan(OneResult):
    """Advance and read a state by a selective scan; see ``ops/selective_scan_rows.py``."""

    state: int  # number of the recurrent call in a forward, and so of its state
    dtype: torch.dtype  # of x, B, C and result
    x: Heads  # of one head, as dt
    dt: Heads  # fp32
    B: Heads  # num_groups heads of state_dim numbers, as C
    C: Heads
    num_groups: int
    A: Tensor  # [channels, state_dim] fp32
    skip: Tensor | None  # [channels] fp32
    out: int

    @property
    def reads(self) -> list[int]:
        return [each.buffer for each in (self.x, self.dt, self.B, self.C)]


Recurrent = Convolve | AttendLinearly | Scan
Instruction = (
    RowOp
    | Linear
    | PackedLinear
    | GroupedLinear
    | GroupedPackedLinear
    | Append
    | Attend
    | Gather
    | Exchange
    | Recurrent
)

# Places of buffers: shared memory, a thread's own, and what a forward returns, writes into or receives.
ARENA, SCRATCH, LOGITS, TAPS, INPUTS = range(5)


@dataclass(frozen=True)
class Placed:
    """The memory of a buffer while a program runs.

    ``place`` is ``ARENA``, ``SCRATCH``, ``LOGITS``, ``TAPS`` (the hidden states) or ``INPUTS``. A buffer begins
    ``offset`` bytes into a row, and ``row_bytes`` are from one row to the next.
    """

    place: int
    domain: int
    offset: int  # bytes
    row_bytes: int


@dataclass(frozen=True)
class Plan:
    """A program ready to be built."""

    dtype: torch.dtype  # dtype of weights, keys and values
    kv_shapes: tuple[KVShape, ...]  # shapes of the KV cache, by layer
    buffers: list[Placed]  # memory of every buffer, by its index
    instructions: list[Instruction]  # the instructions in the order in which they run
    arena_bytes: tuple[int, int]  # bytes of shared memory per row of each domain
    scratch_bytes: int  # bytes of a thread's own memory
    vocab_size: int  # number of logits per row
    logits_dtype: torch.dtype  # dtype of the logits
    # parameters and buffers of the model of which the instructions keep numbers instead of reading them
    baked: tuple[Tensor, ...] = ()
    tap_bytes: int = 0  # bytes of the hidden states of a row; 0 without taps
    input_bytes: int = 0  # bytes that a row takes besides its token; 0 if it takes nothing
