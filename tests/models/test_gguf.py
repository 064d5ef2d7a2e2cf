"""Models loaded from GGUF files, against transformers' model with the dequantised weights."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.errors import ConfigError
from specdec_fast.models.gguf.config import model_config
from specdec_fast.models.gguf.loading import load_gguf
from specdec_fast.models.loading import eos_token_ids, load_model
from specdec_fast.models.quantized_linears import PackedExperts, QuantizedLinear, bytes_by_kind
from specdec_fast.planner.checkpoint import checkpoint_sizes
from specdec_fast.quantization.gguf.container import read_gguf
from specdec_fast.quantization.packed_weight import dequantized, expert_of
from specdec_fast.request.detokenizer import load_tokenizer
from specdec_fast.runner.model_memory import bytes_of, weights_of
from support.gguf_files import add_sentencepiece, add_tokenizer, write_gguf
from support.grids import each_value_once, grid

CPU = torch.device("cpu")
# As Q4_K_M and other mixtures have them: types by the part of the tensor's name. Vectors are F32.
_MIXED = {
    "attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "attn_qkv": "Q4_K", "attn_output": "Q4_0", "ffn_gate": "Q4_1",
    "ffn_up": "Q8_0", "ffn_down": "F16", "token_embd": "Q6_K", "output": "BF16", "ffn_gate_inp": "F32",
    "ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K",
}  # fmt: skip
_SIZES = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
_LAYOUTS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral nemo, heads of another size": ("llama", {"head_dim": 32, "rope_parameters": _LINEAR}),
    "qwen2": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": _ROPE}),
    "qwen3moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "rope_parameters": _ROPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("gemma2", _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "gemma3_text",
        _GEMMA
        | {
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": _LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}, "sliding_window": 8}),
}


def _mixed(name):
    return _MIXED[name.split(".")[-2]]


def _no_vocab(writer):
    writer.add_tokenizer_model("no_vocab")


def _random_model(layout, **settings):
    kind, more = _LAYOUTS[layout]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(_SIZES | more | settings))).eval()
    for weight in model.parameters():
        if weight.dim() == 1:  # norms and biases, which begin as ones and zeros
            weight.data += 0.2 * torch.randn_like(weight)
    return model


@pytest.fixture(scope="module", params=_LAYOUTS)
def written(request, tmp_path_factory):
    """A mixed file of every layout, and its model in fp64."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return SimpleNamespace(path=path, reference=write_gguf(_random_model(request.param), path, _mixed, add=_no_vocab))


# Experts, soft caps with a window, and joined linears; the tests of logits and codes have the other layouts as well.
of_few = pytest.mark.parametrize("written", grid(list(_LAYOUTS), keep=["qwen3moe", "gemma2", "phi3"]), indirect=True)


@pytest.fixture
def small(tmp_path):
    """The path of a file of a Llama in Q8_0, and a function that writes it."""
    path = tmp_path / "model.gguf"
    model = _random_model("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=64)

    def write(model=model, types=lambda _: "Q8_0", **options):
        return write_gguf(model, path, types, **options)

    return SimpleNamespace(path=path, write=write)


@torch.inference_mode()
def test_logits_are_those_of_the_dequantised_weights(written):
    """Compared in fp64, the error is at most twice that of transformers in fp32 with the dequantised weights."""
    model = load_gguf(read_gguf(written.path), torch.float32, CPU)
    tokens = torch.arange(40)[None] * 7 % 96
    expected = written.reference(tokens).logits
    in_fp32 = type(model)(written.reference.config).eval()
    in_fp32.load_state_dict(written.reference.state_dict())
    error = (model(tokens).logits - expected).abs().max()
    assert error <= 2 * (in_fp32(tokens).logits - expected).abs().max()
    assert expected.std() > 0.1


def test_codes_are_kept_and_only_embeddings_are_dequantised(written):
    model = load_gguf(read_gguf(written.path), torch.bfloat16, CPU)
    weights = written.reference.state_dict()
    quantised = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    for name, module in quantised.items():
        assert torch.equal(dequantized(module.packed, torch.float32).double(), weights[f"{name}.weight"])
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            each = [dequantized(expert_of(module.packed, expert), torch.float32) for expert in range(4)]
            assert torch.equal(torch.stack(each).double(), weights[name])
    is_tied = model.config.tie_word_embeddings
    assert ("lm_head" in quantised) == is_tied
    embeddings = model.get_input_embeddings().weight
    assert embeddings.dtype == torch.bfloat16
    assert torch.equal(embeddings, written.reference.get_input_embeddings().weight.float().bfloat16())
    kinds = bytes_by_kind(model)
    assert set(kinds) == {"int4", "int8", "bfloat16"}  # the last are those that the file has in F16 or BF16


@of_few
def test_the_plan_knows_the_bytes_without_reading_weights(written):
    sizes = checkpoint_sizes(written.path, None)
    assert sizes.weights == bytes_of(weights_of(load_gguf(read_gguf(written.path), None, CPU)))
    assert sizes.row_parameters == checkpoint_sizes(copy.deepcopy(written.reference).float(), None).row_parameters


@each_value_once
@of_few
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_equals_plain_decoding(written, dtype):
    prompts = [[1, 5, 9, 3], [1, 7, 7, 8, 7, 7, 8, 7, 7], [4]]
    params = sd.SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=True)
    plain = sd.generate(written.path, None, prompts, params, dtype=dtype, max_batch_size=1)
    drafted = sd.generate(written.path, "ngram", prompts, params, dtype=dtype, max_batch_size=3, num_draft_tokens=3)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert [output.logprobs for output in drafted] == [output.logprobs for output in plain]
    assert all(output.error is None for output in plain)


