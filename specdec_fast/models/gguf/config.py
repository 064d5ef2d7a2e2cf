"""A model's config from the metadata of a GGUF file.

``transformers`` maps the plain settings (``GGUF_CONFIG_MAPPING``). It ignores those that change how positions are
rotated, windows and heads; they are read here. A setting that neither knows is refused, because a model that ignores it
would compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from specdec_fast.errors import ConfigError
from specdec_fast.quantization.gguf.container import GGUFFile, plain_values

# llama.cpp's names of architectures, and transformers' names of the configs. Mistral's files say "llama".
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
EMBEDDINGS = "token_embd.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1: what the frequencies are divided by
LONG_ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")  # of Phi-3 with 128 k positions
_ROPE_THETA = 10000.0  # where a file has none, as in llama.cpp
_GEMMA3_LOCAL_ROPE_THETA = 10000.0  # of layers with a window; llama.cpp's, too
# Gemma models whose attention divides by the root of hidden_size / heads, not of head_dim. The files do not say it;
# llama.cpp, too, recognises them by their number of layers.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_PADDED_WITH_NONE = {"pad_token_id": None, "bos_token_id": None}  # some classes have an id of one vocabulary by default
_IGNORED = ("rope.scaling.finetuned", "tensor_data_layout")  # they change no number
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Ends of a turn in chats. Files often name one end alone; those that the chat template writes end texts, too.
_ENDS_OF_TURNS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
_CONTROL = 3  # the type of special tokens in tokenizer.ggml.token_type


class _Settings:
    """The metadata of the architecture, which remembers the keys that were asked for."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.value("general.architecture")
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        value = self.file.value(f"{self.architecture}.{name}", default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]  # some files have a number for each layer
        return value

    def number(self, name: str, default: float | None = None) -> Any:
        """Return a number. Raises ConfigError if the file has none, or several, and there is no default."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            has = "lacks" if value is None else f"has {value!r} as"
            raise self.error(f"{has} {self.architecture}.{name}; expected a number")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise self.error(f"has {value!r} as {self.architecture}.{name}; expected a positive number")
        return value

    def unknown(self) -> list[str]:
        start = f"{self.architecture}."
        names = [key.removeprefix(start) for key in self.file.fields if key.startswith(start)]
        return [start + name for name in names if name not in self._asked and name not in _IGNORED]

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{str(self.file.path)!r} {what}.")


def model_config(file: GGUFFile) -> PretrainedConfig:
    """Return the config of the model in a GGUF file.

    Raises ConfigError if its architecture is not served, or a setting is missing, unknown or not supported.
    """
    settings = _Settings(file)
    if settings.architecture not in MODEL_TYPES:
        raise settings.error(
            f"has the architecture {settings.architecture!r}; GGUF files are read of {', '.join(MODEL_TYPES)} "
            "(Mistral's are llama). Take the model's Hugging Face checkpoint"
        )
    if EMBEDDINGS not in file.tensors:
        raise settings.error(f"lacks the tensor {EMBEDDINGS}")
    values = _plain_settings(settings) | _SPECIFIC[settings.architecture](settings)
    if unknown := settings.unknown():
        raise settings.error(
            f"has settings that this version does not know: {', '.join(unknown[:3])} ({len(unknown)} in all). Take the "
            "model's Hugging Face checkpoint"
        )
    try:
        config = AutoConfig.for_model(MODEL_TYPES[settings.architecture], **_PADDED_WITH_NONE, **values)
    except Exception as error:  # configs check their values, each with errors of its own
        raise settings.error(f"has settings that do not fit together: {' '.join(str(error).split())}") from error
    config._name_or_path = str(file.path)
    return config


def generation_config(file: GGUFFile) -> GenerationConfig:
    """Return the generation config of a file: the ids at which texts end."""
    ids = [file.value(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    template = file.value("tokenizer.chat_template", "")
    turns = [end for end in _ENDS_OF_TURNS if end in template]
    if turns:
        tokens = file.value("tokenizer.ggml.tokens", [])
        types = file.value("tokenizer.ggml.token_type", [])
        ids += [token for token, word in enumerate(tokens) if word in turns and types[token : token + 1] == [_CONTROL]]
    ends = sorted({end for end in ids if end is not None})
    return GenerationConfig(eos_token_id=ends or None, bos_token_id=file.value("tokenizer.ggml.bos_token_id"))


def _plain_settings(settings: _Settings) -> dict[str, Any]:
    """Return what all architectures have."""
    file = settings.file
    hidden_size = settings.count("embedding_length")
    num_heads = settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", hidden_size // num_heads)
    if settings.count("attention.value_length", head_dim) != head_dim:
        raise settings.error("has values of another length than keys, which no served architecture has")
    vocab_size = file.tensors[EMBEDDINGS].shape[0]
    if settings.count("vocab_size", vocab_size) != vocab_size:
        raise settings.error(
            f"has embeddings of {vocab_size} tokens, but {settings.count('vocab_size')} as "
            f"{settings.architecture}.vocab_size"
        )
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": settings.count("feed_forward_length"),
        "num_hidden_layers": settings.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": settings.count("context_length"),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(settings, head_dim),
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id"),
    }


def _rope(settings: _Settings, head_dim: int) -> dict[str, Any]:
    """Return how positions are rotated."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.number("rope.freq_base", _ROPE_THETA)}
    num_rotated = settings.count("rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        if settings.architecture != "phi3":
            raise settings.error(f"rotates {num_rotated} of {head_dim} dimensions, which only phi3 may")
        parameters["partial_rotary_factor"] = num_rotated / head_dim
    kind = settings.get("rope.scaling.type", "none")
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0))
    original = settings.get("rope.scaling.original_context_length")
    attention_factor = settings.get("rope.scaling.attn_factor")
    if settings.file.tensors.keys() & set(LONG_ROPE_FACTORS):
        short, long = (_factors(settings, name) for name in LONG_ROPE_FACTORS)
        return parameters | {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original or settings.count("context_length"),
            "attention_factor": attention_factor,
        }
    if attention_factor not in (None, 1.0):
        raise settings.error(f"has {settings.architecture}.rope.scaling.attn_factor without the factors of longrope")
    if factor in (0.0, 1.0) or kind == "none":
        return parameters
    if kind == "linear":
        return parameters | {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        scaled = {"factor": factor, "original_max_position_embeddings": original}
        return parameters | {"rope_type": "yarn"} | scaled
    raise settings.error(f"has {kind!r} as {settings.architecture}.rope.scaling.type; expected none, linear or yarn")


def _factors(settings: _Settings, name: str) -> list[float]:
    tensor = settings.file.tensors.get(name)
    if tensor is None or tensor.block_type is not None:
        raise settings.error(f"lacks the tensor {name}, or has it quantised")
    factors: list[float] = plain_values(tensor).float().flatten().tolist()
    return factors


def _llama(settings: _Settings) -> dict[str, Any]:
    if settings.get("expert_count", 0):
        raise settings.error("is a mixture of experts, which is not read from GGUF files yet")
    settings.get("expert_used_count")
    names = settings.file.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in names, "mlp_bias": "blk.0.ffn_down.bias" in names}


