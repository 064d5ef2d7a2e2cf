"""Other libraries in ``bench.engine``: one that is missing is named, and an installed one emits our tokens."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch

from bench import export_pair
from bench.common.measurement import Measurement, MethodSetting
from bench.common.pairs import PAIRS, random_pair, random_prompts
from bench.common.workload import Workload
from bench.engine_.peers import PEERS
from bench.engine_.summary import own_batch_1_share
from specdec_fast.errors import ConfigError


def workload():
    models = random_pair(PAIRS["smoke"], torch.float32, torch.device("cpu"))
    return Workload("smoke", *models, random_prompts(5, 7, 97), 9)


@pytest.fixture(scope="module")
def plain():
    from bench.engine_.methods import PLAIN, Bench

    return Bench(workload()).method_setting(PLAIN, 1).run().outputs


@pytest.mark.parametrize("name", PEERS)
def test_a_library_that_is_not_installed_is_named(name, monkeypatch):
    find_spec = importlib.util.find_spec
    absent = ("psutil", "openvino_genai", "llama_cpp")
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module in absent else find_spec(module))
    with pytest.raises(ConfigError, match=r"is not installed; pip install '\.\[peers\]'"):
        PEERS[name].make(workload(), None)


@pytest.mark.parametrize("name", ["openvino", "openvino-speculative", "llama.cpp"])
def test_models_that_were_not_exported_are_named(name, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    with pytest.raises(ConfigError, match=r"bench\.export_pair"):
        PEERS[name].make(workload(), tmp_path)


def test_continuous_batching_of_transformers_decodes_the_same(plain):
    pytest.importorskip("psutil", reason="generate_batch() of transformers needs it")
    run = PEERS["transformers-continuous"].make(workload(), None)
    assert run(3, None).outputs == plain


def test_llama_cpp_decodes_the_same(plain, tmp_path):
    pytest.importorskip("llama_cpp", reason="pip install '.[peers]'")
    export_pair.write_gguf(workload().target, tmp_path / "target.gguf")
    run = PEERS["llama.cpp"].make(workload(), tmp_path)
    assert run(1, None).outputs == plain


@pytest.mark.parametrize("pair", ["smoke", "demo"])
def test_export(pair, tmp_path, capsys):
    """A Qwen3 as it is; a Llama with the rows of its queries and keys in pairs, as GGUF's rotation wants them."""
    gguf = pytest.importorskip("gguf", reason="pip install '.[peers]'")
    export_pair.main(["--pair", pair, str(tmp_path)])
    assert capsys.readouterr().out.count("optimum-cli export openvino") == 2
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "target.gguf").tensors}
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    config, weights = model.config, model.state_dict()
    for name in ("mlp.down_proj", "self_attn.v_proj"):
        stored = tensors[f"blk.1.{export_pair._LAYER_NAMES[name]}.weight"]
        assert np.array_equal(stored, weights[f"model.layers.1.{name}.weight"].numpy())
    query, head_dim = weights["model.layers.1.self_attn.q_proj.weight"].numpy(), config.head_dim
    stored, half = tensors["blk.1.attn_q.weight"], head_dim // 2
    second_of_a_pair = half if config.model_type == "llama" else 1
    assert np.array_equal(stored[head_dim + 1], query[head_dim + second_of_a_pair])


def test_an_export_of_another_architecture_is_refused(tmp_path):
    pytest.importorskip("gguf", reason="pip install '.[peers]'")
    model = workload().target
    model.config.model_type = "gpt2"
    with pytest.raises(ValueError, match="llama, qwen3"):
        export_pair.write_gguf(model, tmp_path / "model.gguf")


def test_share_of_outputs_that_a_method_also_gives_at_batch_1():
    def measured(*outputs):
        return Measurement([list(output) for output in outputs], 1.0, {}, 0, 1)

    alone, batched, other = (MethodSetting(name, batch, sys.exit) for name, batch in (("a", 1), ("a", 4), ("b", 4)))
    runs = {
        alone: [measured([1, 2], [3])],
        batched: [measured([1, 2], [3]), measured([1, 2], [4])],
        other: [measured([1, 2], [3])],
    }
    assert own_batch_1_share(alone, runs) == 1.0
    assert own_batch_1_share(batched, runs) == 0.5
    assert own_batch_1_share(other, runs) is None
