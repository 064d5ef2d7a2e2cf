"""What a call of transformers' ``generate`` asks for: what the engine serves, and what it refuses by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from specdec_fast.errors import ConfigError, InvalidPromptError, NotYetSupportedError

_PLAIN_CALL = "call generate without custom_generate"
_SEVERAL_TEXTS = f"sample several texts with do_sample=True and num_return_sequences, or {_PLAIN_CALL}"
_GREEDY = f"decode greedily, sample with do_sample=True, or {_PLAIN_CALL}"

# Fields of a GenerationConfig without a counterpart: the values that have no effect, and what to do about others.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), f"there is no beam search; {_SEVERAL_TEXTS}"),
    "num_beam_groups": ((1,), f"there is no beam search; {_SEVERAL_TEXTS}"),
    "diversity_penalty": ((0.0,), f"there is no beam search; {_SEVERAL_TEXTS}"),
    "constraints": ((), f"there is no beam search; use prefix_allowed_tokens_fn, or {_PLAIN_CALL}"),
    "force_words_ids": ((), f"there is no beam search; use prefix_allowed_tokens_fn, or {_PLAIN_CALL}"),
    "penalty_alpha": ((0.0,), f"there is no contrastive search; {_GREEDY}"),
    "dola_layers": ((), f"there is no DoLa decoding; {_GREEDY}"),
    "guidance_scale": ((1.0,), f"there is no classifier-free guidance; unset it, or {_PLAIN_CALL}"),
    "encoder_repetition_penalty": ((1.0,), "use repetition_penalty"),
    "encoder_no_repeat_ngram_size": ((0,), "use no_repeat_ngram_size"),
    "assistant_early_exit": ((), 'use draft="self", which drafts with rounded weights of the model'),
    "assistant_ensemble_weight": ((0.0,), "the tokens are those of the model alone; unset it"),
    "speculation_type": ((), 'pass the drafter as draft=..., such as draft="dflash:FOLDER"'),
    "is_assistant": ((False,), "only the model that verifies is decoded; unset it"),
    "output_attentions": ((False,), f"the engine keeps no attention weights; {_PLAIN_CALL}"),
    "output_hidden_states": ((False,), f"the engine keeps no hidden states; {_PLAIN_CALL}"),
    "cache_implementation": (("dynamic", "dynamic_full", "static"), "the engine has a paged KV cache; unset it"),
}
# Those that are read here or act through logits processors and stopping criteria, which `generate` makes of them.
_SERVED = frozenset(
    (
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "max_time",
        "stop_strings",
        "eos_token_id",
        "pad_token_id",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "renormalize_logits",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "token_healing",
        "watermarking_config",
        "num_return_sequences",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "use_mtp",
        "prompt_lookup_num_tokens",
        "num_assistant_tokens",
    )
)
# Those that change no token: they concern beams, transformers' own cache, compilation and drafts.
_NEUTRAL = frozenset(
    (
        "early_stopping",
        "length_penalty",
        "use_cache",
        "cache_config",
        "max_cache_len",
        "low_memory",
        "prefill_chunk_size",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "bos_token_id",
        "decoder_start_token_id",
        "transformers_version",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "max_matching_ngram_size",
        "assistant_lookbehind",
        "target_lookbehind",
    )
)
# Arguments of the model's forward that `generate` prepares, or that have no effect here.
_OWN_KEYWORDS = frozenset(
    (
        "attention_mask",
        "position_ids",
        "use_cache",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "tokenizer",
    )
)
_CACHES = ("past_key_values", "cache_params", "cache")
_DEFAULT_ASSISTANT_TOKENS = 20  # of GenerationConfig.num_assistant_tokens


def dropped_arguments(model: PreTrainedModel) -> Mapping[str, Any]:
    """Return the local variables of the ``generate`` call that decodes ``model`` now; none if there is no such call.

    ``generate`` passes a callable neither ``assistant_model`` nor ``streamer`` nor ``synced_gpus``, although it
    receives them (transformers 5.17 to 5.24), so they are read where they are.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def expect_served(model: PreTrainedModel, config: GenerationConfig, keywords: Mapping[str, Any]) -> None:
    """Raise a NotYetSupportedError that names the first thing in a call which has no counterpart.

    ``keywords`` are the arguments of the model's forward.
    """
    if model.config.is_encoder_decoder:
        raise NotYetSupportedError(
            f"{type(model).__name__} is an encoder-decoder model, but the engine serves decoders only; {_PLAIN_CALL}."
        )
    for name, (neutral, instead) in _REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            raise NotYetSupportedError(f"generate was called with {name}={value!r:.80}; {instead}.")
    for name in vars(GenerationConfig()):
        is_known = name in _REFUSED or name in _SERVED or name in _NEUTRAL or name.startswith("_")
        if not is_known and getattr(config, name, None) is not None:
            value = getattr(config, name)
            raise NotYetSupportedError(
                f"generate was called with {name}={value!r:.80}, which the engine does not know; unset it."
            )
    for name, value in keywords.items():
        if name in _CACHES:
            if getattr(value, "_is_user_defined", False):
                raise NotYetSupportedError(
                    f"generate was called with {name}, but the engine has a KV cache of its own; pass the whole text, "
                    "and engine_config=EngineConfig(prefix_cache=True) to compute equal beginnings once."
                )
        elif name not in _OWN_KEYWORDS and value is not None:
            raise NotYetSupportedError(
                f"generate was called with {name}, but the engine decodes token ids only; pass input_ids and "
                f"attention_mask, or {_PLAIN_CALL}."
            )
    if torch.is_autocast_enabled(model.device.type):
        raise NotYetSupportedError(
            f"generate was called under torch.autocast({model.device.type!r}), but the engine computes in the dtype of "
            "the weights; leave the context, or load the model in the other dtype."
        )


