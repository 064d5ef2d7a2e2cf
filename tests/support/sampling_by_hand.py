"""The rule of sampling in plain Python numbers, token id by token id."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

WORD = 2**32
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}  # a rule that changes nothing


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Ten rounds as the paper's figure draws them, in integers that cannot overflow."""
    c, k = list(counter), list(key)
    for _ in range(10):
        products = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            products[1] // WORD ^ c[1] ^ k[0],
            products[1] % WORD,
            products[0] // WORD ^ c[3] ^ k[1],
            products[0] % WORD,
        ]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


def noise_by_hand(vocab_size: int, seed: int, position: int) -> list[float]:
    key = (seed % WORD, seed // WORD % WORD)
    noise = []
    for block in range(-(-vocab_size // 4)):
        words = philox_by_hand((block, position % WORD, position // WORD, 0), key)
        noise += [-math.log(-math.log((word + 0.5) / WORD)) for word in words]
    return noise[:vocab_size]


def target_probs_by_hand(logits: list[float], seen: set[int], rule: dict[str, float]) -> list[float]:
    """The distribution that a token is drawn from: what ``transformers`` makes of a row in float64, ties kept."""
    z = list(logits)
    for token in seen:
        if 0 <= token < len(z):
            z[token] = z[token] * rule["penalty"] if z[token] < 0 else z[token] / rule["penalty"]
    best = max(z)
    weights = {i: math.exp((x - best) / rule["temperature"]) for i, x in enumerate(z)}
    if 0 < rule["top_k"] < len(z):
        smallest = sorted(weights.values(), reverse=True)[int(rule["top_k"]) - 1]
        weights = {i: w for i, w in weights.items() if w >= smallest}
    if rule["top_p"] < 1:
        total, mass = sum(weights.values()), 0.0
        for w in sorted(weights.values(), reverse=True):
            mass, smallest = mass + w, w
            if mass >= rule["top_p"] * total:
                break
        weights = {i: w for i, w in weights.items() if w >= smallest}
    weights = {i: w for i, w in weights.items() if w >= rule["min_p"]}
    return [weights.get(i, 0.0) / sum(weights.values()) for i in range(len(z))]


def edited_by_hand(
    logits: list[float], seen: set[int], emitted: list[int], rule: dict[str, Any], words: list[int] | None
) -> list[float]:
    """Mask, bias, repetition penalty, frequency and presence penalty, token id by token id."""
    z = list(logits)
    for i in range(len(z)):
        if words is not None and words[i // 32] >> (i % 32) & 1 == 0:
            z[i] = -math.inf
        z[i] += rule.get("bias", {}).get(i, 0.0)
        if i in seen:
            z[i] = z[i] * rule["penalty"] if z[i] < 0 else z[i] / rule["penalty"]
        if i in emitted:
            z[i] -= rule.get("frequency", 0.0) * emitted.count(i)
            z[i] -= rule.get("presence", 0.0)
    return z


def token_by_hand(
    logits: list[float],
    seen: set[int],
    rule: dict[str, Any],
    seed: int,
    position: int,
    emitted: list[int] | None = None,
    words: list[int] | None = None,
) -> int:
    """The argmax of log-probability plus noise."""
    if any(map(math.isnan, logits)):
        return -1
    edited = edited_by_hand(logits, seen, emitted or [], rule, words)
    if max(edited) == -math.inf and words is not None and any(word != -1 for word in words):
        return -1
    if rule["temperature"] == 0 or math.isinf(max(edited)):
        return edited.index(max(edited))
    probs = target_probs_by_hand(edited, set(), rule)
    noise = noise_by_hand(len(logits), seed, position)
    drawn = [math.log(p) + g if p > 0 else -math.inf for p, g in zip(probs, noise, strict=True)]
    return drawn.index(max(drawn))


def rule_of(sampling: Any, b: int) -> dict[str, Any]:
    names = {"temperatures": "temperature", "repetition_penalties": "penalty"}
    fields = ("temperatures", "top_k", "top_p", "min_p", "repetition_penalties")
    rule = {names.get(name, name): getattr(sampling, name)[b].item() for name in fields}
    if (added := sampling.adjustments) is not None:
        own = slice(*added.cu_bias[b : b + 2].tolist())
        rule["bias"] = dict(zip(added.bias_ids[own].tolist(), added.bias_values[own].tolist(), strict=True))
        rule["presence"] = added.presence_penalties[b].item()
        rule["frequency"] = added.frequency_penalties[b].item()
    return rule


def targets_by_hand(logits: Tensor, token_ids: Tensor, cu_seqlens: Tensor, sampling: Any) -> list[int]:
    starts, cu_seen, fed = cu_seqlens.tolist(), sampling.cu_seen.tolist(), token_ids.tolist()
    targets = []
    for b in range(len(starts) - 1):
        committed = sampling.seen_ids[cu_seen[b] : cu_seen[b + 1]].tolist()
        num_prompt = 0 if sampling.adjustments is None else int(sampling.adjustments.num_prompt[b])
        seen, emitted = set(committed), committed[num_prompt:]
        seed, position = int(sampling.seeds[b]), int(sampling.positions[b])
        for j, row in enumerate(range(starts[b], starts[b + 1])):
            seen.add(fed[row])
            emitted += [fed[row]] if j else []
            words = None if sampling.allowed is None else sampling.allowed[row].tolist()
            choice = (rule_of(sampling, b), seed, position + j, emitted, words)
            targets.append(token_by_hand(logits[row].tolist(), seen, *choice))
    return targets