def _qwen(settings: _Settings) -> dict[str, Any]:
    return {}


def _qwen3moe(settings: _Settings) -> dict[str, Any]:
    return {
        "num_experts": settings.count("expert_count"),
        "num_experts_per_tok": settings.count("expert_used_count"),
        "moe_intermediate_size": settings.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # the files do not say it; llama.cpp does the same
    }


def _phi3(settings: _Settings) -> dict[str, Any]:
    original = settings.get("rope.scaling.original_context_length")
    return {
        "sliding_window": settings.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original or settings.count("context_length"),
    }


def _gemma2(settings: _Settings) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scalar(settings),
        "sliding_window": settings.count("attention.sliding_window"),
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
    }


def _gemma3(settings: _Settings) -> dict[str, Any]:
    head_dim = settings.count("attention.key_length")
    local_theta = settings.number("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_THETA)
    values: dict[str, Any] = {
        "query_pre_attn_scalar": _gemma_scalar(settings),
        "sliding_window": settings.count("attention.sliding_window"),
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": _rope(settings, head_dim),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }
    pattern = settings.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        values["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        values["sliding_window_pattern"] = pattern
    return values


def _gemma_scalar(settings: _Settings) -> int:
    if settings.count("block_count") == _GEMMA_27B_LAYERS[settings.architecture]:
        return settings.count("embedding_length") // settings.count("attention.head_count")
    return settings.count("attention.key_length")


_SPECIFIC: dict[str, Callable[[_Settings], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
