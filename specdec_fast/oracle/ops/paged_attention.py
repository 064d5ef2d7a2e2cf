"""Oracle of ``paged_attention``: causal attention of ragged query rows over a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def paged_attention(
    query: Tensor,
    kv: tuple[Tensor, Tensor],
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from every query row to its own sequence's KV entries up to and including itself.

    The rows of sequence b are its *last* ones: row j of n stands at position ``seqused_k[b] - n + j``.

    Args:
        query: ``[T, num_heads, head_dim]``; ``num_heads`` is a multiple of ``num_kv_heads``.
        kv: key and value cache, each ``[num_pages, page_size, num_kv_heads, head_dim]``.
        block_table: ``[B, max_pages]`` int32, the pages of each sequence in order of position.
        cu_seqlens_q: ``[B + 1]`` int32, where each sequence's rows begin in ``query``.
        seqused_k: ``[B]`` int32, KV entries of each sequence, the new rows included.
        scale: factor on the scores, ``head_dim ** -0.5`` for most models.
        sliding_window: a row sees the last so many positions, itself included; None sees all.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma-2, arXiv 2408.00118, section 2).

    Returns:
        ``[T, num_heads, head_dim]`` in the dtype of ``query``.

    """
    out = torch.empty_like(query)
    page_size = kv[0].shape[1]
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    for b, context in enumerate(lengths):
        pages = block_table[b, : -(-context // page_size)].long()
        key, value = (cache[pages].flatten(0, 1)[:context].transpose(0, 1) for cache in kv)  # [H_kv, context, D]
        for rows in _row_blocks(slice(starts[b], starts[b + 1]), key, value):
            seen = context - (starts[b + 1] - rows.stop)  # positions that the block's last row sees
            mask = _visible(rows.stop - rows.start, seen, sliding_window, query.device)
            block = (query[rows].transpose(0, 1)[None], key[None, :, :seen], value[None, :, :seen])
            if softcap is None:
                heads = scaled_dot_product_attention(*block, attn_mask=mask, scale=scale, enable_gqa=True)
            else:
                heads = _softcapped_attention(*block, mask, scale, softcap)
            out[rows] = heads[0].transpose(0, 1)  # [H, rows, D] -> [rows, H, D]
    return out


def _row_blocks(rows: slice, key: Tensor, value: Tensor) -> list[slice]:
    """Return the rows in one block; one by one if an entry they bring is not finite.

    A mask hides an entry by a weight of 0, and 0 times NaN is NaN: a draft token with a broken entry would spoil the
    rows before it, which do not see it.
    """
    num_rows = rows.stop - rows.start
    if num_rows == 1 or all(bool(x[:, -num_rows:].isfinite().all()) for x in (key, value)):
        return [rows] if num_rows else []
    return [slice(row, row + 1) for row in range(rows.start, rows.stop)]


def _visible(num_rows: int, context: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Return the ``[num_rows, context]`` mask of what each row sees; None when it sees everything."""
    if num_rows == 1 and (sliding_window is None or context <= sliding_window):
        return None
    row = torch.arange(context - num_rows, context, device=device)[:, None]
    column = torch.arange(context, device=device)[None, :]
    visible = column <= row
    if sliding_window is not None:
        visible &= column > row - sliding_window
    return visible


def _softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Do as ``scaled_dot_product_attention`` does, in fp32, with the scores capped before the mask."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    scores = softcap * torch.tanh(query.float() @ key.transpose(-1, -2) * scale / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(dim=-1) @ value).to(query.dtype)
