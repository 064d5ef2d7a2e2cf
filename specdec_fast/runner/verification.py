"""A verification: its rows, planned once for whatever runner computes them, and which draft tokens it accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import Sampling, sampling_columns, sampling_of
from specdec_fast.device_copy import HostCopy, Joined, all_to_device, to_host
from specdec_fast.errors import RequestError
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.mask_rows import MaskRows, mask_rows, masks_read_tokens
from specdec_fast.trees.rows import TreeRows, rows_of_trees


@dataclass(frozen=True)
class StepPlan:
    """The rows of one verification: of ``B`` sequences, the last committed token and the draft tokens of each.

    These are the ``T`` *verified* rows, whose logits are wanted. The forward has further rows in front of a sequence's
    own, if more tokens of its prompt have no KV entries yet.
    """

    sequences: list[Sequence]
    draft_tokens: Tensor  # [T - B] int64 on the model's device, sequence after sequence
    num_draft_tokens: list[int]  # per sequence
    parents: Tensor | None  # see Draft.parents, on the host; None: chains
    vocab_size: int  # width of the model's logits
    empty_hidden_states: Callable[[int], Tensor | None]  # memory for the taps of so many rows; see RaggedModel
    # [B] int64 on the model's device: the tokens that the step before has chosen, which the host has not read, so the
    # sequences do not have them yet. None: the rows begin with the last committed tokens.
    unread: Tensor | None = None

    @property
    def ahead(self) -> int:
        """1 if the host has not yet read the token of each sequence's first row, else 0."""
        return 0 if self.unread is None else 1

    @cached_property
    def rows(self) -> list[Rows]:
        """The span of each sequence in the forward."""
        if self.unread is not None:
            return [Rows(s, s.length, 1) for s in self.sequences]
        drafts = zip(self.sequences, self.num_draft_tokens, strict=True)
        return [Rows(s, s.target_kv_length, s.num_uncomputed + count, count) for s, count in drafts]

    @cached_property
    def hidden_states(self) -> Tensor | None:
        """Memory for the taps of every row of the forward; None: they are not wanted."""
        return self.empty_hidden_states(sum(rows.count for rows in self.rows))

    @cached_property
    def counts(self) -> list[int]:
        """The number of verified rows of each sequence."""
        return [count + 1 for count in self.num_draft_tokens]

    @property
    def has_prompts(self) -> bool:
        """Whether the forward has rows that are not verified: those of prompts before their last tokens."""
        return self.unread is None and any(sequence.num_uncomputed > 1 for sequence in self.sequences)

    def forward_rows(self, token_ids: Tensor) -> ForwardRows:
        """Return the rows of the forward; ``token_ids`` ``[T]`` are those of the verified rows."""
        tokens: list[int] = []
        verified: list[int] = []
        prompts: list[int] = []
        for sequence, count in zip(self.sequences, self.counts, strict=True):
            uncomputed = sequence.token_ids[sequence.target_kv_length : -1]
            prompts += range(len(tokens), len(tokens) + len(uncomputed))
            tokens += uncomputed
            verified += range(len(tokens), len(tokens) + count)
            tokens += [0] * count
        arrays = [np.array(each, np.int64) for each in (tokens, verified, prompts)]
        rows = ForwardRows(*all_to_device(arrays, token_ids.device))
        rows.token_ids[rows.verified] = token_ids
        return rows

    @property
    def last_tokens(self) -> list[int]:
        """The last committed token of each sequence."""
        return [sequence.token_ids[-1] for sequence in self.sequences]

    @property
    def edits_logits(self) -> bool:
        """Whether a sequence has a penalty, a bias or a mask: what has no graph."""
        return any(sequence.edits_logits for sequence in self.sequences)

    @property
    def has_processors(self) -> bool:
        """Whether a sequence has logits processors, which are called between the forward and the choice."""
        return any(sequence.params.logits_processors for sequence in self.sequences)

    @cached_property
    def masks(self) -> MaskRows | None:
        """The bitmask of every row; None if no sequence has one. Draft tokens that a mask reads come to the host."""
        drafted = self.drafted if masks_read_tokens(self.sequences) else None
        parents = None if self.parents is None else self.parents.tolist()
        return mask_rows(self.sequences, drafted, self.num_draft_tokens, parents, self.vocab_size)

    def read_drafts(self) -> None:
        """Bring the draft tokens to the host now, if masks will read them: later that would wait for the forward."""
        if masks_read_tokens(self.sequences):
            self.drafted  # noqa: B018 - it is kept

    @cached_property
    def drafted(self) -> list[int]:
        """The draft tokens on the host, as ``verify_chain`` compares them."""
        return self.draft_tokens.clamp(0, self.vocab_size - 1).tolist()

    @property
    def trees(self) -> TreeRows | None:
        """The shape of the rows; None for chains."""
        return None if self.parents is None else rows_of_trees(self.parents.tolist(), self.num_draft_tokens)

    def sampling(self) -> Sampling | None:
        """Return how the sequences choose, on the model's device; None: all greedily."""
        allowed = None if self.masks is None else self.masks.words
        return sampling_of(self.sequences, self.draft_tokens.device, self.ahead, allowed)

    @property
    def failures(self) -> dict[int, RequestError]:
        """By row of the forward, why nothing can be chosen there."""
        return {} if self.masks is None else self.masks.failures

    def sampling_columns(self) -> dict[str, np.ndarray]:
        """Return how sequences without ``edits_logits`` choose, on the host; empty: all greedily."""
        samples = any(sequence.samples for sequence in self.sequences)
        return sampling_columns(self.sequences, self.ahead) if samples else {}


