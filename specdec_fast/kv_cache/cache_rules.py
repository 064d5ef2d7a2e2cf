"""What a KV cache must know of a model's layers and code, besides its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class CacheRules:
    """What the config and the checks of a loaded model say of it.

    Attributes:
        sliding: layers that must pass their sliding window to attention.
        chunks: positions of a chunk, by the index of each layer whose rows see those of their own chunk alone.
        indexed: layers that attend over the positions alone that an indexer selects.
        answers_each_row: whether the cache returns a length for each row to a model that asks for its length.
    """

    sliding: frozenset[int] = frozenset()
    chunks: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    indexed: frozenset[int] = frozenset()
    answers_each_row: bool = False