def chosen_draft(config: GenerationConfig, draft: Any, assistant_model: Any) -> Any:
    """Return the drafter that a call asks for, as ``Engine`` takes it; None if it asks for none.

    Raises ConfigError if it asks for several.
    """
    asked = {
        "draft": draft,
        "assistant_model": assistant_model,
        "prompt_lookup_num_tokens": "ngram" if getattr(config, "prompt_lookup_num_tokens", None) else None,
        "use_mtp": "mtp" if getattr(config, "use_mtp", None) else None,
    }
    named = [name for name, value in asked.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"generate was called with {' and '.join(named)}; expected one drafter.")
    return asked[named[0]] if named else None


def asked_draft_tokens(config: GenerationConfig, num_draft_tokens: Any) -> Any:
    """Return the K that a call asks for; None for the engine's default."""
    if num_draft_tokens is not None:
        return num_draft_tokens
    if (lookup := getattr(config, "prompt_lookup_num_tokens", None)) is not None:
        return lookup
    assistant = getattr(config, "num_assistant_tokens", None)
    return None if assistant == _DEFAULT_ASSISTANT_TOKENS else assistant


def prompts_of(input_ids: Tensor, keywords: Mapping[str, Any]) -> list[list[int]]:
    """Return the ids of every row without its padding, wherever that is.

    Raises:
        InvalidPromptError: a row has no tokens.
        NotYetSupportedError: ``position_ids`` do not count the tokens of a row from 0.

    """
    mask = keywords.get("attention_mask")
    is_token = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    positions = keywords.get("position_ids")
    if positions is not None:
        expected = (is_token.long().cumsum(dim=-1) - 1).expand_as(positions)
        if not torch.equal(positions[is_token.expand_as(positions)], expected[is_token.expand_as(positions)]):
            raise NotYetSupportedError(
                "generate was called with position_ids that do not count the tokens of each row from 0; leave them out."
            )
    empty = (~is_token.any(dim=1)).nonzero().flatten().tolist() if is_token.shape[1] else range(len(input_ids))
    if empty:
        raise InvalidPromptError(f"row {empty[0]} has no tokens behind its attention_mask; pass at least one.")
    return [row[own].tolist() for row, own in zip(input_ids, is_token, strict=True)]
