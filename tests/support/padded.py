"""Padded batches of ids, as a tokenizer makes them."""

from __future__ import annotations

import torch


def padded(rows, pad=2, side="left"):
    """Return ``input_ids`` and ``attention_mask`` of rows of ids."""
    width = max(map(len, rows))
    left = side == "left"
    fillings = [width - len(row) for row in rows]
    ids = [[pad] * num + row if left else row + [pad] * num for num, row in zip(fillings, rows, strict=True)]
    masks = [[0] * num + [1] * (width - num) if left else [1] * (width - num) + [0] * num for num in fillings]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}
