"""What kernels have to know of one forward: which rows belong to whom, where their pages are, how each one draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TREE_MASK_BITS = 32  # rows per word of a tree mask


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """The query rows of one forward and the KV pages they attend over; ``B`` sequences, ``T`` rows.

    The rows of a sequence are its *last* ones: row j of n stands in KV entry ``seqused_k[b] - n + j``.

    Attributes:
        cu_seqlens_q: ``[B + 1]`` int32, where each sequence's rows begin.
        seqused_k: ``[B]`` int32, KV entries of each sequence, the rows of this forward included.
        block_table: ``[B, max_pages]`` int32, pages in order of position; unused places hold the scratch page.
        max_seqlen_q: rows of the sequence that has most; a launch must know it without waiting for the device.
        max_seqlen_k: KV entries of the sequence that has most.
        tree_mask: ``[T, num_words]`` int32, or None for a chain. Bit ``i % 32`` of word ``i // 32`` of a row says
            whether it descends from row i of its own sequence. A row always has its own bit and none after it:
            parents stand before their children.

    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    block_table: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    tree_mask: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """How one layer makes weights of queries and keys.

    Attributes:
        scale: factor on the products, ``head_dim ** -0.5`` for most models.
        sliding_window: a row sees the last so many positions, itself included; None sees all.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma-2, arXiv 2408.00118, section 2).
        sinks: ``[num_heads]``, in fp32 or the dtype of the queries: one more score per head, neither scaled nor capped,
            which counts in the softmax's denominator and weighs no value (gpt-oss, arXiv 2508.10925, section 2.1).

    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each of ``B`` sequences chooses its tokens; see ``oracle/ops/verify_chain.py`` for the rule.

    Attributes:
        temperatures: ``[B]`` float64; 0 is greedy, and the filters then have no effect.
        top_k: ``[B]`` int32; 0 keeps all tokens.
        top_p: ``[B]`` float64 in (0, 1]; 1 keeps all.
        min_p: ``[B]`` float64 in [0, 1]; 0 keeps all.
        repetition_penalties: ``[B]`` float64; 1 leaves the logits as they are.
        seeds: ``[B]`` int64, the key of each sequence's noise.
        positions: ``[B]`` int64, the position in its own sequence of the token that a sequence's first row chooses;
            its row j chooses the one at ``positions[b] + j``.
        seen_ids: ``[N]`` int64, committed tokens of the sequences that have a repetition penalty, one sequence after
            the other; a sequence without one needs none.
        cu_seen: ``[B + 1]`` int32, where each sequence's ``seen_ids`` begin.

    """

    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalties: Tensor
    seeds: Tensor
    positions: Tensor
    seen_ids: Tensor
    cu_seen: Tensor
