"""The parameters of one request: :class:`SamplingParams`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from specdec_fast.errors import InvalidParamsError, NotYetSupportedError
from specdec_fast.generation_configs import FROM_GENERATION_CONFIG, NEUTRAL_FIELDS, NEUTRAL_VALUES, renamed
from specdec_fast.structured_outputs.parameters import StructuredOutputs
from specdec_fast.structured_outputs.reasoning import Reasoning

CHAT_ANSWER_TOKENS = 1024  # of an answer in a chat whose request sets no limit
# Limits of one request. They bound the time and the memory that its search for stop strings needs.
MOST_STOP_STRINGS = 1024
MOST_STOP_CHARACTERS = 16_384  # of all its stop strings together
MOST_STOP_TOKEN_IDS = 16_384
MOST_TEXTS = 16_384  # of one prompt
# Limits of what restricts its choice: a mask of the vocabulary is made of them in every step.
MOST_BIASES = 16_384
MOST_ALLOWED_IDS = 1_048_576
MOST_BAD_WORDS = 4096
MOST_BAD_WORD_TOKENS = 65_536  # ids, or characters of words that are strings, of all bad words together
_LONGEST_SHOWN = 500  # characters of a wrong value that a message repeats

# Fields of a generation config by which a server samples for a request that leaves them out.
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_PENALTY = "a number from -2 to 2 (0 changes nothing)"
_LARGEST = sys.float_info.max  # a larger integer does not fit a float

# The defaults of transformers' generate() for sampling.
_SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_k": 50}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request and when to stop.

    Sampling is exact: noise is keyed by the seed and a token's position, so a request has the same tokens with and
    without speculation, whatever the batch (``docs/design/ops.md``). Processors, restrictions, biases, penalties,
    temperature, ``top_k``, ``top_p`` and ``min_p`` apply in this order; tokens of equal score are kept or dropped
    together. Processors, restrictions, biases and penalties have an effect in greedy decoding, too.

    Attributes:
        max_new_tokens: largest number of tokens to emit, at least 1 and less than 2**31: KV slots are 32-bit. The EOS
            token counts and is part of the output. A text also ends, with the reason ``"length"``, if the target has no
            position left for another token. 0 is allowed with ``prompt_logprobs``: the prompt is scored, and nothing is
            emitted.
        temperature: 0 is greedy: the target's most likely token, the lowest id among equals.
        top_k: keep the k most likely tokens; 0 keeps all. The filters have no effect in greedy decoding.
        top_p: keep the smallest set of tokens with this much probability; 1 keeps all.
        min_p: drop tokens less likely than this share of the best one's probability; 0 keeps all.
        repetition_penalty: divide positive logits of tokens in the prompt or the output by it, and multiply negative
            ones; 1 changes nothing.
        presence_penalty: from -2 to 2: subtracted from the logit of every emitted token; 0 changes nothing.
        frequency_penalty: from -2 to 2: subtracted from the logit of every emitted token as often as it was emitted.
        logit_bias: numbers that are added to the logits of tokens, by token id; at most 16,384.
        allowed_token_ids: the ids that may be emitted, at least one; None: all. EOS ends a text only if it is among
            them.
        bad_words: words that are never emitted, at most 4,096: strings, which need a tokenizer, or lists of token ids.
            The last token of a word is forbidden where the others stand before it, in the prompt too. A string stands
            for its tokens at the beginning of a text and behind a space.
        min_tokens: EOS and ``stop_token_ids`` are forbidden until so many tokens are emitted; at most
            ``max_new_tokens``. A stop string ends the request all the same.
        logits_processors: functions ``(token_ids, logits) -> logits`` that are called in this order for every verified
            row: with the ids of prompt, emitted tokens and draft tokens in front of it (a list), and the row's logits
            (``[vocab_size]`` float32). Objects that derive from transformers' ``LogitsProcessor`` receive tensors of
            one row instead. They are called for rejected draft tokens as well, so their result may depend on their
            arguments only.
        seed: seed of the request's noise. None draws a new seed from torch's generator (``torch.manual_seed``), and
            ``GenerationOutput.seed`` returns it. Prompts with the same seed get the same noise, so give each its own
            seed.
        stop: strings that end the request, with the reason ``"stop"``. They are searched in the emitted text, across
            tokens, and not in the prompt. ``text`` ends before the first stop string, ``token_ids`` with the token that
            completes it. Special tokens have no text; use ``stop_token_ids`` for them. Needs a tokenizer. At most 1,024
            strings, of 16,384 characters together.
        include_stop_str_in_output: let ``text`` end with the stop string that ended it, of several that begin at one
            place with the shortest. By default it ends before it.
        stop_token_ids: ids that end the request like EOS, at most 16,384.
        ignore_eos: continue after the target's EOS (``stop_token_ids`` still end the request).
        logprobs: also return the log-probability of every emitted token: the float32 ``log_softmax`` of the target's
            own logits over its whole vocabulary, before temperature, penalties and filters. True (or the integer 0, as
            in vLLM) returns only these; k >= 1 also returns the k most likely tokens at every emitted one, of equal
            logits the lowest ids.
        skip_special_tokens: leave special tokens out of ``text``, as usual. False: they are part of it, and of what
            ``stop`` searches.
        structured_outputs: what the text must follow: a JSON schema, a regular expression, choices or a grammar, as a
            StructuredOutputs or a mapping of its fields, such as ``{"json": schema}``. Needs the package ``xgrammar``
            (the extra ``grammar``) and a tokenizer.
        reasoning: how the target marks what it reasons before its answer: a Reasoning, a mapping of its fields, or the
            name of a format (``"think"`` is ``<think>`` to ``</think>``). ``structured_outputs`` then holds for the
            answer behind the reasoning, and ``Reasoning.max_tokens`` limits the reasoning; without these two it has no
            effect. ``text`` has both, and ``Reasoning.split`` divides it.
        num_draft_tokens: upper bound on the request's draft tokens per step, in addition to the engine's
            ``num_draft_tokens``; 0 decodes the request plainly; None: no further bound.
        prompt_logprobs: also return the log-probability of every prompt token after the first, and the k most likely
            tokens at its place; 0: none of these; None: nothing for the prompt. They have the bits that decoding the
            same tokens returns.
        n: number of texts of the prompt, at most 16,384. Text i (from 0) samples with ``seed + i``, or without a seed
            with one of its own. They are ``n`` outputs in a row.
        priority: of requests that wait, those of a higher priority are admitted first, and of equal ones the oldest. If
            KV pages run out, the resident request of the lowest priority gives up its own, of equal ones the youngest.
            No output depends on it.

    Raises:
        InvalidParamsError: a value is out of range; the message names it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logits_processors: tuple[Any, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool | int = False
    num_draft_tokens: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    priority: int = 0
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    reasoning: Reasoning | Mapping[str, Any] | str | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, as_plain(getattr(self, each.name)))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            if not isinstance(value, Iterable):
                hint = "an empty one for none" if value is None else f"here of one element: [{value!r}]"
                raise InvalidParamsError(f"{name}={value!r}: expected a list, {hint}.")
            object.__setattr__(self, name, tuple(map(as_plain, value)))
        if _is_int(self.logprobs) and self.logprobs == 0:
            object.__setattr__(self, "logprobs", True)
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _as_words(self.bad_words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        object.__setattr__(self, "logits_processors", _as_processors(self.logits_processors))
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.reasoning is not None:
            object.__setattr__(self, "reasoning", Reasoning.of(self.reasoning))
        self._check_ranges()
        self._check_choice()
        self._check_sizes()

    @property
    def num_top_logprobs(self) -> int:
        """How many of the most likely tokens are returned at every emitted one."""
        return 0 if isinstance(self.logprobs, bool) else self.logprobs

    def _check_ranges(self) -> None:
        checks = (
            (
                "max_new_tokens",
                _is_int(self.max_new_tokens) and int(self.prompt_logprobs is None) <= self.max_new_tokens < 2**31,
                "an integer >= 1, less than 2**31 (or 0, if prompt_logprobs asks to score the prompt)",
            ),
            ("temperature", _is_finite(self.temperature) and self.temperature >= 0, "0 (greedy) or a number > 0"),
            ("top_k", _is_count(self.top_k), "an integer >= 0 (0 keeps all tokens)"),
            ("top_p", _is_real(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min_p", _is_real(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]"),
            (
                "repetition_penalty",
                _is_finite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a number > 0 (1 changes nothing)",
            ),
            ("seed", _is_seed(self.seed), "an integer from -2**63 to 2**63 - 1, or None"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings"),
            ("stop_token_ids", all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "token ids >= 0"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
            ("include_stop_str_in_output", isinstance(self.include_stop_str_in_output, bool), "True or False"),
            ("skip_special_tokens", isinstance(self.skip_special_tokens, bool), "True or False"),
            (
                "logprobs",
                isinstance(self.logprobs, bool) or _is_count(self.logprobs),
                "True, False, or an integer >= 0, the number of most likely tokens to return beside each emitted one",
            ),
            (
                "num_draft_tokens",
                self.num_draft_tokens is None or _is_count(self.num_draft_tokens),
                "an integer >= 0 (0 decodes plainly), or None for the engine's",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or _is_count(self.prompt_logprobs),
                "an integer >= 0, the number of most likely tokens to return beside each prompt token, or None",
            ),
            ("n", _is_int(self.n) and 1 <= self.n <= MOST_TEXTS, f"an integer from 1 to {MOST_TEXTS}"),
            (
                "priority",
                _is_int(self.priority) and -(2**63) <= self.priority < 2**63,
                "an integer from -2**63 to 2**63 - 1 (a higher one is served first)",
            ),
        )
        self._expect(checks)

    def _check_choice(self) -> None:
        allowed = self.allowed_token_ids
        checks = (
            ("presence_penalty", _is_real(self.presence_penalty) and -2 <= self.presence_penalty <= 2, _PENALTY),
            ("frequency_penalty", _is_real(self.frequency_penalty) and -2 <= self.frequency_penalty <= 2, _PENALTY),
            ("logit_bias", all(_is_finite(bias) for bias in self.logit_bias.values()), "finite numbers by token id"),
            ("logit_bias", all(token >= 0 for token in self.logit_bias), "token ids >= 0"),
            (
                "allowed_token_ids",
                allowed is None or (len(allowed) > 0 and all(_is_int(token) and token >= 0 for token in allowed)),
                "at least one token id >= 0, or None for all",
            ),
            (
                "bad_words",
                all(map(_is_word, self.bad_words)),
                "non-empty strings, or non-empty lists of token ids >= 0",
            ),
            (
                "min_tokens",
                _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_new_tokens,
                f"an integer from 0 to max_new_tokens, {self.max_new_tokens}",
            ),
            (
                "logits_processors",
                all(map(callable, self.logits_processors)),
                "functions (token_ids, logits) -> logits, or transformers' LogitsProcessor objects",
            ),
        )
        self._expect(checks)

    def _check_sizes(self) -> None:
        sizes = (
            ("stop", len(self.stop), MOST_STOP_STRINGS, "strings"),
            ("stop", sum(map(len, self.stop)), MOST_STOP_CHARACTERS, "characters together"),
            ("stop_token_ids", len(self.stop_token_ids), MOST_STOP_TOKEN_IDS, "token ids"),
            ("logit_bias", len(self.logit_bias), MOST_BIASES, "token ids"),
            ("allowed_token_ids", len(self.allowed_token_ids or ()), MOST_ALLOWED_IDS, "token ids"),
            ("bad_words", len(self.bad_words), MOST_BAD_WORDS, "words"),
            ("bad_words", sum(map(len, self.bad_words)), MOST_BAD_WORD_TOKENS, "characters and token ids together"),
        )
        for name, size, most, of_what in sizes:
            if size > most:
                shown = f"{getattr(self, name)!r:.{_LONGEST_SHOWN}}"
                raise InvalidParamsError(f"{name}={shown}...: {size} {of_what}; expected at most {most}.")

    def _expect(self, checks: Iterable[tuple[str, bool, str]]) -> None:
        for name, ok, expected in checks:
            if not ok:
                raise InvalidParamsError(f"{name}={getattr(self, name)!r:.{_LONGEST_SHOWN}}: expected {expected}.")

    @property
    def has_penalty(self) -> bool:
        """Whether a penalty changes the logits of tokens that were seen or emitted."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adds_to_logits(self) -> bool:
        """Whether a presence or frequency penalty or a bias is added to logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or bool(self.logit_bias)

    @property
    def edits_logits(self) -> bool:
        """Whether a penalty or a bias changes logits."""
        return self.has_penalty or self.adds_to_logits

    def with_seed_offset(self, offset: int) -> SamplingParams:
        """Return the parameters of another request of a series: those with ``seed + offset``.

        After the last seed, 2**63 - 1, comes the first one, -2**63. Without a seed, nothing changes.
        """
        if self.seed is None:
            return self
        other = copy(self)  # `replace` would check every field again
        object.__setattr__(other, "seed", (self.seed + offset + 2**63) % 2**64 - 2**63)
        return other

    def choices(self) -> list[SamplingParams]:
        """Return the parameters of each of the ``n`` texts of a prompt, as those of a request for one text."""
        if self.n == 1:
            return [self]
        one = replace(self, n=1)
        return [one.with_seed_offset(i) for i in range(self.n)]

    @classmethod
    def from_generation_config(cls, config: Any) -> SamplingParams:
        """Translate a ``transformers.GenerationConfig``.

        As in transformers, ``do_sample=False`` (or unset) means greedy decoding whatever the temperature. Sampling
        keeps the 50 most likely tokens unless ``top_k`` is set. An ``eos_token_id`` replaces the target's own.
        ``stop_strings`` become ``stop``: the tokens are the same, but ``text`` ends before the stop string, which
        transformers leaves in its output. ``num_return_sequences`` becomes ``n``. ``bad_words_ids`` and
        ``suppress_tokens`` become ``bad_words``, ``min_new_tokens`` becomes ``min_tokens``, and ``sequence_bias``
        becomes ``logit_bias``, or transformers' own processor if a sequence has several tokens.
        ``no_repeat_ngram_size`` becomes its processor.

        Raises:
            NotYetSupportedError: the config sets a field that has no counterpart here.
        """
        given = {k: v for k, v in config.to_diff_dict().items() if v is not None and k != "eos_token_id"}
        given = {k: v for k, v in given.items() if NEUTRAL_VALUES.get(k) != v}
        unknown = sorted(set(given) - set(FROM_GENERATION_CONFIG) - NEUTRAL_FIELDS)
        if unknown:
            hint = " max_length counts the prompt; use max_new_tokens." if "max_length" in unknown else ""
            raise NotYetSupportedError(
                f"GenerationConfig sets {', '.join(unknown)}, but specdec_fast has no counterpart; "
                f"unset them. Supported: {', '.join(FROM_GENERATION_CONFIG)}, eos_token_id, do_sample.{hint}"
            )
        values = {name: given[name] for name in FROM_GENERATION_CONFIG if name in given}
        values = renamed(values)
        if not given.get("do_sample", False):
            values["temperature"] = 0.0
        else:
            values = _SAMPLING_DEFAULTS | values
        if (eos := getattr(config, "eos_token_id", None)) is not None:
            values["stop_token_ids"] = eos_ids(eos)
            values["ignore_eos"] = True
        return cls(**values)


def scoring_params(top_logprobs: Any, priority: Any = 0) -> SamplingParams:
    """Return the parameters of a request that scores its prompt and emits nothing.

    Raises InvalidParamsError if the number of most likely tokens, or the priority, is not an integer in its range.
    """
    top_logprobs = as_plain(top_logprobs)
    if not _is_count(top_logprobs):
        raise InvalidParamsError(f"top_logprobs={top_logprobs!r:.{_LONGEST_SHOWN}}: expected an integer >= 0.")
    return SamplingParams(max_new_tokens=0, prompt_logprobs=top_logprobs, priority=priority)


def as_sampling_params(value: Any) -> SamplingParams:
    """Accept SamplingParams, a transformers GenerationConfig, or None for the defaults."""
    if value is None:
        return SamplingParams()
    if isinstance(value, SamplingParams):
        return value
    if hasattr(value, "to_diff_dict"):
        return SamplingParams.from_generation_config(value)
    raise InvalidParamsError(
        f"params is a {type(value).__name__}; expected SamplingParams, transformers.GenerationConfig or None."
    )


def recommended_sampling(generation_config: Any) -> dict[str, Any]:
    """Return the sampling parameters that a checkpoint's generation config sets, as fields of ``SamplingParams``.

    As in vLLM, none of transformers' defaults is among them, and ``do_sample`` has no effect.
    """
    given = {} if generation_config is None else generation_config.to_diff_dict()
    recommended = {name: given[name] for name in _RECOMMENDED if given.get(name) is not None}
    return recommended | {"top_k": 0} if recommended.get("top_k") == -1 else recommended


def eos_ids(eos_token_id: Any) -> tuple[Any, ...]:
    """Return the ids of a generation config's ``eos_token_id``: None, one id, or several, as a tensor too.

    Negative ids, with which some callers of transformers switch EOS off, stop nothing and are left out.
    """
    ids = eos_token_id.tolist() if hasattr(eos_token_id, "tolist") else eos_token_id
    several = ids if isinstance(ids, Iterable) else (ids,)
    return tuple(each for each in map(as_plain, several) if each is not None and not (_is_int(each) and each < 0))


def as_plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python scalar, and any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def _as_bias(value: Any) -> dict[int, float]:
    """Return biases by token id; the ids may be strings, as JSON's keys are."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidParamsError(f"logit_bias={value!r:.{_LONGEST_SHOWN}}: expected a mapping from token id to number.")
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        token = as_plain(key)
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20:
            token = int(token)
        if not _is_int(token):
            raise InvalidParamsError(f"logit_bias has the key {key!r:.80}; expected token ids.")
        biases[token] = as_plain(bias)
    return biases


