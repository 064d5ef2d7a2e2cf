"""Oracle of ``realign_kv_``: shift every row of a dense, right-aligned KV cache by its own amount."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def realign_kv_(layers: Sequence[tuple[Tensor, Tensor]], starts: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    """Move columns ``starts[b]`` to ``starts[b] + lengths[b] - 1`` of row b by ``shifts[b]``, in place, in all layers.

    A shift may be negative (to the left), and the new place may overlap the old one. Rows with shift 0 do not change.
    Columns that a row leaves keep their old numbers.

    Args:
        layers: keys and values of each layer, each ``[B, num_kv_heads, columns, head_dim]``; all with one shape and the
            same strides; the last axis is contiguous.
        starts: ``[B]`` int32, the first column of row b.
        lengths: ``[B]`` int32, the number of columns of row b.
        shifts: ``[B]`` int32, the shift of row b.

    """
    moves = zip(starts.tolist(), lengths.tolist(), shifts.tolist(), strict=True)
    for row, (start, length, shift) in enumerate(moves):
        if shift == 0:
            continue
        for tensor in (tensor for layer in layers for tensor in layer):
            content = tensor[row, :, start : start + length].clone()
            tensor[row, :, start + shift : start + shift + length] = content
