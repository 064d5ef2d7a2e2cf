"""The KV entries of one position, layer by layer, and the memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec_fast.kv_cache.state_pool import StateShape, bytes_per_slot

MOST_DRAFT_TOKENS = 16  # for which recurrent states have room, if nobody says how many there are
LayerKV = tuple[Tensor, Tensor]  # keys and values, each [num_pages, page_size, num_kv_heads, its head size]


class KVShape(NamedTuple):
    """The KV entry of one layer at one position: ``num_kv_heads`` keys and as many values, which may differ in size."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int


class PoolCopies(Protocol):
    """Pools of the other ranks of a sharded model, with their own heads of the same positions (``runner/leader.py``).

    A pool calls these methods when it allocates or changes its memory outside of a forward.
    """

    def allocate(self, pool: Any) -> None:
        """Allocate as many pages as a new pool has. Raises RuntimeError if another rank has no memory for them."""

    def copy(self, source: Any, destination: Any) -> None:
        """Copy all pages of a pool into the first pages of a larger one."""

    def compact(self, pool: Any, table: Tensor, moves: Sequence[Tensor]) -> None:
        """Move entries of a pool: the arguments of ``compact_kv_``."""


@dataclass(frozen=True)
class KVLayout:
    """The KV entries of one model at one position, and the states that its recurrent layers keep of a sequence.

    Layers are counted among those that attend: in a hybrid model, ``layer_ids`` has the model's own numbers of them.
    Behind them come the indexers of sparse attention, each with a key per position and no value.
    """

    shapes: tuple[KVShape, ...]  # shape of each layer that attends, then of each indexer
    # per layer, the layer whose entries it attends over: itself, or an earlier layer of the same shape in a model
    # whose layers share keys and values (Gemma-3n, Gemma-4)
    sources: tuple[int, ...]
    dtype: torch.dtype  # dtype of keys and values
    device: torch.device  # where rows enter a forward and logits leave it: of keys and values, unless `devices` differ
    layer_ids: tuple[int, ...] | None = None  # the model's number of each layer; None: 0, 1, 2, ...
    states: tuple[StateShape, ...] = ()  # what each recurrent call keeps, in the order of a forward's calls
    most_draft_tokens: int = MOST_DRAFT_TOKENS  # of a sequence in a verification; states keep their rows
    indexers: tuple[int, ...] = ()  # the model's number of the layer of each indexer
    copies: PoolCopies | None = field(default=None, compare=False)  # other ranks' pools; None: there are none
    # where each of `shapes`, and each of `states`, lies if layers are spread over devices; empty: all on `device`
    devices: tuple[torch.device, ...] = ()
    state_devices: tuple[torch.device, ...] = ()

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
        return len(self.shapes) - len(self.indexers)

    @cached_property
    def places(self) -> dict[int, int]:
        """Each layer that attends, by the model's number of it."""
        return {layer: place for place, layer in enumerate(self.layer_ids or range(self.num_layers))}

    @cached_property
    def places_of_indexers(self) -> dict[int, int]:
        """Each indexer, by the model's number of its layer."""
        return {layer: self.num_layers + i for i, layer in enumerate(self.indexers)}

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of the recurrent states of one sequence."""
        return self.bytes_per_slot(self.most_draft_tokens)

    def bytes_per_slot(self, most_draft_tokens: int) -> int:
        """Return the bytes of the recurrent states of one sequence in a layout for another ``most_draft_tokens``."""
        return bytes_per_slot(self.states, most_draft_tokens)

    @cached_property
    def all_devices(self) -> tuple[torch.device, ...]:
        """The devices of its layers and states, ``device`` first."""
        return tuple(dict.fromkeys((self.device, *self.devices, *self.state_devices)))

    @property
    def is_spread(self) -> bool:
        """Whether its layers and states lie on several devices, or on another one than ``device``."""
        return len(self.all_devices) > 1

    def on_device(self, device: torch.device) -> KVLayout:
        """Return the layout of the layers and states on one device alone, to count their bytes."""
        kept = [i for i, own in enumerate(self.devices or (self.device,) * len(self.shapes)) if own == device]
        states = zip(self.states, self.state_devices or (self.device,) * len(self.states), strict=True)
        shapes = tuple(self.shapes[i] for i in kept)
        sources = tuple(kept.index(self.sources[i]) for i in kept)
        own_states = tuple(state for state, own in states if own == device)
        return KVLayout(
            shapes, sources, self.dtype, device, states=own_states, most_draft_tokens=self.most_draft_tokens
        )

    @property
    def groups(self) -> dict[tuple[torch.device, KVShape], list[int]]:
        """Indices of the layers, and of the indexers, that have their own entries, by device and shape."""
        found: dict[tuple[torch.device, KVShape], list[int]] = {}
        devices = self.devices or (self.device,) * len(self.shapes)
        for layer, (shape, source) in enumerate(zip(self.shapes, self.sources, strict=True)):
            if source == layer:
                found.setdefault((devices[layer], shape), []).append(layer)
        return found

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV of one position over all layers."""
        numbers = sum(
            len(layers) * shape.num_kv_heads * (shape.key_head_dim + shape.value_head_dim)
            for (_, shape), layers in self.groups.items()
        )
        return numbers * self.dtype.itemsize

    def allocate(self, num_pages: int, page_size: int) -> tuple[tuple[Tensor, ...], list[LayerKV]]:
        """Return zeros for ``num_pages`` pages, and the keys and values of layers and indexers: views of these.

        The allocations are each ``[layers, planes, num_pages, page_size, num_kv_heads, head size]``: one per device and
        shape, with two planes (keys and values); two of one plane each if keys and values differ in size (indexers have
        values of no numbers).
        """
        tensors: list[Tensor] = []
        layers: dict[int, LayerKV] = {}
        for (device, (num_heads, *head_dims)), members in self.groups.items():
            planes = 2 if head_dims[0] == head_dims[1] else 1
            sizes = [
                (len(members), planes, num_pages, page_size, num_heads, head_dim)
                for head_dim in head_dims[: 3 - planes]
            ]
            allocated = [torch.zeros(size, dtype=self.dtype, device=device) for size in sizes]
            tensors += allocated
            keys = allocated[0][:, 0]
            values = allocated[-1][:, -1]
            layers |= zip(members, zip(keys, values, strict=True), strict=True)
        return tuple(tensors), [layers[source] for source in self.sources]
