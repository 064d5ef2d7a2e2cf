"""Oracle of ``paged_attention``: causal attention of ragged query rows over a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec_fast.batch.ragged_batch import TREE_MASK_BITS, AttentionParams, PagedBatch


def paged_attention(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Attend from every query row to the KV entries of its own sequence, up to and including its own entry.

    With a tree mask, a row sees all entries before its sequence's rows, and among those rows its ancestors and itself.
    Its position is then the number of entries before the rows plus its depth. A sliding window counts from that
    position, and must contain the whole tree.

    Args:
        query: ``[T, num_heads, head_dim]``; ``num_heads`` is a multiple of ``num_kv_heads``.
        kv: key cache ``[num_pages, page_size, num_kv_heads, head_dim]`` and value cache
            ``[num_pages, page_size, num_kv_heads, value_head_dim]``.
        batch: the rows and the pages of each sequence.
        params: scale, sliding window, soft cap and sinks.

    Returns:
        ``[T, num_heads, value_head_dim]`` in the dtype of ``query``. An entry that is not finite makes the rows that
        see it NaN, and no others.

    """
    out = query.new_empty(*query.shape[:2], kv[1].shape[3])
    page_size = kv[0].shape[1]
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.seqused_k.tolist()
    for b, context in enumerate(lengths):
        num_rows = starts[b + 1] - starts[b]
        pages = batch.block_table[b, : -(-context // page_size)].long()
        key, value = (cache[pages].flatten(0, 1)[:context].transpose(0, 1) for cache in kv)  # [H_kv, context, D]
        tree = None if batch.tree_mask is None else batch.tree_mask[starts[b] : starts[b + 1]]
        visible = _visible(num_rows, context, params.sliding_window, tree, query.device)
        if num_rows:
            # [H, rows, D], copied because a library may add in another order at another alignment.
            rows = query[starts[b] : starts[b + 1]].transpose(0, 1).clone()
            out[starts[b] : starts[b + 1]] = _attend_finite(rows, key, value, visible, params).transpose(0, 1)
    return out


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


def _visible(
    num_rows: int, context: int, sliding_window: int | None, tree_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Return the mask ``[num_rows, context]`` of the entries that each row sees."""
    prefix = context - num_rows
    column = torch.arange(context, device=device)[None, :]
    position = torch.arange(prefix, context, device=device)[:, None]
    visible = column <= position
    if tree_mask is not None:
        row = torch.arange(num_rows, device=device)
        ancestors = (tree_mask[:, row // TREE_MASK_BITS] >> (row % TREE_MASK_BITS)) & 1  # [num_rows, num_rows]
        visible[:, prefix:] = ancestors.bool()
        position = prefix + ancestors.sum(dim=1, keepdim=True) - 1
    if sliding_window is not None:
        behind = column <= position - sliding_window
        visible &= ~behind
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