def _as_words(value: Any) -> tuple[Any, ...]:
    """Return words as strings and tuples of ids; other values stay, for the check of them."""
    words = (value,) if isinstance(value, str) else _as_tuple("bad_words", () if value is None else value)
    is_of_ids = [isinstance(word, Iterable) and not isinstance(word, (str, bytes)) for word in words]
    return tuple(_as_tuple("bad_words", word) if own else word for word, own in zip(words, is_of_ids, strict=True))


def _as_processors(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if callable(value) and not isinstance(value, Iterable) else _as_tuple("logits_processors", value)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidParamsError(f"{name}={value!r:.{_LONGEST_SHOWN}}: expected a list.")
    listed = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(as_plain, listed if isinstance(listed, Iterable) else (listed,)))


def _is_word(word: object) -> bool:
    if isinstance(word, str):
        return bool(word.strip())
    return isinstance(word, tuple) and len(word) > 0 and all(_is_int(token) and token >= 0 for token in word)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_int(value) and value >= 0  # type: ignore[operator]


def _is_seed(value: object) -> bool:
    return value is None or (_is_int(value) and -(2**63) <= value < 2**63)  # type: ignore[operator]


def _is_finite(value: object) -> bool:
    return _is_real(value) and abs(value) <= _LARGEST  # type: ignore[arg-type]


def _is_real(value: object) -> bool:
    # a NaN compares false with everything, so every range check above rejects it
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Values of the fields that a request of OpenAI's API leaves out.
OPENAI_DEFAULTS = SamplingParams(max_new_tokens=CHAT_ANSWER_TOKENS, temperature=1.0)
