"""Makes sequences from the caller's prompts and parameters; an invalid prompt fails its own request only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from specdec_fast.errors import (
    ConfigError,
    GrammarError,
    InvalidParamsError,
    InvalidPromptError,
    MissingTokenizerError,
    PromptTooLongError,
    RequestError,
    TooManyDraftTokensError,
)
from specdec_fast.models.model_checks import why_fewer_positions
from specdec_fast.request.detokenizer import detokenizer_of, tokenizer_failures
from specdec_fast.request.prompt_options import PromptOptions
from specdec_fast.request.prompts import encode_prompt
from specdec_fast.request.reasoning_mask import ReasoningMask
from specdec_fast.request.restrictions import masks_of
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.stopping import StopStrings
from specdec_fast.request.token_bounds import least_tokens
from specdec_fast.request.token_masks import TokenMask, TokenMasks
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.sampling_params import SamplingParams, as_sampling_params
from specdec_fast.structured_outputs.compiling import Grammars
from specdec_fast.structured_outputs.parameters import StructuredOutputs
from specdec_fast.structured_outputs.reasoning import Reasoning, ReasoningState, special_marks, state_behind_prompt

_DEFAULTS = PromptOptions()


def as_params_list(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Accept one SamplingParams for all prompts, or a list with one for each."""
    if not isinstance(params, (list, tuple)):
        return [as_sampling_params(params)] * num_prompts
    if len(params) != num_prompts:
        raise ConfigError(f"{len(params)} params for {num_prompts} prompts; pass one for all, or one for each.")
    return [as_sampling_params(p) for p in params]