class ForwardRows(NamedTuple):
    """The rows of a forward some of which are not verified: those of prompts before their last tokens."""

    token_ids: Tensor  # [R] int64, of all rows
    verified: Tensor  # [T] int64, indices of the rows that are verified
    prompts: Tensor  # [R - T] int64, indices of the others


class Outcome(NamedTuple):
    """What a verification accepted, per sequence.

    Attributes:
        emissions: the accepted draft tokens and the next token, ``INVALID_TOKEN`` after NaN logits.
        paths: if the drafts are trees, the rows of the accepted draft tokens, counted from the sequence's first row.
            None for chains, where these are the rows from 1 on.

    """

    emissions: list[list[int]]
    paths: list[list[int]] | None

    def accepted_rows(self, counts: list[int]) -> list[Many[int]]:
        """Return the rows of the forward at which the emitted tokens were chosen: the root's, then the accepted ones.

        Args:
            counts: rows of each sequence.

        """
        rows: list[Many[int]] = []
        first = 0
        for b, count in enumerate(counts):
            if self.paths is None:
                rows.append(range(first, first + len(self.emissions[b])))
            else:
                rows.append([first, *(first + row for row in self.paths[b])])
            first += count
        return rows


@dataclass(frozen=True)
class Verification:
    """What one forward of the target gave. On a GPU it is only queued until ``outcome`` waits for it.

    Attributes:
        counts: verified rows of each of ``B`` sequences, its draft tokens plus one; ``T`` in all.
        logits: ``[T, vocab_size]``, the target's.
        results: what ``verify_chain`` found, target's tokens ``[T]``, accepted draft tokens ``[B]`` and next tokens
            ``[B]``, for trees also the accepted rows ``[T]``; as a graph joined them; the same on their way to the
            host; or the outcome itself.
        forward_seconds: of the forward alone, on the host's clock.
        accept_seconds: of choosing and accepting, as far as it is done already.
        hidden_states: ``[T, taps, H]``, the target's; None without taps.
        prompt_hidden_states: ``[P, taps, H]``, those of the forward's ``P`` other rows; None if it has none.
        failures: by row, the error of a request for which nothing could be chosen there.

    """

    counts: list[int]
    logits: Tensor
    results: Many[Tensor] | Joined | HostCopy | Outcome
    forward_seconds: float
    accept_seconds: float
    hidden_states: Tensor | None = None
    prompt_hidden_states: Tensor | None = None
    failures: Mapping[int, RequestError] = field(default_factory=dict)

    @property
    def next_tokens(self) -> Tensor | None:
        """The next tokens ``[B]`` int64 on the model's device, in memory of their own; None if the host has them."""
        if isinstance(self.results, (HostCopy, Outcome)):
            return None
        if isinstance(self.results, Joined):
            return self.results.values[self.results.parts[2]].clone()
        return self.results[2].long().clone()

    def on_its_way(self) -> Verification:
        """Return it with results whose copy to the host has begun: ``outcome`` will wait for nothing launched later.

        It then has no logits, ``[0, vocab_size]``: what is launched later may overwrite them.
        """
        if isinstance(self.results, (HostCopy, Outcome)):
            return self
        return replace(self, results=HostCopy(self.results), logits=self.logits.new_empty(0, self.logits.shape[1]))

    def outcome(self) -> Outcome:
        """Return what was accepted."""
        if isinstance(self.results, Outcome):
            return self.results
        target_tokens, num_accepted, next_tokens, *rows = to_host(self.results)
        found = list(zip(accumulate(self.counts[:-1], initial=0), num_accepted, next_tokens, strict=True))
        if not rows:
            emissions = [[*target_tokens[first : first + count], next_token] for first, count, next_token in found]
            return Outcome(emissions, None)
        paths = [rows[0][first : first + count] for first, count, _ in found]
        emissions = [
            # A draft token is accepted if the row above it chose it.
            [*(target_tokens[first + above] for above in [0, *path][:-1]), next_token]
            for (first, _, next_token), path in zip(found, paths, strict=True)
        ]
        return Outcome(emissions, paths)
