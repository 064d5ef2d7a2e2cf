"""Targets that transformers' own tensor-parallel plan shards over several processes, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.models.sharded import expect_divisible_heads
from support import sharded
from support.sharded import SIZES
from support.source_tree import ROOT

WAYS = ["torch.float32 program", "torch.float32 eager", "torch.bfloat16 program", "torch.bfloat16 eager"]


def processes(folder, num_processes, *source):
    pytest.importorskip("accelerate")  # transformers needs it for plans
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command += [sharded.__file__, str(folder), *source]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
    assert all(each == found[0] for each in found)
    return found[0]


def expect_equal_bits(found, ways=WAYS):
    assert all(found["exchanged"].values()), found["exchanged"]
    for way in ways:
        each = found[way]
        assert each["program"] == ("program" in way)
        assert not each["one_by_one"]
        assert each["alone"] == each["plain"] == each["K 1"] == each["K 4"], way


@pytest.fixture(scope="module")
def of_pair(tmp_path_factory):
    return processes(tmp_path_factory.mktemp("sharded"), 2)


@pytest.mark.grid
def test_bits_depend_neither_on_the_batch_nor_on_k(of_pair):
    expect_equal_bits(of_pair)
    whole = sd.Engine(str(demo_pair() / "target"), None, dtype="float32")
    expected = whole.generate(sharded.PROMPTS, sharded.PARAMS, progress=False)
    for way in WAYS[:2]:
        assert [tokens for tokens, _ in of_pair[way]["alone"]] == [output.token_ids for output in expected]
    assert of_pair["eagle3"] == of_pair[WAYS[2]]["alone"]
    assert of_pair["local_rows"] * 2 == whole.target.model.model.layers[0].self_attn.q_proj.weight.shape[0]


@pytest.mark.grid
def test_calls_that_would_differ_between_processes_are_refused(of_pair):
    assert of_pair["auto"].startswith("ConfigError: num_draft_tokens='auto', but the target is sharded")
    assert of_pair["seed"].startswith("InvalidParamsError: a request samples without a seed")
    assert of_pair["service"].startswith("ConfigError: the target is sharded over processes, and requests would reach")
    assert of_pair["draft"].startswith("ConfigError: draft LlamaForCausalLM is sharded over processes; load")


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "num_processes"),
    [("tied", 4), ("experts", 2)],  # of embeddings and output layer; each once, with another number of processes
)
def test_other_models_have_equal_bits(kind, num_processes, tmp_path):
    torch.manual_seed(0)
    if kind == "tied":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))
    model.save_pretrained(tmp_path / "model")
    found = processes(tmp_path, num_processes, str(tmp_path / "model"))
    expect_equal_bits(found, WAYS[::2])
    whole = sd.Engine(model.eval(), None)
    expected = whole.generate(sharded.IDS, sharded.PARAMS, progress=False)
    alone = found["torch.float32 program"]["alone"]
    for (_, logprobs), output in zip(alone, expected, strict=True):
        assert logprobs[0] == pytest.approx(output.logprobs[0], abs=1e-4)  # the first: later ones if tokens are equal


def test_heads_that_cannot_be_divided_are_refused():
    with pytest.raises(sd.ConfigError, match=r"num_attention_heads=8 cannot be divided by the 3 processes"):
        expect_divisible_heads(Qwen3Config(**SIZES), 3)
