"""The ``"dflash"`` drafter: one forward drafts a whole block (DFlash, arXiv 2602.06036; DSpark, its extension).

A sequence of n tokens has features of positions 0 to n - 2, its context. A block begins at position n - 1, with the
newest token and a mask for every further row. The keys and values of the context are made of features alone and stay
in the drafter's pages. Those of a block stand behind them, and the context's next entries overwrite them.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import DrafterContext
from specdec_fast.drafters.dflash.model import DFlashModel, load_dflash
from specdec_fast.drafters.draft import Draft
from specdec_fast.drafters.shared.ranked import masked_logits
from specdec_fast.drafters.shared.tapped import TappedDrafter
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.token_masks import UNREAD
from specdec_fast.runner.drafting import draft_chains
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS


class DFlashDrafter(TappedDrafter):
    """Proposes a chain of K tokens from one forward over K + 1 rows, or K rows of a DSpark checkpoint.

    A block has no more rows than the checkpoint was trained with, so a larger K proposes fewer tokens than K. DSpark's
    Markov head corrects the logits of each row by the token that the row before it chose. Its confidence head scores
    the tokens if K is chosen by a policy, which then leaves those out of the verification that are not worth their
    rows.

    Raises:
        ConfigError, VocabularyMismatchError: the checkpoint cannot be read, or was made for another target.
    """

    settings = ("tap_layers",)

    keeps_last = False  # a block begins behind the context, whose entries are all written
    model: DFlashModel

    def __init__(self, context: DrafterContext, folder: str) -> None:
        self._folder = folder
        with torch.inference_mode():
            model = load_dflash(Path(folder), context.target, context.config.tap_layers)
        super().__init__(model, context, model.target_ids)
        self.taps = self.model.taps
        self.has_scores = self.model.confidence is not None and not isinstance(context.config.num_draft_tokens, int)

    @property
    def name(self) -> str:
        return f"dflash:{self._folder}"

    def describe(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "tap_layers": self.taps,
            "block_size": config.block_size,
            "draft_vocab_size": config.draft_vocab_size,
            "markov_head": config.markov_head_type if config.markov_rank else None,
            "confidence_head": self.model.confidence is not None,
        }

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        model = self.model
        itemsize = self.model.layout.dtype.itemsize
        drafted = num_sequences * min(num_draft_tokens, model.config.most_draft_tokens)
        rows = max(prefill_rows or MAX_PREFILL_ROWS, drafted + num_sequences)
        copies = 1
        if model.config.softcap is not None:
            copies = 3
        elif model.config.output_scale != 1:
            copies = 2
        widths = copies * model.config.draft_vocab_size + (0 if model.target_ids is None else model.vocab_size)
        return rows * model.row_bytes + self._kept_bytes(num_sequences, rows) + drafted * widths * itemsize

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        most = self.model.config.most_draft_tokens
        counts = [min(limit, most) for limit in limits]
        drafting = {sequence: count for sequence, count in zip(sequences, counts, strict=True) if count}
        self._catch_up(list(drafting))
        tokens, scores = self._chains(list(drafting), list(drafting.values()))
        return Draft(tokens, counts, scores=scores)

    def _projected(self, hidden_states: Tensor) -> Tensor:
        return self.model.project(hidden_states)

    def _compute(self, rows: list[Rows]) -> None:
        batch = lay_out(self._pool(), rows, torch.empty(0, dtype=torch.int64, device=self._device))
        self.model.write_context(batch, self._pool(), self._take_features(rows))

    def _chains(self, members: list[Sequence], counts: list[int]) -> tuple[Tensor, Tensor | None]:
        """Return the draft tokens ``[sum(counts)]``, sequence after sequence, and their scores."""
        config = self.model.config
        num_before = 0 if config.sample_from_anchor else 1  # rows of a block before the first that drafts
        rows = [Rows(s, s.length - 1, count + num_before) for s, count in zip(members, counts, strict=True)]
        blocks = [[s.token_ids[-1]] + [config.mask_token_id] * (count - 1) for s, _, count, _ in rows]  # type: ignore[attr-defined]
        tokens = to_device([token for block in blocks for token in block], self._device)
        hidden = self.model.forward(lay_out(self._pool(), rows, tokens), self._pool())
        if num_before:
            ends = accumulate(map(len, blocks))
            drafting = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
            places = to_device(drafting, self._device)
            hidden = hidden[places]
            tokens = tokens[places]
        logits = self.model.logits(hidden)
        if self.model.markov is not None:
            drafted = self._corrected(members, counts, logits, hidden)
        else:  # a penalty does not see what the block drafts: mask tokens are the tokens of these rows
            owners = [s for s, count in zip(members, counts, strict=True) for _ in range(count)]
            paths = [[UNREAD] * depth for count in counts for depth in range(count)]
            logits = masked_logits(logits, owners, paths, self._target_ids)
            offsets = to_device(list(accumulate(counts, initial=0)), self._device, torch.int32)
            drafted = self._next_tokens(logits, sampling_of(members, self._device), tokens, offsets)
        return drafted, self._scores(members, counts, hidden, drafted) if self.has_scores else None

    def _scores(self, members: list[Sequence], counts: list[int], hidden: Tensor, drafted: Tensor) -> Tensor:
        """Return the scores of draft tokens; ``hidden`` are the rows that drafted them."""
        assert self.model.confidence is not None
        previous = drafted.roll(1)
        firsts = to_device(list(accumulate(counts[:-1], initial=0)), self._device)
        previous[firsts] = to_device([s.token_ids[-1] for s in members], self._device)
        return self.model.confidence.scores(hidden, previous, counts)

    def _corrected(self, members: list[Sequence], counts: list[int], logits: Tensor, hidden: Tensor) -> Tensor:
        """Choose the tokens of row after row, with the Markov head's bias by the token before."""
        markov = self.model.markov
        assert markov is not None
        firsts = list(accumulate(counts, initial=0))

        def rows_of(drafting: list[int], num_before: int, num_rows: int) -> list[Tensor]:
            rows = range(num_before, num_before + num_rows)
            return [to_device([firsts[i] + row for i in drafting], self._device) for row in rows]

        def biased(rows: Tensor, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
            bias, state = markov.bias(previous, hidden[rows], state)
            return logits[rows] + bias, previous, state

        newest = to_device([s.token_ids[-1] for s in members], self._device)
        return draft_chains(members, counts, newest, None, rows_of, biased, self._next_tokens)
