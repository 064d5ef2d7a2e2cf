"""The op ``paged_attention``: causal attention of ragged query rows over a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.ops.checks import FLOATS, expect, expect_maximum, expect_offsets, expect_tensor
from specdec_fast.ops.registry import Op
from specdec_fast.trees.rows import TREE_MASK_BITS


def paged_attention(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Attend from every query row to the KV entries of its own sequence, up to and including its own entry.

    With a tree mask, a row sees all entries before its sequence's rows, and among those rows its ancestors and itself.
    Its position is then the number of entries before the rows plus its depth. It attends as if the entry at each
    position were that of its own ancestor there: so a row of a tree has the bits of that row alone, behind its path as
    a chain. A sliding window and chunks count positions.

    Args:
        query: ``[T, num_heads, head_dim]``; ``num_heads`` is a multiple of ``num_kv_heads``.
        kv: key cache ``[num_pages, page_size, num_kv_heads, head_dim]`` and value cache ``[num_pages, page_size,
            num_kv_heads, value_head_dim]``.

    Returns:
        ``[T, num_heads, value_head_dim]`` in the dtype of ``query``. An entry that is not finite makes the rows that
        see it NaN, and no others.
    """
    out = query.new_empty(*query.shape[:2], kv[1].shape[3])
    page_size = kv[0].shape[1]
    starts = batch.cu_seqlens_q.tolist()
    lengths = batch.seqused_k.tolist()
    for b, context in enumerate(lengths):
        first = starts[b]
        stop = starts[b + 1]
        pages = batch.block_table[b, : -(-context // page_size)].long()
        key, value = (cache[pages].flatten(0, 1) for cache in kv)  # [places, H_kv, D]
        if batch.tree_mask is None:
            out[first:stop] = _attend_rows(query[first:stop], key[:context], value[:context], params)
            continue
        prefix = torch.arange(context - (stop - first), device=query.device)
        for row, path in enumerate(_paths(batch.tree_mask[first:stop]), start=first):
            places = torch.cat([prefix, len(prefix) + path])  # in order of position
            out[row : row + 1] = _attend_rows(query[row : row + 1], key[places], value[places], params)
    return out


def _paths(tree_mask: Tensor) -> list[Tensor]:
    """Return the rows on the path to each row of one sequence, its own row last, as indices among these rows."""
    row = torch.arange(len(tree_mask), device=tree_mask.device)
    is_above = (tree_mask[:, row // TREE_MASK_BITS] >> (row % TREE_MASK_BITS)) & 1  # [rows, rows]
    return [each.nonzero()[:, 0] for each in is_above]


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    """Attend from the last rows of one sequence: ``[rows, num_heads, value_head_dim]``.

    ``query`` is ``[rows, num_heads, head_dim]``. Keys and values are ``[context, num_kv_heads, their head_dim]``, in
    order of position; the last entries are those of the rows.
    """
    if not len(query):
        return query.new_empty(0, query.shape[1], value.shape[2])
    visible = _visible(len(query), len(key), params, query.device)
    # Copied because a library may add in another order at another alignment.
    rows = query.transpose(0, 1).clone()
    return _attend_finite(rows, key.transpose(0, 1), value.transpose(0, 1), visible, params).transpose(0, 1)


def _attend_finite(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, params: AttentionParams) -> Tensor:
    """Attend over finite entries: ``[num_heads, rows, value_head_dim]``, NaN in rows that see other entries.

    A weight of 0 would spread a NaN to rows that do not see it, and ``scaled_dot_product_attention`` treats a row whose
    scores are all NaN like a row that sees nothing.
    """
    group = query.shape[0] // key.shape[0]
    is_broken = tuple(~x.isfinite() for x in (query, key, value))
    query, key, value = (
        x.masked_fill(broken, 0) if bool(broken.any()) else x
        for x, broken in zip((query, key, value), is_broken, strict=True)
    )
    seen = visible.any(dim=0)  # entries that no row sees are left out
    mask = None if query.shape[1] == 1 else visible[:, seen]
    out = _attend(query[None], key[None, :, seen], value[None, :, seen], mask, params)[0]
    for broken in (
        is_broken[1].any(-1, keepdim=True),
        is_broken[2],
    ):  # a broken key affects the score, a broken value only its own sum
        if bool(broken.any()):
            spoiled = visible.float() @ broken.float() > 0  # [H_kv, rows, 1 or D]
            out = out.masked_fill(spoiled.repeat_interleave(group, dim=0), float("nan"))
    return out.masked_fill(is_broken[0].any(-1, keepdim=True), float("nan"))


def _visible(num_rows: int, context: int, params: AttentionParams, device: torch.device) -> Tensor:
    """Return the mask ``[num_rows, context]`` of the entries that each row sees."""
    column = torch.arange(context, device=device)[None, :]
    position = torch.arange(context - num_rows, context, device=device)[:, None]
    visible = column <= position
    if params.sliding_window is not None:
        visible &= column > position - params.sliding_window
    if params.attention_chunk is not None:
        visible &= column >= position // params.attention_chunk * params.attention_chunk
    return visible


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """Attend over entries that at least one of the rows sees: ``[1, num_heads, rows, value_head_dim]``."""
    if params.softcap is None and params.sinks is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=params.scale, enable_gqa=True)
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    products = query.float() @ key.transpose(-1, -2) * params.scale
    if params.softcap is not None:
        products = params.softcap * torch.tanh(products / params.softcap)
    if mask is not None:
        products = products.masked_fill(~mask, float("-inf"))
    if params.sinks is not None:  # one more column, whose weight has no value
        column = params.sinks.float()[:, None, None].expand(*products.shape[:3], 1)
        products = torch.cat([products, column], dim=-1)
    return (products.softmax(dim=-1)[..., : key.shape[2]] @ value).to(query.dtype)


def _check(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> None:
    device = query.device
    dtype = (query.dtype,)
    key_cache, value_cache = kv
    expect_tensor("query", query, (None,) * 3, FLOATS, device)
    expect_tensor("key cache", key_cache, (None, None, None, query.shape[2]), dtype, device)
    expect_tensor("value cache", value_cache, (*key_cache.shape[:3], None), dtype, device)
    heads = query.shape[1]
    kv_heads = key_cache.shape[2]
    expect(heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} KV heads.")
    _check_batch(batch, query.shape[0], device)
    expect(all(x.is_contiguous() for x in kv), "the caches must be contiguous.")
    window = params.sliding_window
    chunk = params.attention_chunk
    softcap = params.softcap
    expect(window is None or window > 0, f"sliding_window={window}; expected None or > 0.")
    expect(chunk is None or chunk > 0, f"attention_chunk={chunk}; expected None or > 0.")
    expect(window is None or chunk is None, f"sliding_window={window} and attention_chunk={chunk}; expected one.")
    expect(softcap is None or softcap > 0, f"softcap={softcap}; expected None or > 0.")
    if params.sinks is not None:
        expect_tensor("sinks", params.sinks, (heads,), (query.dtype, torch.float32), device)
        expect(params.sinks.is_contiguous(), "sinks must be contiguous.")


def _check_batch(batch: PagedBatch, num_rows: int, device: torch.device) -> None:
    batch_size = batch.seqused_k.shape[0]
    expect_tensor("block_table", batch.block_table, (batch_size, None), (torch.int32,), device)
    expect_tensor("cu_seqlens_q", batch.cu_seqlens_q, (batch_size + 1,), (torch.int32,), device)
    expect_tensor("seqused_k", batch.seqused_k, (batch_size,), (torch.int32,), device)
    tensors = [batch.block_table, batch.cu_seqlens_q, batch.seqused_k]
    if batch.tree_mask is not None:
        num_words = -(-batch.max_seqlen_q // TREE_MASK_BITS)
        expect_tensor("tree_mask", batch.tree_mask, (num_rows, None), (torch.int32,), device)
        expect(batch.tree_mask.shape[1] >= num_words, f"tree_mask has no bits for {batch.max_seqlen_q} rows.")
        tensors.append(batch.tree_mask)
    expect(
        all(x.is_contiguous() for x in tensors),
        "block_table, cu_seqlens_q, seqused_k and tree_mask must be contiguous.",
    )
    expect_offsets("cu_seqlens_q", batch.cu_seqlens_q, num_rows, strictly=False)
    expect_maximum("max_seqlen_q", batch.max_seqlen_q, batch.cu_seqlens_q.diff())
    expect_maximum("max_seqlen_k", batch.max_seqlen_k, batch.seqused_k)


OP = Op(
    name="paged_attention",
    implementations={
        "torch": "specdec_fast.ops.paged_attention:paged_attention",
        "cpp": "specdec_fast.ops.cpp:paged_attention",
        "triton": "specdec_fast.triton_kernels.paged_attention:paged_attention",
        "flash": "specdec_fast.ops.flash:paged_attention",
    },
    check=_check,
    exact=False,
    invariant=frozenset({"cpp", "triton"}),
    trees=frozenset({"cpp", "torch", "triton"}),
)
