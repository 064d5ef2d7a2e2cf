"""What the slots of SpecBlock's blocks draft: candidates, their log-probabilities, and how wide to branch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.shared.ranked import drawn_ranks, masked_logits
from specdec_fast.drafters.specblock.model import SpecBlockModel
from specdec_fast.drafters.specblock.tree import BEAM, Slot
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.token_masks import UNREAD

# For a request that samples, the score of a candidate by its rank: a guess of how often the target draws that token
# (0.6, 0.1, 0.05, 0.03), not measured. Sums of these numbers are exact, so equal paths have equal scores.
_SAMPLED_LOG_PROBS = (-0.5, -2.25, -3.0, -3.5)


class Candidates:
    """Names the candidates of slots.

    Args:
        model: computes logits and classes.
        device: the target's.
    """

    def __init__(self, model: SpecBlockModel, device: torch.device) -> None:
        self._model = model
        self._device = device

    def of(
        self, hidden: Tensor, logits: Tensor, owners: list[Sequence], depths: list[int], previous: list[int]
    ) -> list[list[Slot]]:
        """Return what each slot of blocks drafts.

        Args:
            hidden: ``[N, K, H]``.
            logits: ``[K * N, draft_vocab_size]``.
            owners: of each block.
            depths: of the node that each block follows; 0 for the last committed token.
            previous: the token of that node.
        """
        k = self._model.num_slots
        ids, log_probs, classes = self._model.ranked(hidden.flatten(0, 1), logits)
        ids = ids[:, :BEAM]
        log_probs = log_probs[:, :BEAM]
        ids = ids if self._model.target_ids is None else self._model.target_ids[ids]
        slots = [Slot(*of_slot) for of_slot in zip(ids.tolist(), log_probs.tolist(), classes.tolist(), strict=True)]
        sampled = [n for n, owner in enumerate(owners) if owner.samples]
        if sampled:
            places = [k * n + slot for n in sampled for slot in range(k)]
            drawn = self._drawn(
                logits[to_device(places, self._device)],
                owners=[owners[place // k] for place in places],
                ahead=[depths[place // k] + place % k for place in places],
                previous=[previous[place // k] for place in places],
            )
            for place, tokens in zip(places, drawn, strict=True):
                slots[place] = Slot(tokens, _SAMPLED_LOG_PROBS, slots[place].rank_class)
        return [slots[start : start + k] for start in range(0, len(slots), k)]

    def _drawn(self, logits: Tensor, owners: list[Sequence], ahead: list[int], previous: list[int]) -> list[list[int]]:
        """Rank tokens by the rule and with the noise by which the target will choose its own.

        Args:
            logits: ``[N, draft_vocab_size]``.
            owners: of each row.
            ahead: how many positions after its owner's next token each row chooses.
            previous: the token before that one.

        Returns:
            The first tokens of each row, different ones.
        """
        sampling = sampling_of(owners, self._device)
        assert sampling is not None
        sampling = replace(sampling, positions=sampling.positions + to_device(ahead, self._device))
        behind = to_device(previous, self._device)
        ids = self._model.target_ids
        logits = masked_logits(logits, owners, [[UNREAD] * depth for depth in ahead], ids)
        num_ranks = len(_SAMPLED_LOG_PROBS)
        ranked, _ = drawn_ranks(self._model.ops, logits, num_ranks, sampling, behind, ids, self._model.vocab_size)
        return ranked.tolist()
