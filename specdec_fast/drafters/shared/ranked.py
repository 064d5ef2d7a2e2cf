"""The likeliest next tokens of a drafter's rows, with the probability that each is the target's."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling, sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.ops import Ops
from specdec_fast.ops.sampling import gumbel
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.token_masks import WORD_BITS
from specdec_fast.runner.drafting import chosen_tokens, widened
from specdec_fast.runner.mask_rows import rows_for_drafts

# A drafter learns how often the target draws a token at temperature 1. A likely token has the largest logit more often
# than it is drawn, and an unlikely one less often. Measured with the bundled EAGLE-3 drafter (docs/design/drafters.md).
GREEDY_TEMPERATURE = 0.5


class RankedTokens(NamedTuple):
    """The first ranks of ``N`` rows.

    Attributes:
        token_ids: ``[N, num_ranks]``, the likeliest first; different ones, but for those of log-probability -inf.
        log_probs: ``[N, num_ranks]``, estimates that the token is the target's if all before it are. Minus infinity or
            NaN where there is no such token: of rows whose logits have a NaN or infinity, of all ranks.
    """

    token_ids: list[list[int]]
    log_probs: list[list[float]]


class TokenRanker:
    """Ranks a drafter's next tokens by the rule by which the target will choose its own.

    For a greedy request these are the tokens of the largest logits. For a request that samples, the first one is what
    the target would choose with these logits and its own noise, and each further one is what it would choose without
    those before it.

    The probabilities are those with which a rank would be first if a Gumbel error were added to what is ranked. For a
    greedy request these are the logits, so the probabilities are their softmax, at a temperature below 1. For a request
    that samples they are ``logits / temperature + noise``: the logits' own softmax would leave the noise out, although
    it is known and decides.

    Args:
        ops: of the target.
        vocab_size: the target's.
        target_ids: ``[draft_vocab_size]`` int64, the target's id of each of the drafter's; None if they are the same.
    """

    def __init__(self, ops: Ops, vocab_size: int, target_ids: Tensor | None = None) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._target_ids = target_ids

    def __call__(
        self,
        logits: Tensor,
        sequences: list[Sequence],
        previous: list[int],
        ahead: int,
        num_ranks: int,
        paths: list[list[int]] | None = None,
    ) -> RankedTokens:
        """Rank the next tokens of ``N`` rows, and wait for the result.

        Args:
            logits: ``[N, draft_vocab_size]``.
            sequences: of each row; a sequence may have several rows.
            previous: the token behind which each row chooses. A repetition penalty does not see the others that this
                step has drafted: it costs acceptance, no token.
            ahead: number of tokens drafted before, on the path of each row.
            num_ranks: at least 1; fewer are returned if the drafter has fewer ids.
            paths: the draft tokens in front of each row, which the masks of its sequence follow; None: masks are not
                known.
        """
        sampling = sampling_of(sequences, logits.device, ahead)
        if paths is not None:
            logits = masked_logits(logits, sequences, paths, self._target_ids)
        behind = None if sampling is None else to_device(previous, logits.device)
        ids, log_probs = self.ranks(logits, num_ranks, sampling, behind)
        return RankedTokens(ids.tolist(), log_probs.tolist())

    def ranks(
        self, logits: Tensor, num_ranks: int, sampling: Sampling | None, previous: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rank the next tokens of ``N`` rows, without waiting for the device.

        Args:
            logits: ``[N, draft_vocab_size]``.
            num_ranks: as in a call.
            sampling: how each row's token is chosen; None: all greedily.
            previous: ``[N]`` int64, see ``drawn_ranks``.

        Returns:
            ``[N, num_ranks]`` int64 ids of the target, and ``[N, num_ranks]`` float64, as in ``RankedTokens``.
        """
        num_ranks = min(num_ranks, logits.shape[1])
        if sampling is None:
            found = (logits.float() / GREEDY_TEMPERATURE).log_softmax(dim=-1).topk(num_ranks, dim=-1)
            ids = found.indices if self._target_ids is None else self._target_ids[found.indices]
            return ids, found.values.double()
        has_ranks = (logits < float("inf")).all(dim=-1, keepdim=True)  # neither NaN nor infinity
        total = (torch.nan_to_num(logits).double() / GREEDY_TEMPERATURE).logsumexp(dim=-1, keepdim=True)
        ids, values = drawn_ranks(self._ops, logits, num_ranks, sampling, previous, self._target_ids, self._vocab_size)
        temperatures = sampling.temperatures[:, None]
        noise = gumbel(self._ops.without_checks.noise_words(ids, sampling.seeds, sampling.positions))
        drawn = (values / temperatures.clamp(min=1e-6) + noise).log_softmax(dim=-1)
        log_probs = torch.where(temperatures > 0, drawn, values / GREEDY_TEMPERATURE - total)
        return ids, log_probs.masked_fill(~has_ranks, float("-inf"))


def masked_logits(
    logits: Tensor, sequences: Many[Sequence], paths: Many[Many[int]], target_ids: Tensor | None = None
) -> Tensor:
    """Return logits without the tokens that the masks of their sequences forbid, as far as these are known.

    Args:
        logits: ``[N, draft_vocab_size]``.
        sequences: of each row.
        paths: the draft tokens in front of each row, see ``rows_for_drafts``.
        target_ids: ``[draft_vocab_size]`` int64, the target's id of each id; None if they are the same.

    Returns:
        ``[N, draft_vocab_size]``, minus infinity for forbidden tokens; ``logits`` themselves without masks.
    """
    words = rows_for_drafts(sequences, paths)
    if words is None:
        return logits
    num_ids = logits.shape[1] if target_ids is None else len(target_ids)
    ids = torch.arange(num_ids, device=logits.device) if target_ids is None else target_ids
    bits = to_device(words, logits.device)[:, ids // WORD_BITS] >> (ids % WORD_BITS) & 1
    return logits.masked_fill(bits == 0, float("-inf"))


def drawn_ranks(
    ops: Ops,
    logits: Tensor,
    num_ranks: int,
    sampling: Sampling,
    previous: Tensor | None,
    target_ids: Tensor | None = None,
    vocab_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Rank each row's tokens by the rule and with the noise by which the target will choose its own.

    The first token is what the target would choose with these logits, and each further one is what it would choose
    without those before it.

    Args:
        ops: of the target.
        logits: ``[N, draft_vocab_size]``.
        num_ranks: number of tokens.
        sampling: how each row's token is chosen.
        previous: ``[N]`` int64, the token in front; a repetition penalty counts it, but no other token of this step's
            draft: that costs acceptance, no token. None is allowed if there are no penalties.
        target_ids: ``[draft_vocab_size]`` int64, the target's id of each draft id; None if they are the same.
        vocab_size: number of the target's ids, if there are ``target_ids``.

    Returns:
        Ids of the target ``[N, num_ranks]`` int64, and their logits in fp64, minus infinity where no token was left.
    """
    logits = torch.nan_to_num(logits)  # a copy; with a NaN, a row would get the same id for each rank
    if target_ids is not None:
        logits = widened(logits, target_ids, vocab_size)
    ids = []
    values = []
    for _ in range(num_ranks):
        ids.append(chosen_tokens(ops, logits, logits.shape[1], sampling, previous))
        values.append(logits.gather(1, ids[-1][:, None]))
        logits.scatter_(1, ids[-1][:, None], float("-inf"))
    return torch.stack(ids, dim=1), torch.cat(values, dim=1).double()
