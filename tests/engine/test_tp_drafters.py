"""Drafters that read the hidden states of a target that ``tp_size`` shards, and that share sharded weights with it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from support import clover, dflash, eagle3, medusa
from support.mtp import Case
from support.recording_drafter import hidden_states_of_text
from support.tp_size import SIZES, engine_of, plainly, saved, together


def expect_bits_of_plain_decoding(engine, tokens_per_draft=0):
    expected = plainly(engine)
    assert together(engine) == expected
    decoding = engine.last_run.decoding
    assert decoding.num_draft_tokens > tokens_per_draft * decoding.num_drafts
    assert together(engine, num_draft_tokens=2) == expected  # prompts whose pages are in the cache


def test_eagle3_reads_hidden_states_and_the_targets_embedding(tmp_path):
    """Embedding and output layer of the target are one weight, of which every rank has a part."""
    pytest.importorskip("accelerate")
    folder = saved(tmp_path, "tied", hidden_size=eagle3.HIDDEN)
    model = AutoModelForCausalLM.from_pretrained(folder)
    drafter = f"eagle3:{tmp_path / 'drafter'}"
    eagle3.write_checkpoint(tmp_path / "drafter", model, shares_embedding=True)
    whole = sd.Engine(model, drafter)
    text = list(range(3, 40))
    with engine_of(folder, drafter, draft_tree=12) as engine:
        table = model.get_input_embeddings().weight
        assert any(torch.equal(weight, table) for weight in engine.drafter.weights())
        assert len(engine.target.model.get_input_embeddings().weight) < len(table)
        found = hidden_states_of_text(engine.target, text)
        torch.testing.assert_close(found, hidden_states_of_text(whole.target, text), rtol=1e-4, atol=1e-4)
        expect_bits_of_plain_decoding(engine, tokens_per_draft=5)
        assert engine.describe()["forward_program"]
        assert engine.describe()["prefix_cache"]["num_pages"] > 0


def write_medusa(folder, model):
    heads = medusa.random_heads(SIZES["vocab_size"], SIZES["hidden_size"])
    medusa.write_heads(folder, medusa.named(heads, "safetensors"))


def write_clover(folder, model):
    clover.write_clover(folder, clover.random_clover(), SIZES["vocab_size"])


@pytest.mark.grid
@pytest.mark.parametrize(
    ("drafter", "kind", "write", "settings"),
    [
        ("eagle3", "untied", eagle3.write_checkpoint, {"draft_tree": "chain", "num_draft_tokens": "auto"}),
        ("eagle3", "experts", eagle3.write_checkpoint, {"enforce_eager": True, "dtype": "bfloat16"}),
        ("dflash", "tied", dflash.write_checkpoint, {}),
        ("medusa", "untied", write_medusa, {}),
        ("clover", "untied", write_clover, {"dtype": "bfloat16"}),
    ],
)
def test_other_drafters_emit_the_bits_of_plain_decoding(tmp_path, drafter, kind, write, settings):
    pytest.importorskip("accelerate")
    folder = saved(tmp_path, kind)
    write(tmp_path / "drafter", AutoModelForCausalLM.from_pretrained(folder))
    with engine_of(folder, f"{drafter}:{tmp_path / 'drafter'}", **settings) as engine:
        expect_bits_of_plain_decoding(engine)


@pytest.mark.grid
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_mtp_layers_in_the_checkpoint_of_the_target(tmp_path, quantization):
    """They borrow its output layer, of which each rank has a part, rounded or not."""
    pytest.importorskip("accelerate")
    Case("qwen3").write(tmp_path, "mimo")  # without ends of its own, so it takes those of the target
    with engine_of(str(tmp_path), "mtp", quantization=quantization) as engine:
        expect_bits_of_plain_decoding(engine)
