"""The fields of ``transformers.GenerationConfig`` and their counterparts in ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from specdec_fast.errors import InvalidParamsError

# GenerationConfig fields with a counterpart here. Any other field that is set raises an error; none is dropped.
FROM_GENERATION_CONFIG = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop_strings",
    "num_return_sequences",
    "min_new_tokens",
    "bad_words_ids",
    "suppress_tokens",
    "sequence_bias",
    "no_repeat_ngram_size",
)
# Fields that do not change the tokens, or that `from_generation_config` reads apart from the fields above.
NEUTRAL_FIELDS = {
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
NEUTRAL_VALUES = {
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


def renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Translate fields of a generation config whose names or forms differ from those of ``SamplingParams``."""
    others = dict(values)
    for theirs, ours in (("stop_strings", "stop"), ("num_return_sequences", "n"), ("min_new_tokens", "min_tokens")):
        if theirs in others:
            others[ours] = others.pop(theirs)
    words = [*others.pop("bad_words_ids", ()), *([token] for token in others.pop("suppress_tokens", ()))]
    if words:
        others["bad_words"] = words
    processors: list[Any] = []
    if (biases := others.pop("sequence_bias", None)) is not None:
        pairs = biases.items() if isinstance(biases, Mapping) else biases
        if all(len(tokens) == 1 for tokens, _ in pairs):
            others["logit_bias"] = {tokens[0]: bias for tokens, bias in pairs}
        else:
            processors.append(_processor_of_transformers("SequenceBiasLogitsProcessor", biases))
    if (size := others.pop("no_repeat_ngram_size", None)) is not None:
        processors.append(_processor_of_transformers("NoRepeatNGramLogitsProcessor", size))
    return others | ({"logits_processors": processors} if processors else {})


def _processor_of_transformers(name: str, argument: Any) -> Any:
    """Return an object that transformers itself would make; imported here, because it takes seconds."""
    try:
        return getattr(import_module("transformers"), name)(argument)
    except ValueError as error:
        raise InvalidParamsError(f"GenerationConfig: {error}") from error
