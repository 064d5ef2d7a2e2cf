"""Makes sequences from the caller's prompts and parameters; an invalid prompt fails its own request only."""

from __future__ import annotations

from collections.abc import Mapping, Set
from numbers import Integral
from typing import Any

import torch

from specdec_fast.errors import (
    ConfigError,
    InvalidPromptError,
    MissingTokenizerError,
    PromptTooLongError,
    RequestError,
    TooManyDraftTokensError,
)
from specdec_fast.models.ragged_model import RaggedModel
from specdec_fast.request.detokenizer import Detokenizer, tokenizer_failures
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.stopping import StopStrings
from specdec_fast.sampling_params import SamplingParams, as_sampling_params

_BYTES = (bytes, bytearray, memoryview)


def as_prompt_list(prompts: Any) -> list[Any]:
    """Accept a list of prompts; one prompt (a string or a flat list of ids); or the mapping a tokenizer returns.

    Raises:
        ConfigError: ``prompts`` is none of these, or a padded tensor without its attention mask.

    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _unpadded(prompts)
    if isinstance(prompts, (*_BYTES, Set)):
        hint = "decode() it to a string" if isinstance(prompts, _BYTES) else "it has no order; pass a list"
        raise ConfigError(f"prompts is a {type(prompts).__name__}: {hint}.")
    dimensions = getattr(prompts, "ndim", None)
    if dimensions == 2:
        raise ConfigError(
            "prompts is a 2-D tensor, which does not say which ids are padding; pass one list of token ids per prompt, "
            "or the tokenizer's whole result (input_ids and attention_mask)."
        )
    try:
        items = as_list(prompts) if dimensions == 1 else list(prompts)
    except TypeError:
        raise ConfigError(
            f"prompts is a {type(prompts).__name__}; expected a list of strings or of lists of token ids."
        ) from None
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    return items


def _unpadded(encoding: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a tokenizer's result (a ``BatchEncoding``) without their padding."""
    if "input_ids" not in encoding:
        raise ConfigError(f"prompts is a mapping of {', '.join(map(repr, encoding))}; expected a list, or input_ids.")
    ids, mask = as_list(encoding["input_ids"]), as_list(encoding.get("attention_mask"))
    if isinstance(ids, (list, tuple)) and ids and isinstance(ids[0], Integral):
        ids, mask = [ids], None if mask is None else [mask]
    if not isinstance(ids, (list, tuple)) or not isinstance(mask, (list, tuple, type(None))):
        kinds = f"input_ids is a {type(ids).__name__}, attention_mask a {type(mask).__name__}"
        raise ConfigError(f"{kinds}; expected lists of prompts, or tensors.")
    if mask is None:
        return list(ids)
    if len(mask) != len(ids):
        raise ConfigError(f"attention_mask has {len(mask)} rows, input_ids has {len(ids)}; expected as many.")
    return [_without_padding(i, *(as_list(row) for row in rows)) for i, rows in enumerate(zip(ids, mask, strict=True))]


def _without_padding(index: int, ids: Any, mask: Any) -> list[Any]:
    lists = isinstance(ids, (list, tuple)) and isinstance(mask, (list, tuple))
    if not lists or len(ids) != len(mask) or any(not isinstance(bit, Integral) or bit not in (0, 1) for bit in mask):
        raise ConfigError(
            f"attention_mask of prompt {index} is {mask!r:.80}; expected one 0 or 1 for each of its input_ids, "
            f"{ids!r:.80}."
        )
    return [token for token, is_kept in zip(ids, mask, strict=True) if is_kept]


def as_list(value: Any) -> Any:
    """Return a tensor or an array as nested lists, and any other value unchanged.

    Raises:
        ConfigError: it holds no values, like a tensor on the meta device.

    """
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except Exception as error:
        raise ConfigError(f"a {type(value).__name__} among the prompts cannot be read: {error}") from error