class RequestBuilder:
    """Checks prompts against one target and encodes them.

    ``most_draft_tokens`` is the largest K that a request may name; 0 if the engine decodes plainly, which takes any.
    ``grammars`` keeps what was compiled for other builders of the same target; None: for this one only.
    """

    def __init__(
        self,
        target: RaggedModel,
        tokenizer: Any | None,
        most_draft_tokens: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._most_draft_tokens = most_draft_tokens
        self._grammars = grammars or Grammars(tokenizer, target.vocab_size, target.eos_token_ids)

    def build(
        self,
        index: int,
        prompt: Any,
        params: SamplingParams,
        options: PromptOptions = _DEFAULTS,
        seed: int | None = None,
        choice: int = 0,
        may_compile: bool = True,
    ) -> Sequence:
        """Return the sequence of one request, number ``index`` of its call; it has failed if it cannot be served.

        ``seed`` is from ``seed``, if it was drawn before; else it is drawn here, with the errors of ``seed``.
        ``choice`` is the number of the text among the ``n`` of its prompt. Raises NotCompiledError unless
        ``may_compile`` is true, if the request's grammar has to be compiled.
        """
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._target.eos_token_ids
        seed = self.seed(params) if seed is None else seed
        try:
            self._expect_few_draft_tokens(params)
            token_ids = self._encode(prompt, options, self._expect_possible)
            max_length = self._max_length(len(token_ids), params)
            stop_strings = self._stop_strings(params, stop_ids)
            masks = masks_of(params, token_ids, stop_ids, self._tokenizer, self._target.vocab_size)
            masks += self._grammar_masks(params, stop_ids, token_ids, options, may_compile)
        except RequestError as error:
            sequence = Sequence(index, [], 0, 0, params, stop_ids, seed=seed, choice=choice)
            sequence.fail(error)
            return sequence
        sequence = Sequence(index, token_ids, len(token_ids), max_length, params, stop_ids, seed=seed, choice=choice)
        sequence.stop_strings = stop_strings
        if masks:
            sequence.masks = TokenMasks(masks, self._target.vocab_size)
        return sequence

    def build_choices(
        self,
        index: int,
        prompt: Any,
        params: SamplingParams,
        options: PromptOptions,
        seeds: list[int | None],
        may_compile: bool = True,
    ) -> Iterator[Sequence]:
        """Yield the sequences of the ``n`` texts of a prompt, which is encoded once.

        ``seeds`` are from ``seeds``; the other arguments are those of ``build``.
        """
        encoded: list[int] = []
        for choice, (params_of_choice, seed) in enumerate(zip(params.choices(), seeds, strict=True)):
            sequence = self.build(index, encoded or prompt, params_of_choice, options, seed, choice, may_compile)
            encoded = sequence.token_ids.copy()
            yield sequence

    def encode(self, prompt: Any, options: PromptOptions = _DEFAULTS) -> list[int]:
        """Return a prompt's ids, also of one too long for the target. Raises a RequestError that says what is wrong."""
        return self._encode(prompt, options, lambda text: None)

    def _encode(self, prompt: Any, options: PromptOptions, expect_text: Callable[[str], None]) -> list[int]:
        token_ids = encode_prompt(self._tokenizer, prompt, options, expect_text)
        if not token_ids:
            raise InvalidPromptError("the prompt has no tokens; pass at least one.")
        wrong = next((token for token in token_ids if not 0 <= token < self._target.vocab_size), None)
        if wrong is not None:
            raise InvalidPromptError(
                f"token id {wrong} is outside the target's vocabulary; expected 0 to {self._target.vocab_size - 1}."
            )
        return token_ids

    def _expect_possible(self, text: str) -> None:
        """Refuse a text whose characters alone say that it is too long; to tokenise megabytes would take seconds."""
        limit = self._target.max_positions
        if limit is None or len(text) <= limit:
            return
        num_tokens = least_tokens(self._tokenizer, text)
        if num_tokens > limit:
            raise self._too_long(f"{len(text)} characters, so at least {num_tokens} tokens", limit)

    def _too_long(self, size: str, limit: int) -> PromptTooLongError:
        return PromptTooLongError(
            f"the prompt has {size}, but the target can serve {limit} positions"
            f"{why_fewer_positions(self._target.hf.config)}; shorten the prompt to at most {limit} tokens."
        )

    def _expect_few_draft_tokens(self, params: SamplingParams) -> None:
        """Check the request's own K; plain decoding accepts any, so that it can be the reference of every engine."""
        if 0 < self._most_draft_tokens < (params.num_draft_tokens or 0):
            raise TooManyDraftTokensError(
                f"num_draft_tokens={params.num_draft_tokens} of a request: the engine drafts at most "
                f"{self._most_draft_tokens} per step; lower it, or make the engine with a larger num_draft_tokens."
            )

    def _stop_strings(self, params: SamplingParams, stop_ids: frozenset[int]) -> StopStrings | None:
        if not params.stop:
            return None
        if self._tokenizer is None:
            raise MissingTokenizerError(
                f"stop={params.stop!r:.80}, but no tokenizer is known for this target, so its tokens have no text; "
                "pass tokenizer=..., or use stop_token_ids."
            )
        detokenizer = detokenizer_of(self._tokenizer, params, stop_ids)
        return StopStrings(detokenizer, params.stop, params.include_stop_str_in_output)

    def _grammar_masks(
        self,
        params: SamplingParams,
        stop_ids: frozenset[int],
        prompt_ids: list[int],
        options: PromptOptions,
        may_compile: bool,
    ) -> list[TokenMask]:
        """Return the masks of what the answer must follow, and of the reasoning before it."""
        asked = params.structured_outputs
        reasoning = params.reasoning if isinstance(params.reasoning, Reasoning) else None
        if asked is None and (reasoning is None or reasoning.max_tokens is None):
            return []
        state = ReasoningState.ENDED
        if reasoning is not None:
            state = self._reasoning_state(reasoning, params, prompt_ids, options)
        skips_special = params.skip_special_tokens
        masks: list[TokenMask] = []
        if isinstance(asked, StructuredOutputs):
            before = None if reasoning is None else reasoning.grammar(state)
            masks += self._grammars.masks(asked, stop_ids, skips_special, before, may_compile)
        if reasoning is not None and state is not ReasoningState.ENDED:
            tokens = self._grammars.token_texts(skips_special, may_compile)
            size = self._target.vocab_size
            masks.append(ReasoningMask(reasoning, state, tokens, stop_ids, size, self._grammars.encode))
        return masks

    def _reasoning_state(
        self, reasoning: Reasoning, params: SamplingParams, prompt_ids: list[int], options: PromptOptions
    ) -> ReasoningState:
        """Return where the prompt leaves the model.

        Raises:
            GrammarError: special tokens mark the reasoning, and the request's text leaves them out.
        """
        tokenizer = self._tokenizer
        skips_special = tokenizer is not None and params.skip_special_tokens
        with tokenizer_failures(GrammarError, "reasoning: the tokenizer cannot read its marks, or the prompt's end"):
            skipped = special_marks(reasoning, tokenizer) if skips_special else []
            state = state_behind_prompt(reasoning, tokenizer, prompt_ids, options.continue_final_message)
        if skipped:
            raise GrammarError(
                f"reasoning: {skipped[0]!r:.80} is a special token of the tokenizer, which a text leaves out; "
                "pass skip_special_tokens=False."
            )
        return state

    def _max_length(self, num_tokens: int, params: SamplingParams) -> int:
        limit = self._target.max_positions
        wanted = num_tokens + params.max_new_tokens
        if limit is None:
            return wanted
        if num_tokens > limit:
            raise self._too_long(f"{num_tokens} tokens", limit)
        return min(wanted, limit + 1)  # the target never computes the last emitted token, so that needs no position

    def seeds(self, params: SamplingParams) -> list[int | None]:
        """Return the seeds of the ``n`` texts of a prompt, with the errors of ``seed``."""
        return [self.seed(choice) for choice in params.choices()]

    def seed(self, params: SamplingParams) -> int | None:
        """Return the request's seed; if it has none, a new one from torch's generator; None if it is greedy.

        Raises InvalidParamsError if the target is sharded over processes, and the request samples without a seed.
        """
        if params.temperature == 0:
            return None
        if params.seed is None and self._target.needs_same_calls:
            raise InvalidParamsError(
                "a request samples without a seed, but the target is sharded over processes, each of which would draw "
                "its own; pass seed=..."
            )
        return int(torch.randint(2**63 - 1, (), device="cpu")) if params.seed is None else params.seed
