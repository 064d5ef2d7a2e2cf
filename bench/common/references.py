"""Code that a user would write without this package, timed beside the ops that replace it.

A reference receives its arguments in its best layout (dense, padded, contiguous); making that layout is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bench.common.timing import Call
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.ops.quantized_linear import rounded_blocks
from specdec_fast.quantization.packed_weight import PackedWeight, dequantized, expert_of
from specdec_fast.trees.rows import TREE_MASK_BITS

ROW_BLOCK = 256  # rows whose scores are computed in fp64 at once


@dataclass(frozen=True)
class Reference:
    """Plain PyTorch code with the function of an op.

    Attributes:
        name: name in the results, in place of a backend.
        prepare: lays out the op's arguments and returns the call to time; None if it cannot serve them.

    """

    name: str
    prepare: Callable[..., Call | None]


def sdpa_dense(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Call | None:
    """Call torch's SDPA on a dense batch ``[B, num_kv_heads, context, head_dim]``.

    It gets a mask, or for whole prompts ``is_causal``, which is faster. Contexts and row counts must be equal, without
    window, chunks, soft cap, sinks or tree.
    """
    contexts, counts = set(batch.seqused_k.tolist()), set(batch.cu_seqlens_q.diff().tolist())
    special = (params.sliding_window, params.attention_chunk, params.softcap, params.sinks, batch.tree_mask)
    if len(contexts) != 1 or len(counts) != 1 or any(x is not None for x in special):
        return None
    context, num_rows = contexts.pop(), counts.pop()
    pages = batch.block_table[:, : -(-context // kv[0].shape[1])].long()
    key, value = (cache[pages].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for cache in kv)
    rows = query.unflatten(0, (-1, num_rows)).transpose(1, 2).contiguous()  # [B, num_heads, rows, head_dim]
    if num_rows == context:
        return lambda: scaled_dot_product_attention(
            rows, key, value, is_causal=True, scale=params.scale, enable_gqa=True
        )
    column = torch.arange(context, device=query.device)
    visible = column <= column[context - num_rows :, None]  # [rows, context]
    mask = visible.expand(len(rows), 1, -1, -1).contiguous()
    return lambda: scaled_dot_product_attention(rows, key, value, mask, scale=params.scale, enable_gqa=True)


def argmax_and_compare(
    logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor, sampling: Sampling | None = None
) -> Call | None:
    """Accept as vectorised PyTorch code does, for equal row counts; it does not notice a NaN."""
    counts = set(cu_seqlens.diff().tolist())
    if len(counts) != 1 or sampling is not None:
        return None
    fed = token_ids.view(-1, counts.pop())  # [B, K + 1]

    def accept() -> tuple[Tensor, Tensor, Tensor]:
        target_tokens = logits.argmax(dim=-1).view_as(fed)
        agrees = fed[:, 1:] == target_tokens[:, :-1]
        num_accepted = agrees.int().cumprod(dim=1).sum(dim=1)
        return target_tokens, num_accepted, target_tokens.gather(1, num_accepted[:, None])

    return accept


def sort_and_draw(
    logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor, sampling: Sampling | None = None
) -> Call | None:
    """Sample one token per row as PyTorch code usually does: filter the sorted row, then divide by exponential noise.

    All sequences must have the same parameters, without a penalty. The samples differ from the op's, so they are not
    compared.
    """
    if sampling is None or bool((sampling.repetition_penalties != 1).any()):
        return None
    columns = (sampling.temperatures, sampling.top_k, sampling.top_p, sampling.min_p)
    if any(len(set(column.tolist())) != 1 for column in columns):
        return None
    temperature, top_k, top_p, min_p = (column[0].item() for column in columns)
    if temperature == 0 or min_p:
        return None

    def draw() -> Tensor:
        scores = logits.float() / temperature
        if top_k:
            scores = scores.masked_fill(scores < scores.topk(int(top_k)).values[:, -1:], float("-inf"))
        if top_p < 1:
            falling, order = scores.sort(descending=True)
            probs = falling.softmax(dim=-1)
            falling = falling.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, float("-inf"))
            scores = scores.scatter(1, order, falling)
        probs = scores.softmax(dim=-1)
        return probs.div_(torch.empty_like(probs).exponential_()).argmax(dim=-1)

    return draw


def attention_in_float64(
    query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams
) -> Tensor:
    """Compute ``paged_attention`` by its definition in fp64; every entry of a context must be finite."""
    out = torch.empty(*query.shape[:2], kv[1].shape[3], dtype=torch.float64, device=query.device)
    starts = batch.cu_seqlens_q.tolist()
    for b, context in enumerate(batch.seqused_k.tolist()):
        pages = batch.block_table[b, : -(-context // kv[0].shape[1])].long()
        key, value = (cache[pages].flatten(0, 1)[:context].double() for cache in kv)  # [context, num_kv_heads, D]
        seen = _seen(batch, b, context, params)
        for first in range(starts[b], starts[b + 1], ROW_BLOCK):
            block = slice(first, min(first + ROW_BLOCK, starts[b + 1]))
            rows = query[block].double().unflatten(1, (key.shape[1], -1))  # [rows, num_kv_heads, group, D]
            products = torch.einsum("rhgd,chd->hgrc", rows, key) * params.scale
            if params.softcap is not None:
                products = params.softcap * torch.tanh(products / params.softcap)
            products.masked_fill_(~seen[block.start - starts[b] : block.stop - starts[b]], float("-inf"))
            if params.sinks is not None:
                column = params.sinks.double().view(*products.shape[:2], 1, 1).expand(*products.shape[:3], 1)
                products = torch.cat([products, column], dim=-1)
            heads = torch.einsum("hgrc,chd->rhgd", products.softmax(dim=-1)[..., :context], value)
            out[block] = heads.flatten(1, 2)
    return out


def _seen(batch: PagedBatch, b: int, context: int, params: AttentionParams) -> Tensor:
    """Return the mask ``[rows, context]`` of the KV entries that each row of sequence ``b`` sees."""
    first, last = batch.cu_seqlens_q[b : b + 2].tolist()
    column = torch.arange(context, device=batch.seqused_k.device)
    row = column[: last - first]
    prefix = context - len(row)
    if batch.tree_mask is None:
        own = row <= row[:, None]
    else:
        own = (batch.tree_mask[first:last, row // TREE_MASK_BITS] >> (row % TREE_MASK_BITS)) & 1 == 1
    seen = torch.cat([own.new_ones(len(row), prefix), own], dim=1)
    # Positions of a row and of the entries on its path: a row's depth, which in a chain is its index, counts.
    position = prefix + own.sum(dim=1, keepdim=True) - 1
    at = torch.cat([column[:prefix].expand(len(row), prefix), prefix + own.cumsum(dim=1) - 1], dim=1)
    if params.sliding_window is not None:
        seen &= at > position - params.sliding_window
    if params.attention_chunk is not None:
        seen &= at // params.attention_chunk == position // params.attention_chunk
    return seen


def linear_in_float64(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear`` by its definition in fp64."""
    products = rows.double() @ weight.double().T
    return products if bias is None else products + bias.double()


