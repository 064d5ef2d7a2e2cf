"""The KV pools of a core: their size, their growth, and the check whether a request can ever fit."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import Drafter
from specdec_fast.errors import KVCacheAllocationError, KVCacheTooSmallError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.ragged_model import RaggedModel
from specdec_fast.planner.budget import longest_prompt
from specdec_fast.request.sequence import Sequence


class Pools:
    """The target's pool and, through the drafter, the drafter's pool; both have the same number of positions.

    Args:
        target: the model whose KV entries the pool holds.
        drafter: receives ``prepare`` and ``grow`` with the same number of positions.
        config: page size, and the number of positions if it is fixed.

    Attributes:
        target_pool: the target's pages; None before the first step.
        is_sized: whether the pools are large enough for every request added so far.

    """

    def __init__(self, target: RaggedModel, drafter: Drafter, config: EngineConfig) -> None:
        self._target, self._drafter = target, drafter
        self._page_size, self._fixed_tokens = config.page_size, config.kv_cache_tokens
        self._size_option = "kv_cache_tokens" if config.memory_bytes is None else "memory_bytes"
        # Beyond the positions of a sequence, so that a tree at its end need not shrink.
        self._spare_tokens = drafter.max_nodes
        self.target_pool: PagePool | None = None
        self.is_sized = False

    @property
    def has_fixed_size(self) -> bool:
        """Whether the configuration fixes the number of positions."""
        return self._fixed_tokens is not None

    def expect_room(self, request: Sequence) -> None:
        """Check that the configured pool can hold a request alone.

        Raises:
            KVCacheTooSmallError: it cannot.

        """
        needed = request.max_length - 1
        if self._fixed_tokens is not None and self._rounded(needed) > self._rounded(self._fixed_tokens):
            positions, new_tokens = self._rounded(self._fixed_tokens), request.max_length - request.prompt_length
            raise KVCacheTooSmallError(
                f"the request needs {needed} KV positions (prompt {request.prompt_length}, the rest new tokens), but "
                f"the whole pool has {positions}; raise {self._size_option}, or lower max_new_tokens: the longest "
                f"prompt that fits with {new_tokens} new tokens has {longest_prompt(positions, new_tokens)}."
            )

    def size(self, resident: list[Sequence], waiting: Iterable[Sequence], max_resident: int) -> None:
        """Make room for as many of the largest sequences as may be resident, or for the configured positions.

        If there is no memory for so many positions, the pools have as many as there is memory for, but enough for the
        first sequence.

        Raises:
            KVCacheAllocationError: there is no memory for the configured positions, or for the first sequence.

        """
        first = next(iter(waiting), None)
        is_too_large = not resident and first is not None and not self._holds(first)
        if self.is_sized and not is_too_large:
            return
        largest = nlargest(max_resident, (s.max_length - 1 + self._spare_tokens for s in (*resident, *waiting)))
        num_tokens = self._fixed_tokens or sum(map(self._rounded, largest))
        if resident:
            if self.pool().num_tokens < num_tokens:
                self._grow(num_tokens)
        elif first is not None:
            self._prepare(num_tokens, least=self._fixed_tokens or self._rounded(first.max_length - 1))
        self.is_sized = True

    def pool(self) -> PagePool:
        """Return the target's pool; ``size`` must have been called."""
        if self.target_pool is None:
            raise RuntimeError("the engine has no page pool before its first step.")
        return self.target_pool

    def _holds(self, sequence: Sequence) -> bool:
        pool = self.target_pool
        return pool is not None and pool.num_pages_for(sequence.max_length - 1) <= pool.num_pages

    def _prepare(self, num_tokens: int, least: int) -> None:
        """Allocate the pools, smaller ones if there is no memory; no sequence is resident."""
        self._target.expect_same_weights()
        while True:
            try:
                return self._allocate(num_tokens)
            except KVCacheAllocationError:
                self.target_pool = None
                if num_tokens <= least:
                    raise
            num_tokens = max(least, num_tokens // 2)

    def _allocate(self, num_tokens: int) -> None:
        """Allocate the pools, or keep the present ones if they are large enough and no interrupted call left pages."""
        pool = self.target_pool
        if pool is None or not pool.is_vacant or pool.num_tokens < num_tokens:
            pool = self.target_pool = None  # frees the old pool's memory before the new one is allocated
            self.target_pool = PagePool(self._target.layout, num_tokens, self._page_size, self._target.row_padding)
        self._drafter.prepare(self.pool().num_tokens, self._page_size)

    def _grow(self, num_tokens: int) -> None:
        """Replace the pools by larger ones, if there is memory; otherwise sequences share the present ones."""
        try:
            pool = self.pool().grown(num_tokens)
            self._drafter.grow(num_tokens)
        except KVCacheAllocationError:
            return
        self.target_pool = pool

    def _rounded(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size) * self._page_size
