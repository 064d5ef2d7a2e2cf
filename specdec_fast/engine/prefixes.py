"""The prefix cache: which entries of a request others have computed, and which of its own are kept for others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import Drafter
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.request.page_keys import PageKeys, new_root
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.ragged_model import RaggedModel


class PrefixCache:
    """Finds pages of the target that hold the entries of a sequence's first tokens, and keeps those of full pages.

    The pool shares and keeps the pages (``PagePool``). A draft model does the same with its own pool, on its own: what
    it has of a prefix need not be what the target has. A drafter with taps lacks the hidden states of rows that are not
    computed, so a hit is no longer than what it has kept of them (``Drafter.known_positions``).

    Drafters with taps or with KV entries of their own share other pages, or later, than the target does. For them every
    sequence must find room for all its pages, as if none were shared (``counts_once`` is False then).

    Attributes:
        counts_once: whether a page that several sequences have counts as one where room is made.
        why_off: why no pages are kept; None if they are.
        is_stale: set by any thread: requests that begin from now on must not share with those before.

    """

    def __init__(self, target: RaggedModel, drafter: Drafter, config: EngineConfig) -> None:
        self._target = target
        self._drafter = drafter
        self._page_size = config.page_size
        self._is_tapped = bool(drafter.taps)
        self._root = new_root()
        self.why_off = why_no_prefixes(target, drafter, config)
        self.counts_once = self.is_on and not drafter.taps and not drafter.bytes_per_token
        self.is_stale = False
        if self.is_on:
            drafter.keep_prefixes()

    @property
    def is_on(self) -> bool:
        """Whether pages are kept."""
        return self.why_off is None

    def begin(self, sequence: Sequence) -> None:
        """Let a sequence that holds no pages find, and be found."""
        if self.is_on:
            sequence.page_keys = PageKeys(self._page_size, self._root)

    def num_shared(self, pool: PagePool, sequence: Sequence) -> int:
        """Return how many pages a sequence that waits would share with resident ones."""
        return pool.num_shared(self._keys(sequence, self._most_known(sequence))) if self.is_on else 0

    def share(self, pool: PagePool, sequence: Sequence) -> None:
        """Let a sequence whose prompt is not complete have the pages that others have computed meanwhile."""
        if not self.is_on or (self._is_tapped and sequence.is_admitted):  # its drafter needs every further row
            return
        if sequence.is_only_scored:  # the logits of all its rows are wanted
            return
        most = self._most_known(sequence)
        num_new = pool.share(sequence, self._keys(sequence, most)) * self._page_size
        num_known = pool.num_kept(sequence) * self._page_size
        if self._is_tapped:  # after a failed step it may have fewer entries than before
            sequence.target_kv_length = min(num_known, most // self._page_size * self._page_size)
        elif num_new:
            num_new = num_known - sequence.target_kv_length  # some of the first page it may have computed itself
            sequence.target_kv_length = num_known
        if not sequence.num_preemptions:
            sequence.num_cached_tokens += num_new

    def keep(self, pool: PagePool, sequences: Iterable[Sequence]) -> None:
        """Keep the full pages of sequences whose entries have been computed, except of requests that failed."""
        if pool.prefixes is None:
            return
        size = self._page_size
        num_kept = pool.prefixes.num_kept
        for sequence in sequences:
            num_positions = sequence.target_kv_length
            if num_positions - num_kept[sequence] * size >= size and sequence.error is None:
                pool.keep(sequence, self._keys(sequence, num_positions))

    def refresh(self, pool: PagePool | None, waiting: Iterable[Sequence], *, has_residents: bool) -> None:
        """Forget all entries if the caller said so or, where no sequence is resident, if the model has changed."""
        if not self.is_on:
            return
        has_changed = not has_residents and self._target.has_changed()
        if self.is_stale or has_changed:
            self.is_stale = False  # first, so that a thread that sets it meanwhile is not overlooked
            self.forget(pool, waiting)

    def forget(self, pool: PagePool | None, waiting: Iterable[Sequence]) -> None:
        """Forget all entries; resident sequences go on with theirs, and share nothing with later ones."""
        if not self.is_on:
            return
        self._root = new_root()
        for sequence in waiting:
            self.begin(sequence)
        if pool is not None:
            pool.forget_prefixes()
        self._drafter.forget_prefixes()

    def describe(self, pool: PagePool | None) -> dict[str, Any]:
        """Return the entry of ``Engine.describe()``."""
        prefixes = None if pool is None else pool.prefixes
        return {
            "is_on": self.is_on,
            "why_off": self.why_off,
            "num_pages": 0 if prefixes is None else len(prefixes.key_of),
            "num_evicted_pages": 0 if prefixes is None else prefixes.num_evicted,
        }

    def _most_known(self, sequence: Sequence) -> int:
        """Return how many first positions of a sequence need no row of the target, if their entries are known.

        A drafter with taps gets one row of the prompt at least: it admits the sequence right before, so what it knows
        is still there.
        """
        most = sequence.most_from_cache
        return max(0, min(most - 1, self._drafter.known_positions(sequence))) if self._is_tapped else most

    def _keys(self, sequence: Sequence, num_positions: int) -> list[bytes]:
        keys = sequence.page_keys
        return [] if keys is None else keys.first(sequence.token_ids, num_positions // self._page_size)


def why_no_prefixes(target: RaggedModel, drafter: Drafter, config: EngineConfig) -> str | None:
    """Return why an engine keeps no pages for later requests; None if it does."""
    if not config.prefix_cache:
        return "prefix_cache is not set"
    if target.layout.states:
        return "the target's recurrent layers keep one state of a sequence, and none of its prefixes"
    if target.needs_same_calls:
        return "the target is sharded over processes, which must all compute the same rows"
    if drafter.taps and not drafter.knows_prefixes:
        return f"drafter {drafter.name!r} needs the hidden states of every row"
    return None
