"""Writes small GGUF files, with names, layouts and metadata as llama.cpp's converter writes them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}  # where transformers has another name
# Types that the package gguf cannot round to: bytes where a block has fp16 numbers, and their size for small weights.
_RANDOM = {"Q4_K": {0: 2e-4, 2: 1.5e-3}, "Q5_K": {0: 1e-4, 2: 1.5e-3}, "Q6_K": {208: 5e-5}, "IQ4_NL": {0: 1e-3}}


def architecture_of(model):
    return ARCHITECTURES.get(model.config.model_type, model.config.model_type)


def write_gguf(
    model,
    path: Path,
    types: Callable[[str], str] = lambda name: "F32",
    vectors: Callable[[str], str] = lambda name: "F32",
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    change: Callable[[str, np.ndarray, GGMLQuantizationType], object] = lambda name, data, kind: data,
):
    """Write a model, and return it in fp64 with the numbers that the file stands for.

    Args:
        model: of transformers.
        path: of the file.
        types, vectors: from the name of a matrix or a vector in the file to the name of its type.
        add: adds metadata, and overwrites what is there.
        change: from name, bytes and type of a tensor to the bytes that are written; None leaves the tensor out.
    """
    architecture = architecture_of(model)
    writer = gguf.GGUFWriter(str(path), architecture)
    _add_settings(writer, model)
    add(writer)
    key = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(key, model.config.num_hidden_layers)
    reference = copy.deepcopy(model).double()
    if model.config.model_type == "qwen3_moe":
        reference.set_experts_implementation("batched_mm")  # which computes in fp64
    stated = reference.state_dict()
    for position, (hf_name, weight) in enumerate(model.state_dict().items()):
        if hf_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for name, part in _parts(names, hf_name, weight):
            kind = GGMLQuantizationType[(types if part.dim() > 1 else vectors)(name)]
            # The router of a mixture stays in F32, as llama.cpp has it.
            kind = GGMLQuantizationType.F32 if name.endswith("ffn_gate_inp.weight") else kind
            order = _order(model.config, name, len(part))
            shift = int(architecture.startswith("gemma") and name.endswith("norm.weight"))
            data = _encoded((part.float() + shift)[order].numpy(), kind, position)
            numbers = torch.from_numpy(np.array(quants.dequantize(data, kind))).double()
            stated_part = dict(_parts(names, hf_name, stated[hf_name]))[name]
            stated_part[order] = numbers.view(part.shape) - shift
            data = change(name, data, kind)
            if data is not None:
                writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference


def _parts(names, hf_name, weight):
    """Yield the file's names and parts of a parameter: of the experts of a layer, those of its gates come first."""
    if "mlp.experts" not in hf_name:
        yield names.get_name(hf_name, try_suffixes=(".weight", ".bias")), weight
        return
    layer = hf_name.split(".")[2]
    kinds = ("gate", "up") if "gate_up" in hf_name else ("down",)
    for kind, part in zip(kinds, weight.chunk(len(kinds), dim=1), strict=True):
        yield f"blk.{layer}.ffn_{kind}_exps.weight", part


def add_tokenizer(writer, tokenizer):
    """Add a byte-level BPE tokenizer, with its special tokens as control tokens."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word for word, _ in words])
    special = set(tokenizer.all_special_tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if w in special else gguf.TokenType.NORMAL for w, _ in words])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(True)


def add_sentencepiece(writer, words, scores):
    """Add a sentencepiece tokenizer: three control tokens, the 256 byte tokens, and words with scores."""
    control = ["<unk>", "<s>", "</s>"]
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*control, *of_bytes, *words])
    writer.add_token_scores([*[0.0] * 259, *scores])
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * len(words)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_settings(writer, model):
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    elif config.model_type == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
        if head_dim != config.hidden_size // config.num_attention_heads:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    elif config.model_type == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if config.model_type.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "phi3" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type != "gemma2":  # its files have none
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        elif rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _order(config, name, num_rows):
    """Return for each row of the file the row of the checkpoint.

    llama.cpp's llama rotates neighbouring pairs of a head, transformers its two halves.
    """
    rows = torch.arange(num_rows)
    if config.model_type != "llama" or (".attn_q." not in name and ".attn_k." not in name):
        return rows
    heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
    return rows.view(heads, 2, -1).transpose(1, 2).flatten()


def _encoded(numbers, kind, seed):
    """Return the bytes of a tensor; of types that the package gguf cannot round to, random ones."""
    if kind.name not in _RANDOM:
        return quants.quantize(np.ascontiguousarray(numbers), kind)
    generator = np.random.default_rng(seed)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (*numbers.shape[:-1], numbers.shape[-1] // block_size, block_bytes)
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    for start, size in _RANDOM[kind.name].items():
        halves = np.full((*shape[:-1], 1), size, np.float16)
        blocks[..., start : start + 2] = halves.view(np.uint8)
    return blocks.reshape(*numbers.shape[:-1], -1)
