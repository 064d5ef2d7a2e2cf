"""The rule by which a token is sampled: keyed noise, so that a request has the same output however it is computed.

The token at position t of a request is ``argmax(scores + noise(seed, t))``: Gumbel noise makes the argmax a sample from
``softmax(scores)`` (Gumbel 1954; the "Gumbel-max trick"). The noise is keyed by seed, position and token id, so it is
the same in plain decoding and in every verification.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.request.token_masks import ALL_ALLOWED, WORD_BITS

INVALID_TOKEN = -1

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD_MASK = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[int, int] | tuple[Tensor, Tensor]) -> Words:
    """Compute Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    The counter and the result are four tensors of int64 that hold 32-bit words, the key two words or tensors of them.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 overflows, but the shift and the mask keep the correct bits of the 64-bit product
        high0, low0 = _halves(c0 * _MULTIPLIERS[0])
        high1, low1 = _halves(c2 * _MULTIPLIERS[1])
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + _KEY_STEPS[0]) & WORD_MASK
        k1 = (k1 + _KEY_STEPS[1]) & WORD_MASK
    return c0, c1, c2, c3


def gumbel_noise(vocab_size: int, seed: int, position: int, device: torch.device) -> Tensor:
    """Return the noise of every token id at one position: ``[vocab_size]`` float64.

    Token i has word ``i % 4`` of counter ``(i // 4, position, position >> 32, 0)`` with the key ``seed``. A word x
    gives ``u = (x + 0.5) / 2**32``, which is never 0 or 1, and the noise ``-log(-log(u))``, which is at most 22.9.
    """
    blocks = torch.arange(-(-vocab_size // 4), device=device)
    zero = torch.zeros_like(blocks)
    counter = (blocks, zero + (position & WORD_MASK), zero + ((position >> 32) & WORD_MASK), zero)
    words = philox4x32(counter, (seed & WORD_MASK, (seed >> 32) & WORD_MASK))
    return gumbel(torch.stack(words, dim=1).flatten()[:vocab_size])


def sampled_tokens(
    logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor, sampling: Sampling, parents: Tensor | None = None
) -> Tensor:
    """Return the token that each row chooses, ``[T]`` int64; see ``verify_chain`` for the rule and the arguments."""
    starts = cu_seqlens.tolist()
    cu_seen = sampling.cu_seen.tolist()
    tokens = []
    for b in range(len(starts) - 1):
        committed = sampling.seen_ids[cu_seen[b] : cu_seen[b + 1]]
        paths: list[list[int]] = []  # of each row, the rows from the first to it
        for row in range(starts[b + 1] - starts[b]):
            parent = row - 1 if parents is None else int(parents[starts[b] + row])
            paths.append([*paths[parent], row] if row else [row])
            fed = token_ids[starts[b] : starts[b + 1]][paths[row]]
            scores = logits[starts[b] + row].double()
            if bool(scores.isnan().any()):
                tokens.append(INVALID_TOKEN)
                continue
            words = None if sampling.allowed is None else sampling.allowed[starts[b] + row]
            if words is not None:
                scores = _masked(scores, words)
            scores = _adjusted(scores, committed, fed, sampling, b)
            if words is not None and bool((words != ALL_ALLOWED).any()) and float(scores.max()) == -math.inf:
                tokens.append(INVALID_TOKEN)
                continue
            tokens.append(_choose(scores, sampling, b, len(paths[row]) - 1))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def gumbel(words: Tensor) -> Tensor:
    """Return the noise of random words of 32 bits, float64; see ``gumbel_noise``."""
    uniform = (words.double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log()


def _halves(product: Tensor) -> tuple[Tensor, Tensor]:
    return (product >> 32) & WORD_MASK, product & WORD_MASK


def _masked(logits: Tensor, words: Tensor) -> Tensor:
    """Make the tokens whose bits are not set impossible; see ``Sampling.allowed``."""
    ids = torch.arange(len(logits), device=logits.device)
    bits = words[ids // WORD_BITS] >> (ids % WORD_BITS) & 1
    return logits.masked_fill(bits == 0, -math.inf)


def _adjusted(logits: Tensor, committed: Tensor, fed: Tensor, sampling: Sampling, b: int) -> Tensor:
    """Apply the biases of sequence ``b``, then its penalties, as vLLM does.

    ``fed`` are the tokens of a row's path. The first of them is the last committed token, so it is counted already.
    """
    added = sampling.adjustments
    if added is not None:
        first, last = added.cu_bias[b : b + 2].tolist()
        own = _inside(added.bias_ids[first:last], logits)
        logits = logits.index_put(
            (added.bias_ids[first:last][own],), added.bias_values[first:last][own], accumulate=True
        )
    if (repetition_penalty := float(sampling.repetition_penalties[b])) != 1:
        logits = _penalised(logits, torch.cat([committed, fed]), repetition_penalty)
    if added is not None:
        emitted = torch.cat([committed[int(added.num_prompt[b]) :], fed[1:]])
        counts = emitted[_inside(emitted, logits)].bincount(minlength=len(logits)).double()
        logits = logits - float(added.frequency_penalties[b]) * counts
        logits = logits - float(added.presence_penalties[b]) * (counts > 0).double()  # a bool would make it fp32
    return logits


def _inside(ids: Tensor, logits: Tensor) -> Tensor:
    """Return which ids belong to the vocabulary; others, as of a larger target, are ignored."""
    return (ids >= 0) & (ids < len(logits))


def _penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make seen tokens less likely, each once (Keskar et al., CTRL, arXiv 1909.05858, section 4.1).

    As in transformers, a negative logit is multiplied.
    """
    seen = seen[_inside(seen, logits)]
    before = logits[seen]
    return logits.index_put((seen,), torch.where(before < 0, before * penalty, before / penalty))


def _choose(logits: Tensor, sampling: Sampling, b: int, depth: int) -> int:
    """Choose one token from the logits ``[vocab_size]`` (float64) of a row of sequence ``b``, which hold no NaN."""
    best = logits.max()
    temperature = float(sampling.temperatures[b])
    if temperature == 0 or not math.isfinite(best):
        return int((logits == best).nonzero()[0])
    scores = (logits - best) / temperature  # the largest is 0
    kept = scores >= _threshold(scores, int(sampling.top_k[b]), float(sampling.top_p[b]), float(sampling.min_p[b]))
    position = int(sampling.positions[b]) + depth
    noise = gumbel_noise(len(scores), int(sampling.seeds[b]), position, scores.device)
    drawn = torch.where(kept, scores + noise, -math.inf)
    return int((drawn == drawn.max()).nonzero()[0])


def _threshold(scores: Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """Return the lowest kept score; equal scores are kept or dropped together."""
    threshold = -math.inf
    falling = scores.sort(descending=True).values
    if 0 < top_k < len(scores):
        threshold = float(falling[top_k - 1])
    if top_p < 1:
        falling = falling[falling >= threshold]
        mass = falling.exp().cumsum(0)
        threshold = float(falling[int((mass < top_p * mass[-1]).sum())])
    if min_p > 0:
        threshold = max(threshold, math.log(min_p))
    return threshold
