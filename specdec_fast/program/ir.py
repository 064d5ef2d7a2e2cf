"""The steps of a forward program: what one run of a model boils down to, row by row (see ``specdec_fast/program/``).

Sizes and strides count numbers of one row of the ragged batch; the row index is implicit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_fast.batch.ragged_batch import RaggedBatch
    from specdec_fast.batch.sampling_batch import Sampling
    from specdec_fast.kv_cache.forward_layout import Spans
    from specdec_fast.kv_cache.layer_layout import KVShape
    from specdec_fast.kv_cache.page_pool import KVPages

# In the order of RowCode in csrc/program/rowwise.h.
UNARY = (
    "copy", "neg", "abs", "square", "sqrt", "rsqrt", "reciprocal", "exp", "sin", "cos", "sigmoid", "silu", "tanh",
    "relu", "gelu", "gelu_tanh",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")  # 1 where it holds, else 0
REDUCTIONS = ("mean", "sum")
# Along the last axis, of which every operand has its own length. topk finds places, gather and scatter take them.
OVER_LINES = (*REDUCTIONS, "layer_norm", "softmax", "topk", "gather", "scatter")
ROW_CODES = (*UNARY, *BINARY, *COMPARISONS, "where", *OVER_LINES, "position", "embedding")
MAX_RANK = 4

ROWS, LOGIT_ROWS = 0, 1  # domains: the rows of the batch, or those whose logits are wanted


@dataclass(frozen=True)
class Buffer:
    """``size`` numbers per row of ``domain``."""

    domain: int
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Operand:
    """Numbers of a buffer (by its number), of a constant, or one number again and again.

    Attributes:
        source: a buffer's number, a constant, or a float.
        dtype: of the numbers.
        offset: of the first from the beginning of the row.
        strides: one per axis of the operation.
        length: of the last axis.

    """

    source: int | Tensor | float
    dtype: torch.dtype
    offset: int
    strides: tuple[int, ...]
    length: int


@dataclass(frozen=True, eq=False)
class RowOp:
    """One operation on every row: elementwise, or over the last axis.

    Attributes:
        code: one of ``ROW_CODES``.
        shape: at most ``MAX_RANK`` axes; of the last one every operand has its own length.
        inputs: of an embedding, its table.
        out: where the result goes.
        scalar: epsilon of a norm; what is added to a position; 1 if topk sorts what it finds.
        by_position: an embedding that is looked up by position, not by token id.

    """

    code: str
    shape: tuple[int, ...]
    inputs: tuple[Operand, ...]
    out: Operand
    scalar: float = 0.0
    by_position: bool = False

    @property
    def reads(self) -> list[int]:
        """Buffers."""
        return [operand.source for operand in self.inputs if isinstance(operand.source, int)]

    @property
    def writes(self) -> list[int]:
        """Buffers."""
        assert isinstance(self.out.source, int)
        return [self.out.source]


@dataclass(frozen=True)
class Heads:
    """``[heads, head_dim]`` numbers of a buffer's row, each head's side by side, ``stride`` from head to head."""

    buffer: int
    offset: int
    stride: int


@dataclass(frozen=True, eq=False)
class Linear:
    """``num_vectors`` products per row of ``in_features`` numbers with ``weight`` ``[out_features, in_features]``.

    The weights are contiguous, or the transpose of a contiguous matrix.
    """

    source: int
    offset: int
    num_vectors: int
    weight: Tensor
    bias: Tensor | None
    out: int

    @property
    def reads(self) -> list[int]:
        """Buffers."""
        return [self.source]

    @property
    def writes(self) -> list[int]:
        """Buffers."""
        return [self.out]


@dataclass(frozen=True, eq=False)
class GroupedLinear:
    """``choices`` products per row, each with the weights of another expert; see ``oracle/ops/grouped_linear.py``.

    Attributes:
        source, offset: ``num_vectors`` inputs of ``in_features`` numbers, one for all choices or one for each.
        experts, experts_offset: ``choices`` whole numbers in fp32.
        weight: ``[num_experts, out_features, in_features]``, contiguous, or its ``mT`` is.
        bias: ``[num_experts, out_features]``, or None.

    """

    source: int
    offset: int
    num_vectors: int
    experts: int
    experts_offset: int
    choices: int
    weight: Tensor
    bias: Tensor | None
    out: int

    @property
    def reads(self) -> list[int]:
        """Buffers."""
        return [self.source, self.experts]

    @property
    def writes(self) -> list[int]:
        """Buffers."""
        return [self.out]


@dataclass(frozen=True)
class Append:
    """Write keys and values of a layer into their pages."""

    layer: int
    key: Heads
    value: Heads

    @property
    def reads(self) -> list[int]:
        """Buffers."""
        return [self.key.buffer, self.value.buffer]

    @property
    def writes(self) -> list[int]:
        """Buffers: none, but pages."""
        return []


@dataclass(frozen=True, eq=False)
class Attend:
    """Attend over the pages of a layer."""

    layer: int
    num_heads: int
    query: Heads
    out: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None  # [num_heads], read where they are

    @property
    def reads(self) -> list[int]:
        """Buffers."""
        return [self.query.buffer]

    @property
    def writes(self) -> list[int]:
        """Buffers."""
        return [self.out]


@dataclass(frozen=True)
class Gather:
    """Take the rows whose logits are wanted."""

    source: int
    out: int

    @property
    def reads(self) -> list[int]:
        """Buffers."""
        return [self.source]

    @property
    def writes(self) -> list[int]:
        """Buffers."""
        return [self.out]


Instruction = RowOp | Linear | GroupedLinear | Append | Attend | Gather


class ForwardProgram(Protocol):
    """What a backend builds from a ``Plan``; see ``program/cpp_executor.py``."""

    def __call__(self, token_ids: Tensor, batch: RaggedBatch, pages: KVPages, logit_rows: Tensor | None) -> Tensor:
        """Compute one batch; return its logits."""

    @property
    def seconds(self) -> float:
        """What all forwards have taken so far."""

    def draft(
        self,
        spans: Spans,
        token_ids: list[int],
        num_draft_tokens: list[int],
        choice: tuple[int, Sampling | None],
    ) -> Tensor:
        """Compute spans, then row after row on the tokens chosen before; return them all."""

    def verify(
        self, spans: Spans, last_tokens: list[int], draft_tokens: Tensor, sampling: Sampling | None
    ) -> tuple[Tensor, list[list[int]], float]:
        """Compute every sequence's last token and draft; return logits, emissions and what choosing them took."""


@dataclass(frozen=True)
class Placed:
    """Where a buffer is while a program runs: ``place`` 0 is shared memory, 1 a thread's own, 2 the logits."""

    place: int
    domain: int
    offset: int  # bytes
    row_bytes: int


@dataclass(frozen=True)
class Plan:
    """A program ready to be built.

    Attributes:
        dtype: of weights, keys and values.
        kv_shapes: of the KV cache, by layer.
        buffers: by number.
        instructions: in the order in which they run.
        arena_bytes: of shared memory, per row of each domain.
        scratch_bytes: of a thread's own.
        vocab_size: width of the logits.
        logits_dtype: of the logits.
        baked: parameters and buffers of which the instructions keep numbers instead of reading them where they are.

    """

    dtype: torch.dtype
    kv_shapes: tuple[KVShape, ...]
    buffers: list[Placed]
    instructions: list[Instruction]
    arena_bytes: tuple[int, int]
    scratch_bytes: int
    vocab_size: int
    logits_dtype: torch.dtype
    baked: tuple[Tensor, ...] = ()
