"""The model ``specdec_fast`` of lm-eval."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedModel

from specdec_fast.config import EngineConfig
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ConfigError, NotYetSupportedError
from specdec_fast.request.token_masks import TokenMasks, row_of
from specdec_fast.sampling_params import SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        normalize_gen_kwargs,
        postprocess_generated_text,
        resolve_max_length,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError(f"specdec_fast.integrations.lm_eval needs lm-eval ({error}); pip install '.[eval]'.") from None

_DEFAULT_LENGTH = 2048  # of a model whose config names none, as for lm-eval's own model
_AUTO_ROWS = 16  # of a step, for batch_size="auto"
_MOST_STEPS = 4  # in which a continuation is verified; a longer one is scored as part of its prompt


class ForcedText:
    """A ``TokenMask`` that allows one text only: its tokens are drafted at once, and verified instead of chosen."""

    reads_tokens = True  # the engine drafts what such masks force

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._place = 0

    def forced(self, most: int) -> list[int]:
        """Return the next tokens of the text."""
        return self._tokens[self._place : self._place + most]

    def advance(self, token: int) -> bool:
        """Follow a token, if it is the next one."""
        is_next = self.forced(1) == [token]
        self._place += is_next
        return is_next

    def rollback(self, count: int) -> None:
        """Take tokens back."""
        self._place -= count

    def fill(self, row: np.ndarray) -> None:
        """Allow the next token alone."""
        row &= row_of(self.forced(1), self._vocab_size)


@dataclass(frozen=True)
class _Scored:
    """A text whose last ``num_scored`` tokens are scored: those of ``forced``, and if they are more, of the prompt."""

    prompt: list[int]
    forced: list[int]
    num_scored: int


@register_model("specdec_fast")
class EngineLM(TemplateLM):  # type: ignore[misc, unused-ignore]
    """A model for lm-eval with the scores and texts of its model ``hf``, computed by an engine.

    In fp32 scores differ from those of ``hf`` by rounding only. Requests are decoded together, whatever their lengths.
    Requests with a common beginning compute it once (``prefix_cache``). Of a continuation only its own logits are
    computed: the tokens are drafted and verified, as if the model had to emit them.

    Args:
        pretrained: name, folder or loaded model, as for ``Engine``.
        draft: its drafter, for ``generate_until``; None decodes plainly.
        tokenizer: a tokenizer or its name; None: that beside the model.
        batch_size: rows of a step, at most; ``"auto"``: 16.
        max_length: tokens that the model may see; None: as ``hf`` finds it in the config. Longer contexts lose their
            beginnings.
        max_gen_toks: tokens to generate where a task sets no limit.
        add_bos_token: whether the tokenizer adds special tokens; None: its own default.
        prefix_token_id: the token in front of texts without a context; None: BOS, or EOS if there is none.
        think_end_token: a text, or a token id, up to which an answer is removed.
        chat_template_args: variables for the chat template.
        device: as in EngineConfig.
        max_batch_size: ignored; lm-eval passes it.
        draft_tokenizer: of a draft model that may have another one, or its name; None: that beside the draft model.
        **settings: other fields of EngineConfig, such as ``dtype`` and ``num_draft_tokens``.

    Raises:
        ConfigError: an argument is unknown or wrong, or there is no tokenizer.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # named as those of lm-eval's own models
        self,
        pretrained: str | PreTrainedModel,
        draft: Any = None,
        tokenizer: Any = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        device: Any = None,
        max_batch_size: Any = None,
        draft_tokenizer: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        rows = _AUTO_ROWS if str(batch_size).startswith("auto") else int(batch_size)
        tokenizers = {"tokenizer": _loaded(tokenizer), "draft_tokenizer": _loaded(draft_tokenizer)}
        config = EngineConfig.from_keywords({"max_batch_size": rows, "device": device} | settings).for_service()
        # Without a drafter there would be no draft tokens in a step, forced ones neither.
        self.engine = Engine(pretrained, "ngram" if draft is None else draft, config, **tokenizers)
        self._num_draft_tokens = 0 if draft is None else None
        self.tokenizer: Any = self.engine.tokenizer
        if self.tokenizer is None:
            raise ConfigError(f"no tokenizer is known for {self.engine.target.name}; pass tokenizer=...")
        model = self.engine.target.model
        self._device = model.device
        self._generation_config: Any = model.generation_config
        positions = self.engine.target.max_positions
        length = max_length or resolve_max_length(model.config, self.tokenizer, default=_DEFAULT_LENGTH)
        self.max_length = length if positions is None else min(length, positions)
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._think_end_token = think_end_token
        self._chat_template_args = chat_template_args or {}

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without a context."""
        found = (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return next((token for token in found if token is not None), 0)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for lm-eval's caches of requests."""
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text; no special tokens are added to one that begins with BOS."""
        adds = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            adds = False
        options = {} if adds is None else {"add_special_tokens": adds}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._chat_template_args,
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes beside results."""
        model = self.engine.target.model
        numbers = {"model_num_parameters": model.num_parameters(), "model_dtype": str(model.dtype)}
        return numbers | {"drafter": self.engine.drafter.name}

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows of ``max_length`` tokens."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            own = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        sums = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the first of the request's strings."""
        prompts: list[list[int]] = []
        params = []
        stops = []
        for context, asked in (request.args for request in requests):
            until, one = self._params_of(asked)
            room = self.max_length - one.max_new_tokens
            if room < 1:
                tokens = f"{one.max_new_tokens} tokens, but the model sees {self.max_length}"
                raise ConfigError(f"a task asks for {tokens}; lower max_gen_toks.")
            prompts.append(self._context_ids(context)[-room:])
            params.append(one)
            stops.append(until)
        outputs = self.engine.generate(prompts, params, progress=False if disable_tqdm else None)
        texts = []
        for request, output, until in zip(requests, outputs, stops, strict=True):
            texts.append(self._answer(output.raise_for_error(), until))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        texts = [self._scored(context, continuation) for _, context, continuation in requests]
        found: list[tuple[float, bool] | None] = [None] * len(texts)
        most_open = 2 * self.engine.core.scheduler.checked_max_resident()
        call = self.engine.shared.call(returns=False, ends_only=True)
        with closing(self.engine.decode(self._sequences(texts), call, most_open)) as outputs:
            for output in outputs:
                request = output.request
                if request.error is not None:
                    raise request.error
                if output.finish_reason is not None:
                    found[request.index] = _score_of(request, texts[request.index])
        scores = [score for score in found if score is not None]
        for (key, _, _), score in zip(requests, scores, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, score)
        return scores

    def _scored(self, context: list[int], continuation: list[int]) -> _Scored:
        """Return how a continuation is scored; a text that is too long loses its beginning, as for ``hf``."""
        if not context or not 0 < len(continuation) <= self.max_length:
            raise ConfigError(
                f"a continuation of {len(continuation)} tokens behind {len(context)}; expected a context, and 1 to "
                f"{self.max_length} tokens (max_length)."
            )
        text = (context + continuation)[-(self.max_length + 1) :]
        num_scored = len(continuation)
        num_steps = -(-num_scored // (self.engine.core.drafting.length_policy.max_draft_tokens + 1))
        num_forced = num_scored if num_steps <= _MOST_STEPS and num_scored < len(text) // 2 else 1
        return _Scored(text[:-num_forced], text[-num_forced:], num_scored)

    def _sequences(self, texts: list[_Scored]) -> Iterator[Any]:
        builder = self.engine.request_builder()
        vocab_size = self.engine.target.vocab_size
        for i, text in enumerate(texts):
            has_all = len(text.forced) == text.num_scored
            params = SamplingParams(
                max_new_tokens=len(text.forced),
                logprobs=1,
                prompt_logprobs=None if has_all else 0,
                ignore_eos=True,
            )
            sequence = builder.build(i, text.prompt, params)
            sequence.masks = TokenMasks([ForcedText(text.forced, vocab_size)], vocab_size)
            yield sequence

    def _context_ids(self, context: str) -> list[int]:
        bos = getattr(self.tokenizer, "bos_token", None)
        adds = False if bos is not None and context.startswith(bos) else self._add_bos_token
        options = {} if adds is None else {"add_special_tokens": adds}
        return self.tokenizer.encode(context, **options)

    def _params_of(self, asked: dict[str, Any]) -> tuple[list[str], SamplingParams]:
        """Return the strings at which a request ends, and its parameters: those of ``hf``.

        The model's own generation config applies, as in ``generate``, except for its lengths.
        """
        wanted = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
        until = handle_stop_sequences(wanted.pop("until", None), eos=self.tokenizer.decode(self.eot_token_id))
        most = wanted.pop("max_gen_toks")
        if wanted.get("temperature", 0.0) == 0.0:
            wanted.pop("temperature", None)
            wanted.setdefault("do_sample", False)
        config = copy.deepcopy(self._generation_config)
        unknown = config.update(**wanted, max_new_tokens=most)
        if unknown:
            raise NotYetSupportedError(f"a task sets {', '.join(sorted(unknown))}, which no generation config has.")
        config.max_length = None
        params = SamplingParams.from_generation_config(config)
        stop = tuple(each for each in until if each)
        return until, replace(params, stop=stop, num_draft_tokens=self._num_draft_tokens)

    def _answer(self, output: Any, until: list[str]) -> str:
        text = output.text or ""
        end = self._think_end_token
        if isinstance(end, int):
            tokens = output.token_ids
            if end in tokens:
                tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            text = text.lstrip()
        return postprocess_generated_text(text, until, end if isinstance(end, str) else None)


def _loaded(tokenizer: Any) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str) else tokenizer


def _score_of(sequence: Any, text: _Scored) -> tuple[float, bool]:
    """Return the log-probability of a scored text, and whether greedy decoding would have emitted it."""
    logprobs = list(sequence.logprobs)
    is_greedy = [next(iter(top)) == token for token, top in zip(text.forced, sequence.top_logprobs, strict=True)]
    num_in_prompt = text.num_scored - len(text.forced)
    if num_in_prompt:
        logprobs = sequence.prompt_scores.logprobs[-num_in_prompt:] + logprobs
        is_greedy += [rank == 1 for rank in sequence.prompt_scores.ranks[-num_in_prompt:]]
    return float(np.sum(logprobs, dtype=np.float64)), all(is_greedy)
