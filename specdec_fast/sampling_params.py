"""The parameters of one request: :class:`SamplingParams`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from specdec_fast.errors import InvalidParamsError, NotYetSupportedError

CHAT_ANSWER_TOKENS = 1024  # of an answer in a chat whose request sets no limit
# Limits of one request. They bound the time and the memory that its search for stop strings needs.
MOST_STOP_STRINGS = 1024
MOST_STOP_CHARACTERS = 16_384  # of all its stop strings together
MOST_STOP_TOKEN_IDS = 16_384
_LONGEST_SHOWN = 500  # characters of a wrong value that a message repeats

# GenerationConfig fields with a counterpart here. Any other field that is set raises an error; none is dropped.
_FROM_GENERATION_CONFIG = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop_strings",
)
# Fields of a generation config by which a server samples for a request that leaves them out.
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Fields that do not change the tokens, or that `from_generation_config` reads apart from the fields above.
_NEUTRAL_GENERATION_FIELDS = {
    "bos_token_id",
    "pad_token_id",
    "eos_token_id",
    "do_sample",
    "use_cache",
    "transformers_version",
    "output_attentions",
    "output_hidden_states",
    "return_dict_in_generate",
    "_from_model_config",
}
# Fields that older generation configs contain with a value that has no effect.
_NEUTRAL_VALUES = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "early_stopping": False,
    "remove_invalid_values": False,
    "renormalize_logits": False,
}


_LARGEST = sys.float_info.max  # a larger integer does not fit a float

# The defaults of transformers' generate() for sampling.
_SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_k": 50}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request and when to stop.

    Sampling is exact: noise is keyed by the seed and a token's position, so a request has the same tokens with and
    without speculation, whatever the batch (``docs/design/ops.md``). Penalty, temperature, ``top_k``, ``top_p`` and
    ``min_p`` apply in this order, as in transformers; tokens of equal score are kept or dropped together.

    Attributes:
        max_new_tokens: largest number of tokens to emit, at least 1 and less than 2**31: KV slots are 32-bit. The EOS
            token counts and is part of the output. A text also ends, with the reason ``"length"``, if the target has no
            position left for another token.
        temperature: 0 is greedy: the target's most likely token, the lowest id among equals.
        top_k: keep the k most likely tokens; 0 keeps all. The filters have no effect in greedy decoding.
        top_p: keep the smallest set of tokens with this much probability; 1 keeps all.
        min_p: drop tokens less likely than this share of the best one's probability; 0 keeps all.
        repetition_penalty: divide positive logits of tokens in the prompt or the output by it, and multiply negative
            ones (in greedy decoding too); 1 changes nothing.
        seed: seed of the request's noise. None draws a new seed from torch's generator (``torch.manual_seed``), and
            ``GenerationOutput.seed`` returns it. Prompts with the same seed get the same noise, so give each its own
            seed.
        stop: strings that end the request, with the reason ``"stop"``. They are searched in the emitted text, across
            tokens, and not in the prompt. ``text`` ends before the first stop string, ``token_ids`` with the token that
            completes it. Special tokens have no text; use ``stop_token_ids`` for them. Needs a tokenizer. At most 1,024
            strings, of 16,384 characters together.
        stop_token_ids: ids that end the request like EOS, at most 16,384.
        ignore_eos: continue after the target's EOS (``stop_token_ids`` still end the request).
        logprobs: also return the log-probability of every emitted token: the float32 ``log_softmax`` of the target's
            own logits over its whole vocabulary, before temperature, penalties and filters.
        num_draft_tokens: upper bound on the request's draft tokens per step, in addition to the engine's
            ``num_draft_tokens``; 0 decodes the request plainly; None: no further bound.

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
    logprobs: bool = False
    num_draft_tokens: int | None = None

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
        self._check_ranges()
        self._check_sizes()

    def _check_ranges(self) -> None:
        checks = (
            (
                "max_new_tokens",
                _is_int(self.max_new_tokens) and 1 <= self.max_new_tokens < 2**31,
                "an integer >= 1, less than 2**31",
            ),
            ("temperature", _is_finite(self.temperature) and self.temperature >= 0, "0 (greedy) or a number > 0"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer >= 0 (0 keeps all tokens)"),
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
            ("logprobs", isinstance(self.logprobs, bool), "True or False"),
            (
                "num_draft_tokens",
                self.num_draft_tokens is None or (_is_int(self.num_draft_tokens) and self.num_draft_tokens >= 0),
                "an integer >= 0 (0 decodes plainly), or None for the engine's",
            ),
        )
        for name, ok, expected in checks:
            if not ok:
                raise InvalidParamsError(f"{name}={getattr(self, name)!r:.{_LONGEST_SHOWN}}: expected {expected}.")

    def _check_sizes(self) -> None:
        sizes = (
            ("stop", len(self.stop), MOST_STOP_STRINGS, "strings"),
            ("stop", sum(map(len, self.stop)), MOST_STOP_CHARACTERS, "characters together"),
            ("stop_token_ids", len(self.stop_token_ids), MOST_STOP_TOKEN_IDS, "token ids"),
        )
        for name, size, most, of_what in sizes:
            if size > most:
                shown = f"{getattr(self, name)!r:.{_LONGEST_SHOWN}}"
                raise InvalidParamsError(f"{name}={shown}...: {size} {of_what}; expected at most {most}.")

    @cached_property
    def has_penalty(self) -> bool:
        """Whether a penalty changes the logits of tokens that were seen or emitted."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def adds_to_logits(self) -> bool:
        """Whether a presence or frequency penalty or a bias is added to logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or bool(self.logit_bias)

    @cached_property
    def edits_logits(self) -> bool:
        """Whether a penalty, a bias or a logits processor changes logits."""
        return self.has_penalty or self.adds_to_logits or bool(self.logits_processors)

    def with_seed_offset(self, offset: int) -> SamplingParams:
        """Return the parameters of another request of a series: those with ``seed + offset``.

        After the last seed, 2**63 - 1, comes the first one, -2**63. Without a seed, nothing changes.
        """
        if self.seed is None:
            return self
        other = copy(self)  # `replace` would check every field again
        object.__setattr__(other, "seed", (self.seed + offset + 2**63) % 2**64 - 2**63)
        return other

    @classmethod
    def from_generation_config(cls, config: Any) -> SamplingParams:
        """Translate a ``transformers.GenerationConfig``.

        As in transformers, ``do_sample=False`` (or unset) means greedy decoding whatever the temperature. Sampling
        keeps the 50 most likely tokens unless ``top_k`` is set. An ``eos_token_id`` replaces the target's own.
        ``stop_strings`` become ``stop``: the tokens are the same, but ``text`` ends before the stop string, which
        transformers leaves in its output.

        Raises:
            NotYetSupportedError: the config sets a field that has no counterpart here.
        """
        given = {k: v for k, v in config.to_diff_dict().items() if v is not None and k != "eos_token_id"}
        given = {k: v for k, v in given.items() if _NEUTRAL_VALUES.get(k) != v}
        unknown = sorted(set(given) - set(_FROM_GENERATION_CONFIG) - _NEUTRAL_GENERATION_FIELDS)
        if unknown:
            hint = " max_length counts the prompt; use max_new_tokens." if "max_length" in unknown else ""
            raise NotYetSupportedError(
                f"GenerationConfig sets {', '.join(unknown)}, but specdec_fast has no counterpart; "
                f"unset them. Supported: {', '.join(_FROM_GENERATION_CONFIG)}, eos_token_id, do_sample.{hint}"
            )
        values = {name: given[name] for name in _FROM_GENERATION_CONFIG if name in given}
        if "stop_strings" in values:
            values["stop"] = values.pop("stop_strings")
        if not given.get("do_sample", False):
            values["temperature"] = 0.0
        else:
            values = _SAMPLING_DEFAULTS | values
        if (eos := getattr(config, "eos_token_id", None)) is not None:
            values["stop_token_ids"] = eos_ids(eos)
            values["ignore_eos"] = True
        return cls(**values)


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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_seed(value: object) -> bool:
    return value is None or (_is_int(value) and -(2**63) <= value < 2**63)  # type: ignore[operator]


def _is_finite(value: object) -> bool:
    return _is_real(value) and abs(value) <= _LARGEST  # type: ignore[arg-type]


def _is_real(value: object) -> bool:
    # a NaN compares false with everything, so every range check above rejects it
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Values of the fields that a request of OpenAI's API leaves out.
OPENAI_DEFAULTS = SamplingParams(max_new_tokens=CHAT_ANSWER_TOKENS, temperature=1.0)