@of_few
def test_a_forward_program_computes_it(written):
    described = sd.Engine(written.path, None, dtype="bfloat16", backend="cpp").describe()
    assert described["forward_program"], described["why_no_program"]


def test_divided_frequencies_of_llama_3_1_are_read(small):
    """``rope_freqs.weight`` has what frequencies are divided by; transformers computes them from four settings."""
    scaled = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = _random_model("llama", rope_parameters=scaled)
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = plain / model.model.rotary_emb.inv_freq
    assert factors.max() > 7
    reference = small.write(model=model, add=lambda writer: writer.add_tensor("rope_freqs.weight", factors.numpy()))
    tokens = torch.arange(40)[None]
    got = load_gguf(read_gguf(small.path), torch.float32, CPU)(tokens).logits
    torch.testing.assert_close(got, reference(tokens).logits.float(), atol=1e-5, rtol=1e-5)


def test_factors_of_phi3_with_many_positions_are_read(small):
    factors = {name: np.linspace(1, last, 16, dtype=np.float32) for name, last in (("short", 1.5), ("long", 30))}
    scaled = _ROPE | {
        "rope_type": "longrope", "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32,
        "short_factor": factors["short"].tolist(), "long_factor": factors["long"].tolist(), "attention_factor": 1.25,
    }  # fmt: skip
    model = _random_model("phi3", rope_parameters=scaled, original_max_position_embeddings=32)

    def add(writer):
        writer.add_rope_scaling_attn_factors(1.25)
        for name, numbers in factors.items():
            writer.add_tensor(f"rope_factors_{name}.weight", numbers)

    reference = small.write(model=model, add=add)
    tokens = torch.arange(20)[None]
    got = load_gguf(read_gguf(small.path), torch.float32, CPU)(tokens).logits
    torch.testing.assert_close(got, reference(tokens).logits.float(), atol=1e-5, rtol=1e-5)


def test_attention_of_gemma_27b_divides_by_another_root(small):
    model = _random_model("gemma2", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    small.write(model=model)
    assert model_config(read_gguf(small.path)).query_pre_attn_scalar == 32  # a head's size
    small.write(model=model, add=lambda writer: writer.add_block_count(46))
    assert model_config(read_gguf(small.path)).query_pre_attn_scalar == 8  # hidden_size / heads


@pytest.mark.parametrize(
    ("types", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)],
)
def test_the_dtype_is_the_files_or_bf16_beside_codes(small, types, dtype):
    small.write(types=lambda _: types)
    assert load_model(small.path, None, CPU).dtype == dtype


@of_few
def test_rows_are_rounded_for_codes_of_a_file(written):
    """Also experts'; the model stays close to that with its rows as they are."""
    model = load_model(written.path, torch.float32, CPU, quantization="a8")
    kinds = set(bytes_by_kind(model))
    assert {"int4-a8", "int8-a8"} <= kinds <= {"int4-a8", "int8-a8", "float32"}
    tokens = torch.arange(40)[None] * 7 % 96
    with torch.inference_mode():
        found, expected = (each(tokens).logits for each in (model, load_model(written.path, torch.float32, CPU)))
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.25  # a router may choose other experts
    assert checkpoint_sizes(written.path, None, "a8").weights == checkpoint_sizes(written.path, None).weights


