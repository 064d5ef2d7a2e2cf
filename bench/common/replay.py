"""A drafter with a draft model's costs and a chosen acceptance: it replays the target's own tokens.

It serves to measure at the shapes of models whose weights are not available, because random models do not agree.
"""

from __future__ import annotations

from collections.abc import Sequence as Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_fast.device_copy import to_device
from specdec_fast.drafters import Draft, Drafter, StepResult
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.request.sequence import Sequence
from specdec_fast.trees.parents import ROOT, depths_of

_BEYOND = -1  # in the table: no token to replay, so the drafted token stays


class ReplayDrafter(Drafter):
    """Runs another drafter, and replaces the tokens that it proposed.

    Each token is the target's own with a given probability, else another one. The choice depends on the seed, the
    prompt and the position, so it is the same in every batch, with every K and every scheduler. A draft model continues
    from its own tokens, so its costs are real. It keeps KV entries of its own tokens, which are never proposed. A
    drafter with taps receives the target's hidden states, as it would by itself.

    The tree of a drafter of trees has the target's own tokens on one path. Behind each node of the path its first child
    has the target's token with the given probability; else another child may have it.

    Args:
        inner: the drafter whose costs are measured.
        transcripts: the tokens that the target emits for every prompt, in the order of the prompts.
        probability: probability that a token is the target's own, given that the tokens before it are; one for each
            prompt, if it changes in mid-run.
        vocab_size: vocabulary size of the target.
        device: device of the target.
        seed: seed of the choices.
        among_siblings: of trees: probability that the second child has the target's token if the first has not.

    """

    def __init__(
        self,
        inner: Drafter,
        transcripts: Sized[Sized[int]],
        probability: float | Sized[float],
        vocab_size: int,
        device: torch.device,
        seed: int = 0,
        among_siblings: float = 0.0,
    ) -> None:
        self.inner, self.taps = inner, inner.taps
        self.max_nodes = inner.max_nodes
        self._vocab_size = vocab_size
        self._own: list[np.ndarray] = []  # of each transcript, its tokens
        self._ranks: list[np.ndarray] = []  # of each, which child has the token; from 2 on: none
        longest = max(map(len, transcripts), default=0)
        probabilities = [probability] * len(transcripts) if isinstance(probability, (int, float)) else probability
        table = np.full((len(transcripts), longest + 1), _BEYOND, np.int64)
        for index, transcript in enumerate(transcripts):
            tokens = np.array(transcript, np.int64)
            generator = np.random.Generator(np.random.Philox(key=[seed, index]))
            draws = generator.random((2, longest))[:, : len(tokens)]
            of_siblings = generator.random(longest)[: len(tokens)]
            self._own.append(tokens)
            is_second = np.where(of_siblings < among_siblings, 1, 2)
            self._ranks.append(np.where(draws[0] < probabilities[index], 0, is_second))
            wrong = (
                tokens + 1 + (draws[1] * (vocab_size - 1)).astype(np.int64)
            ) % vocab_size  # any token except the target's own
            table[index, : len(tokens)] = np.where(draws[0] < probabilities[index], tokens, wrong)
        self._width = longest + 1  # the last column is after every transcript
        self._table: Tensor = torch.from_numpy(table).flatten().to(device)

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"replay over {self.inner.name}"

    def describe(self) -> dict[str, Any]:
        """Call the inner drafter."""
        return self.inner.describe()

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Let the inner drafter propose, and replay as many tokens as it proposed."""
        draft = self.inner.propose(sequences, limits)
        places = [
            sequence.index * self._width + min(sequence.length - sequence.prompt_length + k, self._width - 1)
            for sequence, count in zip(sequences, draft.num_draft_tokens, strict=True)
            for k in range(count)
        ]
        replayed = self._table[torch.tensor(places, dtype=torch.int64).to(self._table.device, non_blocking=True)]
        own = draft.token_ids.to(replayed.device)
        return Draft(torch.where(replayed == _BEYOND, own, replayed), draft.num_draft_tokens)

    def propose_trees(self, sequences: list[Sequence], limits: list[int], node_limits: list[int]) -> Draft:
        """Let the inner drafter propose, and replay one path of each tree that it proposed."""
        if not self.max_nodes:
            return self.propose(sequences, limits)
        draft = self.inner.propose_trees(sequences, limits, node_limits)
        trees = zip(sequences, draft.parents_by_sequence(), strict=True)
        tokens = [token for sequence, parents in trees for token in self._replayed_tree(sequence, parents)]
        return Draft(to_device(tokens, self._table.device), draft.num_draft_tokens, draft.parents)

    def _replayed_tree(self, sequence: Sequence, parents: Sized[int]) -> list[int]:
        """Return a token of each node; ``parents`` as in ``Draft.parents``."""
        own, ranks = self._own[sequence.index], self._ranks[sequence.index]
        depths = depths_of(parents)
        start = sequence.length - sequence.prompt_length
        tokens = []
        for node, depth in enumerate(depths):
            place = min(start + depth - 1, len(own) - 1)
            tokens.append(int(own[place] + 1 + node) % self._vocab_size)  # wrong, and another one for each node
        path = ROOT
        for place in range(start, len(own)):
            children = [node for node, parent in enumerate(parents) if parent == path]
            if ranks[place] >= len(children):
                break
            path = children[ranks[place]]
            tokens[path] = int(own[place])
        return tokens

    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        """Call the inner drafter."""
        return self.inner.forward_seconds(row_counts)

    def bytes_per_sequence(self, most_draft_tokens: int) -> int:
        """Call the inner drafter."""
        return self.inner.bytes_per_sequence(most_draft_tokens)

    def expect_sequences(self, num_sequences: int) -> None:
        """Call the inner drafter."""
        self.inner.expect_sequences(num_sequences)

    def prepare(self, num_tokens: int, page_size: int) -> None:
        """Call the inner drafter."""
        self.inner.prepare(num_tokens, page_size)

    def grow(self, num_tokens: int) -> None:
        """Call the inner drafter."""
        self.inner.grow(num_tokens)

    def use_target_pool(self, pool: PagePool | None) -> None:
        """Call the inner drafter."""
        self.inner.use_target_pool(pool)

    def admit(self, sequences: list[Sequence]) -> None:
        """Call the inner drafter."""
        self.inner.admit(sequences)

    def observe(self, sequences: list[Sequence], positions: list[range], features: Tensor) -> None:
        """Call the inner drafter."""
        self.inner.observe(sequences, positions, features)

    def commit(self, sequences: list[Sequence], result: StepResult) -> None:
        """Call the inner drafter."""
        self.inner.commit(sequences, result)

    def commit_ended(self, sequences: list[Sequence], result: StepResult) -> None:
        """Call the inner drafter."""
        self.inner.commit_ended(sequences, result)

    def release(self, sequence: Sequence) -> None:
        """Call the inner drafter."""
        self.inner.release(sequence)
