"""The KV entries of one position, layer by layer, and the memory for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LayerKV = tuple[Tensor, Tensor]  # keys and values, each [num_pages, page_size, num_kv_heads, its head size]


class KVShape(NamedTuple):
    """The KV entry of one layer at one position: ``num_kv_heads`` keys and as many values, which may differ in size."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class KVLayout:
    """The KV entries of one model at one position."""

    shapes: tuple[KVShape, ...]  # shape of each layer that attends, by layer index
    # by layer index, the layer whose entries it attends over: itself, or an earlier layer of the same shape in a model
    # whose layers share keys and values (Gemma-3n, Gemma-4)
    sources: tuple[int, ...]
    dtype: torch.dtype  # dtype of keys and values
    device: torch.device  # device of keys and values

    @classmethod
    def uniform(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVLayout:
        """Return the layout of most models: every layer has its own entries, all of one shape."""
        shape = KVShape(num_kv_heads, head_dim, head_dim)
        return cls((shape,) * num_layers, tuple(range(num_layers)), dtype, device)

    @property
    def num_layers(self) -> int:
        """The number of layers that attend."""
        return len(self.shapes)

    @property
    def groups(self) -> dict[KVShape, list[int]]:
        """Indices of the layers that have their own entries, by shape."""
        by_shape: dict[KVShape, list[int]] = {}
        for layer, (shape, source) in enumerate(zip(self.shapes, self.sources, strict=True)):
            if source == layer:
                by_shape.setdefault(shape, []).append(layer)
        return by_shape

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV of one position over all layers."""
        numbers = sum(
            len(layers) * shape.num_kv_heads * (shape.key_head_dim + shape.value_head_dim)
            for shape, layers in self.groups.items()
        )
        return numbers * self.dtype.itemsize

    def allocate(self, num_pages: int, page_size: int) -> tuple[tuple[Tensor, ...], list[LayerKV]]:
        """Return zeros for ``num_pages`` pages, and every layer's keys and values, which are views of them.

        The allocations are each ``[layers, planes, num_pages, page_size, num_kv_heads, head size]``: one per shape,
        with two planes (keys and values); two of one plane each if keys and values differ in size.
        """
        tensors: list[Tensor] = []
        layers: dict[int, LayerKV] = {}
        for (num_heads, *head_dims), members in self.groups.items():
            planes = 2 if head_dims[0] == head_dims[1] else 1
            sizes = [
                (len(members), planes, num_pages, page_size, num_heads, head_dim)
                for head_dim in head_dims[: 3 - planes]
            ]
            allocated = [torch.zeros(size, dtype=self.dtype, device=self.device) for size in sizes]
            tensors += allocated
            keys = allocated[0][:, 0]
            values = allocated[-1][:, -1]
            layers |= zip(members, zip(keys, values, strict=True), strict=True)
        return tuple(tensors), [layers[source] for source in self.sources]