def test_experts_of_floats_stay_floats_and_those_of_two_types_are_refused(small):
    model = _random_model("qwen3moe", num_hidden_layers=1, hidden_size=64, moe_intermediate_size=32)
    reference = small.write(model=model, types=lambda _: "F32")
    loaded = load_gguf(read_gguf(small.path), None, CPU)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(loaded.get_parameter(name).double(), reference.get_parameter(name))
    for other in ("F16", "Q4_0"):
        small.write(model=model, types=lambda name, other=other: other if "ffn_up_exps" in name else "Q8_0")
        with pytest.raises(ConfigError, match=rf"ffn_gate_exps.* and 'blk.0.ffn_up_exps.weight' are {other} and Q8_0"):
            load_gguf(read_gguf(small.path), None, CPU)


def test_a_file_of_floats_can_be_rounded(small):
    small.write(types=lambda _: "F32")
    model = load_model(small.path, None, CPU, quantization="int4")
    assert set(bytes_by_kind(model)) == {"int4", "int8"}
    assert checkpoint_sizes(small.path, None, "int4").weights == bytes_of(weights_of(model))


def test_a_file_with_codes_is_not_rounded(small):
    small.write(types=lambda name: "F32" if "ffn" in name else "Q8_0")
    with pytest.raises(ConfigError, match=r"quantization='int4' .*model\.gguf' are quantised already \(Q8_0\)"):
        load_model(small.path, None, CPU, quantization="int4")
    with pytest.raises(ConfigError, match=r"quantised already \(int8\)"):
        checkpoint_sizes(small.path, None, "int4")


def _without(left_out):
    return lambda name, data, kind: None if name == left_out else data


def _with_nan(spoiled):
    def change(name, data, kind):
        if name == spoiled:
            data = data.copy()
            data[0, :2] = np.array([np.nan], np.float16).view(np.uint8)
        return data

    return change


def _shorter(shortened):
    return lambda name, data, kind: data[:-1] if name == shortened else data