def as_params_list(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Accept one SamplingParams for all prompts, or one each."""
    if not isinstance(params, (list, tuple)):
        return [as_sampling_params(params)] * num_prompts
    if len(params) != num_prompts:
        raise ConfigError(f"{len(params)} params for {num_prompts} prompts; pass one for all, or one each.")
    return [as_sampling_params(p) for p in params]


class RequestBuilder:
    """Checks prompts against one target and encodes them.

    Args:
        target: the model that decodes them.
        tokenizer: the target's, if known.
        most_draft_tokens: the largest K of a step; 0 if the engine decodes plainly.

    """

    def __init__(self, target: RaggedModel, tokenizer: Any | None, most_draft_tokens: int = 0) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._most_draft_tokens = most_draft_tokens

    def build(self, index: int, prompt: Any, params: SamplingParams) -> Sequence:
        """Return the sequence of one request; if it cannot be served, the sequence has already failed."""
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._target.eos_token_ids
        seed = _seed(params)
        try:
            self._expect_few_draft_tokens(params)
            token_ids = self._encode(prompt)
            max_length = self._max_length(len(token_ids), params)
            stop_strings = self._stop_strings(params)
        except RequestError as error:
            sequence = Sequence(index, [], 0, 0, params, stop_ids, seed=seed)
            sequence.fail(error)
            return sequence
        sequence = Sequence(index, token_ids, len(token_ids), max_length, params, stop_ids, seed=seed)
        sequence.stop_strings = stop_strings
        return sequence

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidPromptError("the prompt is an empty string; pass at least one character.")
            if self._tokenizer is None:
                raise InvalidPromptError(
                    "the prompt is a string, but no tokenizer is known for this target; pass tokenizer=..., "
                    "or token ids."
                )
            # A prompt with lone surrogates is not valid Unicode; fast tokenizers raise on it.
            with tokenizer_failures(InvalidPromptError, "the tokenizer cannot encode the prompt"):
                token_ids = _as_ids(self._tokenizer(prompt).input_ids)
        else:
            token_ids = _as_ids(prompt)
        if not token_ids:
            raise InvalidPromptError("the prompt has no tokens; pass at least one.")
        wrong = next((token for token in token_ids if not 0 <= token < self._target.vocab_size), None)
        if wrong is not None:
            raise InvalidPromptError(
                f"token id {wrong} is outside the target's vocabulary; expected 0 to {self._target.vocab_size - 1}."
            )
        return token_ids

    def _expect_few_draft_tokens(self, params: SamplingParams) -> None:
        """Check the request's own K; plain decoding accepts any, so that it can be the reference of every engine."""
        if 0 < self._most_draft_tokens < (params.num_draft_tokens or 0):
            raise TooManyDraftTokensError(
                f"num_draft_tokens={params.num_draft_tokens} of a request: the engine drafts at most "
                f"{self._most_draft_tokens} per step; lower it, or make the engine with a larger num_draft_tokens."
            )

    def _stop_strings(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        if self._tokenizer is None:
            raise MissingTokenizerError(
                f"stop={params.stop!r}, but no tokenizer is known for this target, so its tokens have no text; pass "
                "tokenizer=..., or use stop_token_ids."
            )
        return StopStrings(Detokenizer(self._tokenizer), params.stop)

    def _max_length(self, num_tokens: int, params: SamplingParams) -> int:
        limit = self._target.max_positions
        wanted = num_tokens + params.max_new_tokens
        if limit is None:
            return wanted
        if num_tokens > limit:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, but the target has {limit} positions; shorten the prompt to at "
                f"most {limit} tokens."
            )
        return min(wanted, limit + 1)  # the target never computes the last emitted token, so that needs no position


def _seed(params: SamplingParams) -> int | None:
    """Return the request's seed; if it has none, a new one from torch's generator; None if it is greedy."""
    if params.temperature == 0:
        return None
    return int(torch.randint(2**63 - 1, (), device="cpu")) if params.seed is None else params.seed


def _as_ids(prompt: Any) -> list[int]:
    try:
        ids: Any = None if isinstance(prompt, _BYTES) else as_list(prompt)
    except ConfigError as error:
        raise InvalidPromptError(str(error)) from error
    is_list = isinstance(ids, (list, tuple))
    if not is_list or not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        kind = type(prompt).__name__
        hint = "; decode() it first" if isinstance(prompt, _BYTES) else ""
        raise InvalidPromptError(f"the prompt is a {kind} that is neither a string nor a flat list of token ids{hint}.")
    return [int(token) for token in ids]
