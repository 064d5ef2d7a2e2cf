"""A drafter over hidden states that drafts chains row by row: each row takes the result for the row before.

Row i of a sequence is made of the target's feature at position i and of the token at position i + 1, and its logits
choose the token at i + 2. A sequence of n tokens has features of positions 0 to n - 2. So its first draft token comes
from row n - 2, which is true. The rows behind it are provisional: they are made of the drafter's own hidden states.
Features of accepted tokens arrive after the step, and the next proposal overwrites the provisional rows with true ones.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.batch.sampling_batch import Sampling, after, sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import Draft
from specdec_fast.drafters.queued_features import tokens_after
from specdec_fast.drafters.tapped import TappedDrafter
from specdec_fast.kv_cache.forward_layout import decode_batches
from specdec_fast.models.draft_step import by_sequence, stages
from specdec_fast.request.sequence import Sequence


class ChainDrafter(TappedDrafter):
    """Drafts a chain of K tokens: one forward over the rows with new features, then one row per further token.

    A subclass computes rows (``_forward``) and chooses tokens (``_next_tokens``).
    """

    @abstractmethod
    def _forward(self, batch: RaggedBatch, inputs: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute ``T`` rows, and write their KV entries.

        Args:
            batch: the rows; the token of a row at position i is that of position i + 1.
            inputs: ``[T, H]``, a feature, or the result for the row before.
            wanted: ``[R]`` int64, the rows whose logits are wanted; None: all.

        Returns:
            Logits ``[R, ids]``, and what the next row takes, ``[T, H]``.

        """

    @abstractmethod
    def _next_tokens(self, logits: Tensor, fed: Tensor, sampling: Sampling | None) -> Tensor:
        """Choose each row's token ``[N]``, by the rule and with the noise by which the target will choose its own."""

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Draft chains: one forward over the rows with new features, then one row per sequence and further token."""
        limits = [limit if self._is_complete(s) else 0 for s, limit in zip(sequences, limits, strict=True)]
        drafting = {sequence: limit for sequence, limit in zip(sequences, limits, strict=True) if limit}
        if not drafting:
            return Draft(torch.empty(0, dtype=torch.int64, device="cpu"), limits)
        most = max(self._most_rows, sum(drafting.values()) + len(drafting))
        if sum(map(self._num_queued, drafting)) > most:
            self._catch_up(list(drafting))
        return Draft(self._chains(drafting), limits)

    def _chains(self, drafting: dict[Sequence, int]) -> Tensor:
        """Return the draft tokens ``[sum(limits)]``, sequence after sequence."""
        members, counts = list(drafting), list(drafting.values())
        queued = self._queued_rows(members)
        hidden, tokens = self._taken(queued), to_device(tokens_after(queued), self._device)
        drafted: list[Tensor] = []
        before: list[int] = []
        for num_forwards, chosen in stages(counts):
            own = [members[i] for i in chosen]
            # A repetition penalty does not see what this step has drafted so far: it costs acceptance, no token.
            sampling = sampling_of(own, self._device, ahead=len(drafted))
            rows = queued
            if drafted:
                kept = to_device([before.index(i) for i in chosen], self._device)
                rows, hidden, tokens = (
                    [Rows(s, s.length - 2 + len(drafted), 1) for s in own],
                    hidden[kept],
                    tokens[kept],
                )
            for batch_of in decode_batches(self._pool(), rows, num_forwards):
                batch = batch_of(token_ids=tokens)
                last = batch.last_rows if batch.most_rows > 1 else None
                logits, hidden = self._forward(batch, hidden, last)
                if last is not None:
                    hidden, tokens = hidden[last], tokens[last]
                tokens = self._next_tokens(logits, tokens, sampling)
                sampling = sampling and after(sampling, tokens)
                drafted.append(tokens)
            before = chosen
        if len(drafted) == min(counts):  # every sequence gets as many
            return torch.stack(drafted, dim=1).flatten()
        return torch.cat(drafted)[to_device(by_sequence(counts), self._device)]