_REFUSED = {
    "missing": (
        {"change": _without("blk.0.ffn_up.weight")},
        r"lacks tensors of LlamaForCausalLM: blk.0.ffn_up.weight \(1 in",
    ),
    "no embeddings": ({"change": _without("token_embd.weight")}, "lacks the tensor token_embd.weight"),
    "NaN": (
        {"change": _with_nan("blk.0.attn_q.weight")},
        "tensor 'blk.0.attn_q.weight' of '.*model.gguf' has scales that are not finite",
    ),
    "NaN in embeddings": ({"change": _with_nan("token_embd.weight")}, "tensor 'token_embd.weight' .* not finite"),
    "shape": (
        {"change": _shorter("blk.0.ffn_up.weight")},
        r"tensor 'blk.0.ffn_up.weight' .* has the shape \[63, 64\]; the metadata asks for \[64, 64\]",
    ),
    "vocabulary": (
        {"change": _shorter("token_embd.weight")},
        "has embeddings of 95 tokens, but 96 as llama.vocab_size",
    ),
    "surplus": (
        {"add": lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))},
        "tensor 'blk.0.attn_sinks.weight' .* is unknown in a llama",
    ),
    "setting": (
        {"add": lambda writer: writer.add_float32("llama.attention.clamp_kqv", 8.0)},
        "has settings that this version does not know: llama.attention.clamp_kqv",
    ),
    "experts": ({"add": lambda writer: writer.add_expert_count(4)}, "is a mixture of experts"),
    "rope": (
        {"add": lambda w: (w.add_string("llama.rope.scaling.type", "ntk"), w.add_rope_scaling_factor(2.0))},
        "has 'ntk' as llama.rope.scaling.type",
    ),
    "text for a number": (
        {"add": lambda writer: writer.add_string("llama.rope.freq_base", "10000")},
        "has '10000' as llama.rope.freq_base; expected a number",
    ),
    "no layers": (
        {"add": lambda writer: writer.kv_data[0].pop("llama.block_count")},
        "lacks llama.block_count; expected a number",
    ),
    "heads": (
        {"add": lambda w: (w.add_key_length(32), w.kv_data[0].pop("llama.rope.dimension_count"))},
        r"tensor 'blk.0.attn_q.weight' .* has the shape \[64, 64\]; the metadata asks for \[128, 64\]",
    ),
    "values": ({"add": lambda writer: writer.add_value_length(8)}, "has values of another length than keys"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_cannot_be_read_is_named(small, case):
    options, message = _REFUSED[case]
    small.write(**options)
    with pytest.raises(ConfigError, match=message):
        load_model(small.path, None, CPU)


def test_an_unknown_architecture_is_named(small):
    writer = gguf.GGUFWriter(str(small.path), "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="has the architecture 'mamba'; GGUF files are read of llama, qwen2"):
        sd.generate(small.path, None, [[1]])


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read '.*none.gguf': No such file"):
        sd.generate(str(tmp_path / "none.gguf"), None, [[1]])


def test_a_quantised_norm_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    model = _random_model("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    write_gguf(model, path, vectors=lambda name: "Q8_0" if name == "output_norm.weight" else "F32")
    with pytest.raises(ConfigError, match=r"'output_norm.weight' .* is Q8_0; only weights of linears and embeddings"):
        load_model(path, None, CPU)


@pytest.fixture(scope="module")
def demo(tmp_path_factory, target, tokenizer):
    """The bundled target in Q8_0, with its tokenizer in the file."""
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    write_gguf(target, path, lambda _: "Q8_0", add=lambda writer: add_tokenizer(writer, tokenizer))
    return path


def test_floats_give_the_bits_of_the_checkpoint(tmp_path, target, prompts, tokenizer):
    write_gguf(target, tmp_path / "demo.gguf")
    tokens = tokenizer(prompts[0], return_tensors="pt").input_ids
    model = load_model(tmp_path / "demo.gguf", None, CPU)
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, target(tokens).logits)


def test_the_tokenizer_is_the_files(demo, tokenizer, prompts):
    loaded = load_tokenizer(str(demo))
    for text in (*prompts[:8], "Grüße,  and 12 \n tabs\t"):
        assert loaded(text).input_ids == tokenizer(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)
    assert (loaded.eos_token_id, loaded.bos_token_id) == (tokenizer.eos_token_id, tokenizer.bos_token_id)


def test_text_goes_in_and_out_by_python_and_the_command_line(demo, prompts, tmp_path, capsys):
    params = sd.SamplingParams(max_new_tokens=12)
    expected = sd.generate(demo, None, prompts[:2], params, max_batch_size=1)
    assert all(output.text for output in expected)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts[:2]))
    main(
        ["generate", "--target", str(demo), "--draft", "ngram", "--prompts", str(tmp_path / "in.jsonl"),
         "--output", str(tmp_path / "out.jsonl"), "--max-new-tokens", "12"]
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == [output.text for output in expected]


def test_a_draft_model_may_be_a_file(demo, target, prompts, tokenizer):
    params = sd.SamplingParams(max_new_tokens=12)
    outputs = sd.generate(target, demo, prompts[:2], params, dtype="float32", tokenizer=tokenizer)
    expected = sd.generate(target, None, prompts[:2], params, dtype="float32", tokenizer=tokenizer)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert outputs[0].stats.mean_acceptance_length > 3  # its tokens are nearly the target's own


def test_ends_of_texts_are_the_files(small, tokenizer):
    def add(writer):
        words = [f"w{token}" for token in range(90)] + ["<|end|>", "<|im_end|>", "<|eot_id|>", "a", "b", "c"]
        writer.add_token_list(words)
        kinds = [gguf.TokenType.NORMAL] * 90 + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 4
        writer.add_token_types(kinds)
        writer.add_eos_token_id(7)
        writer.add_eot_token_id(8)
        writer.add_chat_template("{{ message.content }}<|end|><|eot_id|>")

    small.write(add=add)
    model = load_model(small.path, None, CPU)
    # 90 is a control token that the template writes; 91 it does not write, and 92 is no control token.
    assert eos_token_ids(model) == {7, 8, 90}


def test_a_sentencepiece_tokenizer_is_read_without_the_package(small):
    words = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "\u2581abc"]
    scores = [-9.0, -10.0, -11.0, -12.0, -1.0, -2.0, -3.0, -4.0]
    small.write(add=lambda writer: add_sentencepiece(writer, words, scores))
    tokenizer = load_tokenizer(str(small.path))
    tokens = tokenizer("abc ab é").input_ids
    assert tokenizer.convert_ids_to_tokens(tokens) == ["<s>", "\u2581abc", "\u2581ab", "\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "abc ab é"


def test_a_tokenizer_that_cannot_be_read_is_named(small):
    small.write(add=lambda writer: writer.add_tokenizer_model("rwkv"))
    with pytest.warns(UserWarning, match=r"the tokenizer of '.*model.gguf' cannot be read"):
        assert load_tokenizer(str(small.path)) is None
