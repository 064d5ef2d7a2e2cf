"""Write a pair in the formats that other libraries read, for ``bench.engine --peer-models``.

It writes ``target`` and ``draft`` as Hugging Face checkpoints and, with the package gguf, ``target.gguf`` for llama.cpp
(Llama and Qwen3 shapes). Both checkpoints get the bundled tokenizer, because OpenVINO does not draft without one and
random pairs have none. optimum-intel makes OpenVINO's own format; it needs an older transformers, and so an environment
of its own. The command prints how to call it.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from bench.common.workload import add_workload_options, check_workload, load
from specdec_fast.assets import demo_pair

# Tensors of a layer: from the checkpoint's names to GGUF's (specified in constants.py of the gguf package).
_LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_SERVED = ("llama", "qwen3")


def write_gguf(model: PreTrainedModel, file: Path) -> None:
    """Write a model without a vocabulary, for token ids only.

    Raises:
        ValueError: the model is neither a Llama nor a Qwen3.

    """
    import gguf

    config = model.config
    if config.model_type not in _SERVED:
        raise ValueError(f"GGUF is written for {', '.join(_SERVED)}; this is a {config.model_type}.")
    writer = gguf.GGUFWriter(str(file), config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _add_tensor(writer, config, _gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{kind}"


def _add_tensor(writer: Any, config: Any, name: str, weight: Tensor) -> None:
    import gguf

    is_query = name.endswith("attn_q.weight")
    if config.model_type == "llama" and (is_query or name.endswith("attn_k.weight")):
        # GGUF's llama rotates neighbouring pairs of a head, the checkpoint rotates its two halves.
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        rows, columns = weight.shape
        weight = weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
    if weight.dim() == 1 or weight.dtype != torch.bfloat16:  # norms are read in fp32
        wide = weight.float() if weight.dim() == 1 else weight
        writer.add_tensor(name, wide.contiguous().numpy())
        return
    raw = weight.contiguous().view(torch.int16).numpy()
    writer.add_tensor(name, raw.view("uint8"), raw_dtype=gguf.GGMLQuantizationType.BF16)


def main(argv: list[str] | None = None) -> None:
    """Write the folder; print the remaining commands."""
    parser = argparse.ArgumentParser(prog="python -m bench.export_pair", description=(__doc__ or "").split("\n")[0])
    add_workload_options(parser)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write; made if it does not exist")
    args = parser.parse_args(argv)
    check_workload(parser, args)
    workload = load(args, 1)
    tokenizer = AutoTokenizer.from_pretrained(demo_pair() / "target")
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, model in (("target", workload.target), ("draft", workload.draft)):
        model.save_pretrained(args.folder / name)
        tokenizer.save_pretrained(args.folder / name)
        print(f"optimum-cli export openvino --model {args.folder / name} --weight-format "
              f"{'fp32' if model.dtype == torch.float32 else 'fp16'} {args.folder / name}-openvino")  # fmt: skip
    if importlib.util.find_spec("gguf"):
        write_gguf(workload.target, args.folder / "target.gguf")
    else:
        print("no target.gguf: pip install gguf, and run this again")


if __name__ == "__main__":
    main()
