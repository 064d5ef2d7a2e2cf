"""Logits processors of a ``generate`` call: as parameters of a request where they have such, else called row by row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_fast.errors import NotYetSupportedError

# Processors of transformers whose result for a row depends on that row alone.
_ROW_WISE = frozenset(
    (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",
    )
)
# The order in which the engine applies what a request asks for. A mask (-inf) may change places with all that only
# adds to logits or scales them.
_MASK, _BIAS, _PENALTY, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = range(7)


class CallFacts(NamedTuple):
    """What decides how processors translate: see ``custom_generate``."""

    width: int  # of the padded prompts
    max_new_tokens: int
    stop_ids: frozenset[int]
    samples: bool


def translated(
    processors: Sequence[Callable[..., Any]], call: CallFacts
) -> tuple[dict[str, Any], list[Callable[..., Any]]]:
    """Return fields of ``SamplingParams``, and the processors that must be called in front of them.

    The fields are those of as many processors at the end of the list as the engine applies in the same order.

    Raises:
        NotYetSupportedError: a processor of transformers depends on more than one row, or keeps a state.
    """
    for processor in processors:
        _expect_row_wise(processor)
    values: dict[str, Any] = {}
    first = len(processors)
    lowest = inf
    has_mask = False
    for place in reversed(range(len(processors))):
        rank, own = _as_params(processors[place], call)
        if rank is None or (rank != _MASK and (rank >= lowest or (has_mask and rank > _TEMPERATURE))):
            break
        has_mask |= rank == _MASK
        lowest = lowest if rank == _MASK else min(lowest, rank)
        values = _joined(own, values)
        first = place
    return values, list(processors[:first])


def of_row(processors: Iterable[Callable[..., Any]], row: int) -> list[Callable[..., Any]]:
    """Return processors that treat a batch of one row as row ``row`` of the whole batch."""
    return [_of_row(processor, row) for processor in processors]


def _of_row(processor: Any, row: int) -> Callable[..., Any]:
    kind = type(processor)
    if kind is PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(partial(_allowed_in_row, allowed, row), 1)
    if kind is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        one = copy.copy(processor)
        one.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return one
    return processor


def _allowed_in_row(allowed: Callable[[int, Tensor], list[int]], row: int, _: int, token_ids: Tensor) -> list[int]:
    return allowed(row, token_ids)


def _expect_row_wise(processor: object) -> None:
    kind = type(processor)
    is_theirs = isinstance(processor, LogitsProcessor) and kind.__module__.startswith("transformers.")
    if is_theirs and kind.__name__ not in _ROW_WISE:
        raise NotYetSupportedError(
            f"generate was called with a {kind.__name__}, which reads other rows or keeps a state between steps; leave "
            "it out, or call generate without custom_generate."
        )


def _joined(own: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    joined = own | later
    if "bad_words" in own and "bad_words" in later:
        joined["bad_words"] = own["bad_words"] + later["bad_words"]
    if "min_tokens" in own and "min_tokens" in later:
        joined["min_tokens"] = max(own["min_tokens"], later["min_tokens"])
    return joined


def _as_params(processor: Any, call: CallFacts) -> tuple[int | None, dict[str, Any]]:
    """Return the place of a processor in the engine's order, and its fields; None if the engine has no such field."""
    translate = _TRANSLATIONS.get(type(processor))
    found = None if translate is None else translate(processor, call)
    return (None, {}) if found is None else found


def _min_length(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]] | None:
    return _min_tokens(processor, processor.min_length - call.width, call)


def _min_new_tokens(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]] | None:
    first = processor.prompt_length_to_skip - call.width
    return _min_tokens(processor, first + processor.min_new_tokens, call)


def _min_tokens(processor: Any, least: int, call: CallFacts) -> tuple[int, dict[str, Any]] | None:
    if frozenset(processor.eos_token_id.tolist()) != call.stop_ids:
        return None  # the engine forbids all ids that end a text
    return _MASK, {"min_tokens": min(max(least, 0), call.max_new_tokens)}


def _suppressed(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]]:
    return _MASK, {"bad_words": tuple((token,) for token in processor.suppress_tokens.tolist())}


def _bad_words(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]]:
    return _MASK, {"bad_words": tuple(processor.sequence_bias)}


def _sequence_bias(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]] | None:
    if any(len(tokens) != 1 for tokens in processor.sequence_bias):
        return None
    return _BIAS, {"logit_bias": {tokens[0]: bias for tokens, bias in processor.sequence_bias.items()}}


def _repetition_penalty(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]] | None:
    if isinstance(processor.prompt_ignore_length, int):
        return None
    return _PENALTY, {"repetition_penalty": processor.penalty}  # the engine's prompts have no padding to ignore


def _temperature(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]]:
    return _TEMPERATURE, {"temperature": float(processor.temperature)} if call.samples else {}


def _top_k(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]] | None:
    return _filter(_TOP_K, processor, call, {"top_k": processor.top_k})


def _top_p(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]] | None:
    if processor.min_tokens_to_keep != 1 or processor.top_p <= 0:
        return None
    return _filter(_TOP_P, processor, call, {"top_p": processor.top_p})


def _min_p(processor: Any, call: CallFacts) -> tuple[int, dict[str, Any]] | None:
    if processor.min_tokens_to_keep != 1:
        return None
    return _filter(_MIN_P, processor, call, {"min_p": processor.min_p})


def _filter(rank: int, processor: Any, call: CallFacts, values: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    if processor.filter_value != -inf:
        return None
    return rank, values if call.samples else {}  # the largest logit passes every filter


_TRANSLATIONS: dict[type, Callable[[Any, CallFacts], tuple[int, dict[str, Any]] | None]] = {
    MinLengthLogitsProcessor: _min_length,
    MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    SuppressTokensLogitsProcessor: _suppressed,
    NoBadWordsLogitsProcessor: _bad_words,
    SequenceBiasLogitsProcessor: _sequence_bias,
    RepetitionPenaltyLogitsProcessor: _repetition_penalty,
    TemperatureLogitsWarper: _temperature,
    TopKLogitsWarper: _top_k,
    TopPLogitsWarper: _top_p,
    MinPLogitsWarper: _min_p,
}