def quantized_linear_in_float64(rows: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Compute ``quantized_linear`` by its definition in fp64; rounded rows are what the definition rounds in fp32."""
    numbers = rows.double()
    if weight.rounds_rows:
        missing = weight.codes.shape[1] * weight.block_size - weight.in_features
        blocks = pad(rows.float(), (0, missing)).unflatten(1, (-1, weight.block_size))
        whole, steps = rounded_blocks(blocks)
        numbers = (whole.double() * steps.double()[..., None]).flatten(1)[:, : weight.in_features]
    return linear_in_float64(numbers, dequantized(weight), bias)


def grouped_linear_in_float64(rows: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``grouped_linear`` by its definition in fp64, one expert at a time, because fp64 weights are large."""
    lines = rows.double().expand(-1, expert_ids.shape[1], -1)
    out = lines.new_zeros(*expert_ids.shape, weight.shape[1])
    for expert in expert_ids.unique().tolist():
        chosen = expert_ids == expert
        out[chosen] = linear_in_float64(lines[chosen], weight[expert], None if bias is None else bias[expert])
    return out


def grouped_quantized_linear_in_float64(
    rows: Tensor, expert_ids: Tensor, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    """Compute ``grouped_quantized_linear`` by its definition in fp64, one expert at a time."""
    lines = rows.expand(-1, expert_ids.shape[1], -1)
    out = torch.zeros(*expert_ids.shape, weight.out_features, dtype=torch.float64, device=rows.device)
    for expert in expert_ids.unique().tolist():
        chosen = expert_ids == expert
        own_bias = None if bias is None else bias[expert]
        out[chosen] = quantized_linear_in_float64(lines[chosen], expert_of(weight, expert), own_bias)
    return out


REFERENCES = {
    "paged_attention": (Reference("sdpa_dense", sdpa_dense),),
    "verify_chain": (
        Reference("argmax_and_compare", argmax_and_compare),
        Reference("sort_and_draw", sort_and_draw),
    ),
}


def prepare_reference(op_name: str, args: dict[str, Any]) -> dict[str, Call]:
    """Return the references of an op that serve these arguments, by name."""
    calls = {reference.name: reference.prepare(**args) for reference in REFERENCES.get(op_name, ())}
    return {name: call for name, call in calls.items() if call is not None}
