"""Which sequences wait and which hold KV pages: the size of the pools, admission, the pages of a step, preemption."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from heapq import nlargest
from time import monotonic
from typing import NamedTuple

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import Drafter
from specdec_fast.engine.drafting import StepDrafting
from specdec_fast.engine.prefilling import Prefilling
from specdec_fast.engine.prefixes import PrefixCache
from specdec_fast.errors import KVCacheAllocationError, KVCacheTooSmallError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.planner.budget import longest_prompt
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.schedulers import Scheduler

_HEADROOM_PAGES = 2  # by which every resident sequence can grow when another one is admitted


class Pools:
    """The target's pool and, through the drafter, the drafter's pool; both have the same number of positions.

    Attributes:
        target_pool: the target's pages; None before the first step.
        is_sized: whether the pools are large enough for every request added so far.

    """

    def __init__(self, target: RaggedModel, drafter: Drafter, config: EngineConfig, prefixes: PrefixCache) -> None:
        self._target = target
        self._drafter = drafter
        self._prefixes = prefixes
        self._page_size = config.page_size
        self._fixed_tokens = config.kv_cache_tokens
        self._has_budget = config.memory_bytes is not None
        # Beyond the positions of a sequence, so that a tree at its end need not shrink.
        self._spare_tokens = drafter.max_nodes
        # A model with recurrent layers has a state slot for each of so many sequences.
        self._has_states = bool(target.layout.states or drafter.bytes_per_sequence(config.most_draft_tokens))
        self._num_sequences = 0
        self.target_pool: PagePool | None = None
        self.is_sized = False

    def use(self, pool: PagePool | None) -> None:
        """Let target and drafter use this pool of the target from now on."""
        self.target_pool = pool
        self._drafter.use_target_pool(pool)

    @property
    def has_fixed_size(self) -> bool:
        """Whether the configuration fixes the number of positions."""
        return self._fixed_tokens is not None

    def expect_room(self, request: Sequence) -> None:
        """Check that the configured pool can hold a request alone.

        Raises:
            KVCacheTooSmallError: it cannot.

        """
        needed = request.num_positions
        if self._fixed_tokens is not None and self._rounded(needed) > self._rounded(self._fixed_tokens):
            positions = self._rounded(self._fixed_tokens)
            new_tokens = request.max_length - request.prompt_length
            longest = longest_prompt(positions, new_tokens)
            raise KVCacheTooSmallError(
                f"the request needs {needed} KV positions (prompt {request.prompt_length}, the rest new tokens), but "
                f"the whole pool has {positions}; raise {self._what_to_raise(needed)}, or lower max_new_tokens: "
                f"the longest prompt that fits with {new_tokens} new tokens has {longest}."
            )

    def _what_to_raise(self, needed: int) -> str:
        if not self._has_budget:
            return "kv_cache_tokens"
        assert self._fixed_tokens is not None
        missing = self._rounded(needed) - self._rounded(self._fixed_tokens)
        num_bytes = missing * (self._target.layout.bytes_per_token + self._drafter.bytes_per_token)
        return f"memory_bytes by {num_bytes} or more"

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
        largest = nlargest(max_resident, (s.num_positions + self._spare_tokens for s in (*resident, *waiting)))
        num_tokens = self._fixed_tokens or self._num_tokens(largest, max_resident)
        # A budget counts all state slots. While slots are added, the old ones and the new ones need memory.
        num_sequences = max_resident if self._has_budget else len(largest)
        if resident:
            if num_sequences > self._num_sequences:  # requests come one by one, and growing copies every slot
                num_sequences = min(max_resident, max(num_sequences, 2 * self._num_sequences))
            if not self.pool().holds(num_tokens, num_sequences):
                self._grow(num_tokens, num_sequences)
        elif first is not None:
            least = self._fixed_tokens or self._rounded(first.num_positions)
            self._prepare(num_tokens, num_sequences, least)
        self.is_sized = True

    def _num_tokens(self, largest: list[int], max_resident: int) -> int:
        """Return the number of positions for sequences with the ``largest`` lengths.

        If pages are kept, a new pool has room for as much again, but for no more than a full window of the largest.
        """
        needed = sum(map(self._rounded, largest))
        if not self._prefixes.is_on or not largest:
            return needed
        if self.target_pool is not None and needed <= self.target_pool.num_tokens:
            return self.target_pool.num_tokens
        return min(2 * needed, max_resident * self._rounded(largest[0]))

    def pool(self) -> PagePool:
        """Return the target's pool; ``size`` must have been called."""
        if self.target_pool is None:
            raise RuntimeError("the engine has no page pool before its first step.")
        return self.target_pool

    def has_slot(self, num_resident: int) -> bool:
        """Return whether target and drafter have state slots for one sequence more, if they need any."""
        return not self._has_states or num_resident < self._num_sequences

    def _holds(self, sequence: Sequence) -> bool:
        pool = self.target_pool
        return pool is not None and pool.num_pages_for(sequence.num_positions) <= pool.num_pages

    def _prepare(self, num_tokens: int, num_sequences: int, least: int) -> None:
        """Allocate the pools, smaller ones if there is no memory; no sequence is resident."""
        self._target.expect_same_weights()
        while True:
            try:
                return self._allocate(num_tokens, num_sequences)
            except KVCacheAllocationError:
                self.use(None)
                if num_tokens <= least and (num_sequences <= 1 or not self._has_states):
                    raise
            num_tokens = max(least, num_tokens // 2)
            num_sequences = max(1, num_sequences // 2)

    def _allocate(self, num_tokens: int, num_sequences: int) -> None:
        """Allocate the pools, or keep the present ones if they are large enough and no interrupted call left pages."""
        pool = self.target_pool
        if pool is not None and pool.is_vacant and pool.num_idle_pages and not pool.holds(num_tokens, num_sequences):
            self._grow(num_tokens, num_sequences)  # keeps the entries, if there is memory for both pools
            pool = self.target_pool
        if pool is None or not pool.is_vacant or not pool.holds(num_tokens, num_sequences):
            pool = None
            self.use(None)  # frees the old pool's memory before the new one is allocated
            target = self._target
            pool = PagePool(target.layout, num_tokens, self._page_size, target.row_padding, num_sequences)
            if self._prefixes.is_on:
                pool.keep_prefixes()
            self.use(pool)
        self._drafter.expect_sequences(num_sequences)
        self._drafter.prepare(self.pool().num_tokens, self._page_size)
        self._num_sequences = num_sequences

    def _grow(self, num_tokens: int, num_sequences: int) -> None:
        """Replace the pools by larger ones, if there is memory; otherwise sequences share the present ones."""
        try:
            pool = self.pool().grown(num_tokens, num_sequences)
            self._drafter.expect_sequences(num_sequences)
            self._drafter.grow(num_tokens)
        except KVCacheAllocationError:
            return
        self.use(pool)
        self._num_sequences = max(num_sequences, self._num_sequences)

    def _rounded(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size) * self._page_size


class Room(NamedTuple):
    """The sequences of a step that have the pages for it."""

    batch: list[Sequence]  # those that are still resident; there may be none
    limits: list[int]  # per sequence, the largest number of draft tokens of a chain, and the largest depth of a tree
    node_limits: list[int]  # per sequence, the largest number of nodes of a tree
    num_preempted: int  # number of sequences that were preempted for these


class Residents:
    """The sequences of a core, those that wait and those that hold pages.

    A sequence gets pages for its committed tokens when it is admitted, and further pages as it grows. If a step needs
    more pages than are free, the last resident sequences are preempted: they give up their pages and wait again until
    their tokens are prefilled anew. Recomputed KV entries have the same bits, and noise is keyed by position, so
    preemption changes no output.

    Both lists are sorted by ``Sequence.turn``, so the last sequence is the youngest of the lowest priority. Waiting
    sequences are admitted in this order. The first resident one is never preempted: the pool can hold any admitted
    sequence alone. So each step, or a later one, brings it closer to its end. Where priorities are equal, every
    resident sequence is older than every waiting one; nothing is preempted to admit one of a higher priority.

    Only the target's pages are counted. A draft model's pool has as many, and a sequence never needs more pages there
    than its pages for the committed tokens and the draft tokens in the target's pool.

    Attributes:
        waiting: sequences that hold no pages, in the order of their turns.
        resident: sequences that hold pages, in the order of their turns.

    """

    def __init__(
        self,
        pools: Pools,
        prefixes: PrefixCache,
        prefilling: Prefilling,
        scheduler: Scheduler,
        drafting: StepDrafting,
        config: EngineConfig,
        max_nodes: int,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.resident: list[Sequence] = []
        self._pools = pools
        self._prefixes = prefixes
        self._prefilling = prefilling
        self._scheduler = scheduler
        self._drafting = drafting
        self._max_nodes = max_nodes
        # At least a step, so that what is admitted is not preempted in its first one.
        self._headroom = max(_HEADROOM_PAGES * config.page_size, config.most_draft_tokens + 1)

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        waiting = self.waiting
        if not waiting or waiting[-1].turn < sequence.turn:  # as most are, and a deque is slow to search
            waiting.append(sequence)
        elif sequence.turn < waiting[0].turn:
            waiting.appendleft(sequence)
        else:
            insort(waiting, sequence, key=lambda each: each.turn)

    def admit(self) -> None:
        """Admit the first waiting sequences: as many as the scheduler allows and as there is room for."""
        most = self._scheduler.checked_max_resident()
        self._prefixes.refresh(self._pools.target_pool, self.waiting, has_residents=bool(self.resident))
        self._pools.size(self.resident, self.waiting, most)
        pool = self._pools.pool()
        places = self._num_places()
        while self.waiting and places > 0 and self._has_room(self.waiting[0]):
            sequence = self.waiting.popleft()
            pool.add(sequence)
            self._prefixes.share(pool, sequence)
            pool.allocate(sequence, min(sequence.length, sequence.num_positions))
            self._prefilling.add(sequence)
            if sequence.resident_since is None:
                sequence.resident_since = monotonic()
            insort(self.resident, sequence, key=lambda each: each.turn)
            places -= 1

    def may_admit(self) -> bool:
        """Return whether ``admit`` would admit a sequence now."""
        return bool(self.waiting) and self._num_places() > 0 and self._has_room(self.waiting[0])

    def have_room(self, batch: list[Sequence], ahead: int) -> bool:
        """Return whether there are pages for so many tokens more of each sequence, without preempting one."""
        pool = self._pools.pool()
        return sum(pool.num_missing(s, s.length + ahead) for s in batch) <= self._num_free(pool)

    def make_room(self, batch: list[Sequence], limits: list[int], may_branch: bool = True) -> Room:
        """Allocate the pages that a step needs, and preempt the last resident sequences if too few are free.

        Trees get no more nodes than a chain has tokens, before a sequence is preempted for them. ``may_branch`` says
        whether they may have more at all.
        """
        pool = self._pools.pool()
        node_limits = self._node_limits(limits) if may_branch else limits
        ends = [s.length + limit for s, limit in zip(batch, node_limits, strict=True)]
        num_missing = sum(map(pool.num_missing, batch, ends))
        num_preempted = 0
        if num_missing > self._num_free(pool) and node_limits is not limits:
            return self.make_room(batch, limits, may_branch=False)
        if not num_missing:
            return Room(batch, limits, node_limits, 0)
        while num_missing > self._num_free(pool):
            last = self.resident[-1]
            if last in batch:
                num_missing -= pool.num_missing(last, ends[batch.index(last)])
            self._preempt(last)
            num_preempted += 1
        if num_preempted:
            kept = [i for i, sequence in enumerate(batch) if sequence in self.resident]
            batch = [batch[i] for i in kept]
            limits = [limits[i] for i in kept]
            node_limits = [node_limits[i] for i in kept]
            ends = [ends[i] for i in kept]
        for sequence, end in zip(batch, ends, strict=True):
            pool.allocate(sequence, end)
        return Room(batch, limits, node_limits, num_preempted)

    def remove(self, sequences: list[Sequence]) -> None:
        """Remove sequences that wait or are resident, and free their pages."""
        for sequence in sequences:
            if sequence in self.resident:
                self.resident.remove(sequence)
                self._pools.pool().free(sequence)
            elif sequence in self.waiting:
                self.waiting.remove(sequence)
        if self._prefilling.sequences:
            self._prefilling.drop(sequences)

    def _num_places(self) -> int:
        """Return how many sequences the scheduler lets join now."""
        num_resident = len(self.resident)
        most = self._scheduler.checked_max_resident()
        return min(self._scheduler.checked_num_to_admit(num_resident), most - num_resident)

    def _node_limits(self, limits: list[int]) -> list[int]:
        """Return how many nodes each sequence's tree may have; ``limits`` itself for a drafter of chains."""
        most = self._max_nodes
        return [max(limit, most) if limit else 0 for limit in limits] if most else limits

    def _has_room(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence can be admitted, so that it and the resident ones can grow for a while."""
        pool = self._pools.pool()
        if pool.num_pages_for(sequence.num_positions) > pool.num_pages:
            return False  # there is no memory for a larger pool: it waits until no sequence is resident
        if not self._pools.has_slot(len(self.resident)):
            return False
        needed = pool.num_pages_for(self._goal(sequence))
        needed += sum(pool.num_missing(s, self._goal(s)) for s in self.resident)
        num_free = self._num_free(pool)
        if needed > num_free and self._prefixes.counts_once:
            needed -= self._prefixes.num_shared(pool, sequence)
        return needed <= num_free

    def _num_free(self, pool: PagePool) -> int:
        """Return how many pages sequences may still get, idle ones that are kept for others among them."""
        if not self._prefixes.is_on or self._prefixes.counts_once:
            return pool.num_free_pages
        return pool.num_pages - pool.num_held_pages

    def _goal(self, sequence: Sequence) -> int:
        """Return the number of positions up to which a sequence should be able to grow without preemption."""
        return min(sequence.length + self._headroom, sequence.num_positions)

    def _preempt(self, sequence: Sequence) -> None:
        """Let a resident sequence give up its pages and wait."""
        self.remove([sequence])
        self.enqueue(sequence)
        sequence.target_kv_length = sequence.passed_over = 0
        sequence.num_preemptions += 1
        self._drafting.withdraw([sequence])
