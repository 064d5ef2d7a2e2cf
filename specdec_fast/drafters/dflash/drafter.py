"""The ``"dflash"`` drafter: one forward drafts a whole block (DFlash, arXiv 2602.06036; DSpark, its extension).

A sequence of n tokens has features of positions 0 to n - 2, its context. A block begins at position n - 1, with the
newest token and a mask for every further row. The keys and values of the context are made of features alone and stay
in the drafter's pages. Those of a block stand behind them, and the context's next entries overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import Sampling, after, sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import Draft, DrafterContext
from specdec_fast.drafters.dflash.model import DFlashModel, load_dflash
from specdec_fast.drafters.shared.tapped import TappedDrafter
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.drafting import by_sequence, greedy_tokens, stages, widened
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS


class DFlashDrafter(TappedDrafter):
    """Proposes a chain of K tokens from one forward over K + 1 rows, or K rows of a DSpark checkpoint.

    A block has no more rows than the checkpoint was trained with, so a larger K proposes fewer tokens than K. DSpark's
    Markov head corrects the logits of each row by the token that the row before it chose. Its confidence head scores
    the tokens if K is chosen by a policy, which then leaves those out of the verification that are not worth their
    rows.

    Args:
        context: the target, the settings (``tap_layers``) and the device.
        folder: the checkpoint; see ``dflash_config.py`` for the formats.

    Raises:
        ConfigError, VocabularyMismatchError: the checkpoint cannot be read, or was made for another target.

    """

    settings = ("tap_layers",)

    keeps_last = False  # a block begins behind the context, whose entries are all written

    def __init__(self, context: DrafterContext, folder: str) -> None:
        self._folder = folder
        with torch.inference_mode():
            self.model: DFlashModel = load_dflash(Path(folder), context.target, context.config.tap_layers)
        super().__init__(self.model.layout, context)
        self.taps = self.model.taps
        self.has_scores = self.model.confidence is not None and not isinstance(context.config.num_draft_tokens, int)

    @property
    def name(self) -> str:
        """The kind and the checkpoint."""
        return f"dflash:{self._folder}"

    def describe(self) -> dict[str, Any]:
        """Return the taps, the block, the number of ids that can be proposed, and the heads of DSpark."""
        config = self.model.config
        return {
            "tap_layers": self.taps,
            "block_size": config.block_size,
            "draft_vocab_size": config.draft_vocab_size,
            "markov_head": config.markov_head_type if config.markov_rank else None,
            "confidence_head": self.model.confidence is not None,
        }

    def weights(self) -> Iterable[Tensor]:
        """Return the checkpoint's weights, and those of the target that it shares."""
        return self.model.weights()

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        """Estimate what its forwards need, the logits of all blocks and their copies, and the features that wait."""
        model = self.model
        itemsize = self.model.layout.dtype.itemsize
        drafted = num_sequences * min(num_draft_tokens, model.config.most_draft_tokens)
        rows = max(prefill_rows or MAX_PREFILL_ROWS, drafted + num_sequences)
        copies = 3 if model.config.softcap is not None else 2 if model.config.output_scale != 1 else 1
        widths = copies * model.config.draft_vocab_size + (0 if model.target_ids is None else model.vocab_size)
        return rows * model.row_bytes + self._kept_bytes(num_sequences, rows) + drafted * widths * itemsize

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Draft chains: write the context's new entries, then run one forward over all blocks."""
        most = self.model.config.most_draft_tokens
        counts = [min(n, most) if self._is_complete(s) else 0 for s, n in zip(sequences, limits, strict=True)]
        drafting = {sequence: count for sequence, count in zip(sequences, counts, strict=True) if count}
        if not drafting:
            return Draft(torch.empty(0, dtype=torch.int64, device="cpu"), counts)
        self._catch_up(list(drafting))
        tokens, scores = self._chains(list(drafting), list(drafting.values()))
        return Draft(tokens, counts, scores=scores)

    def _projected(self, hidden_states: Tensor) -> Tensor:
        return self.model.project(hidden_states)

    def _compute(self, rows: list[Rows]) -> None:
        """Write the context's entries of queued features."""
        batch = lay_out(self._pool(), rows, torch.empty(0, dtype=torch.int64, device=self._device))
        self.model.write_context(batch, self._pool(), self._taken(rows))

    def _chains(self, members: list[Sequence], counts: list[int]) -> tuple[Tensor, Tensor | None]:
        """Return the draft tokens ``[sum(counts)]``, sequence after sequence, and their scores."""
        config = self.model.config
        num_before = 0 if config.sample_from_anchor else 1  # rows of a block before the first that drafts
        rows = [Rows(s, s.length - 1, count + num_before) for s, count in zip(members, counts, strict=True)]
        fed = [
            [s.token_ids[-1], *[config.mask_token_id] * (own.count - 1)] for s, own in zip(members, rows, strict=True)
        ]
        tokens = to_device([token for own in fed for token in own], self._device)
        batch = lay_out(self._pool(), rows, tokens)
        hidden = self.model.forward(batch, self._pool())
        if num_before:
            ends = accumulate(own.count for own in rows)
            drafting = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
            hidden = hidden[to_device(drafting, self._device)]
            tokens = tokens[to_device(drafting, self._device)]
        logits = self.model.logits(hidden)
        if self.model.markov is not None:
            drafted = self._left_to_right(members, counts, logits, hidden)
        else:  # a repetition penalty does not see what the block drafts: masks are the tokens of these rows
            offsets = to_device(list(accumulate(counts, initial=0)), self._device, torch.int32)
            drafted = self._chosen(logits, tokens, offsets, sampling_of(members, self._device))
        return drafted, self._scores(members, counts, hidden, drafted) if self.has_scores else None

    def _scores(self, members: list[Sequence], counts: list[int], hidden: Tensor, drafted: Tensor) -> Tensor:
        """Return the scores of draft tokens; ``hidden`` are the rows that drafted them."""
        assert self.model.confidence is not None
        previous = drafted.roll(1)
        firsts = to_device(list(accumulate(counts[:-1], initial=0)), self._device)
        previous[firsts] = to_device([s.token_ids[-1] for s in members], self._device)
        return self.model.confidence.scores(hidden, previous, counts)

    def _left_to_right(self, members: list[Sequence], counts: list[int], logits: Tensor, hidden: Tensor) -> Tensor:
        """Choose the tokens of row after row, with the Markov head's bias by the token before."""
        assert self.model.markov is not None
        firsts = list(accumulate(counts, initial=0))
        previous = to_device([s.token_ids[-1] for s in members], self._device)
        state: Tensor | None = None
        drafted: list[Tensor] = []
        before = list(range(len(members)))
        for num_rows, chosen in stages(counts):
            sampling = sampling_of([members[i] for i in chosen], self._device, ahead=len(drafted))
            if chosen != before:
                kept = to_device([before.index(i) for i in chosen], self._device)
                previous = previous[kept]
                state = None if state is None else state[kept]
            each = torch.arange(len(chosen) + 1, dtype=torch.int32, device=self._device)
            for _ in range(num_rows):
                rows = to_device([firsts[i] + len(drafted) for i in chosen], self._device)
                bias, state = self.model.markov.bias(previous, hidden[rows], state)
                previous = self._chosen(logits[rows] + bias, previous, each, sampling)
                sampling = sampling and after(sampling, previous)
                drafted.append(previous)
            before = chosen
        return torch.cat(drafted)[to_device(by_sequence(counts), self._device)]

    def _chosen(self, logits: Tensor, fed: Tensor, offsets: Tensor, sampling: Sampling | None) -> Tensor:
        """Choose each row's token ``[N]``, by the rule and with the noise by which the target will choose its own.

        Args:
            logits: ``[N, draft_vocab_size]``, sequence after sequence.
            fed: ``[N]`` int64, the token of each row.
            offsets: ``[B + 1]`` int32, the first row of each sequence, and their number.
            sampling: of the ``B`` sequences, at their first rows; None: all greedily.

        """
        model = self.model
        if sampling is None:
            tokens = greedy_tokens(model.ops, logits, min(model.vocab_size, logits.shape[1]))
            return tokens if model.target_ids is None else model.target_ids[tokens]
        if model.target_ids is not None:
            logits = widened(logits, model.target_ids, model.vocab_size)
        ops = model.ops.unchecked or model.ops
        found: Tensor = ops.verify_chain(logits[:, : model.vocab_size], fed, offsets, sampling)[0]
        return found.clamp_(min=0)  # NaN logits have no token; the target rejects whatever stands for it
