"""Training of Clover heads: where they begin, that what is unrolled is what will be drafted, and what is saved."""

from __future__ import annotations

import json

import pytest
import torch

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import make_drafter
from specdec_fast.drafters.clover.model import normalised
from specdec_fast.drafters.clover.training import new_clover, save_clover
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.training.drafter_loss import Teacher, loss_of, padded
from specdec_fast.training.trainer import Trainer, TrainingSettings
from support import clover
from support.models import tiny_model

CPU, NUM_HEADS = torch.device("cpu"), 3


@pytest.fixture(scope="module")
def batch(target, texts):
    """Ids, and the target's output."""
    token_ids, lengths = padded(texts, CPU)
    return token_ids, Teacher(target, (3,), None).output(token_ids, lengths)


def made(target):
    torch.manual_seed(0)
    return new_clover(target, NUM_HEADS)


def test_every_h_begins_as_the_h_before_it(target):
    hidden, embedded = torch.randn(2, 5, 7, 32)
    for head in made(target).heads:
        assert torch.equal(head(hidden, embedded), hidden), "W_V = 0"
        for projection in (head.q_proj, head.k_proj):
            noise = projection.weight - torch.eye(32)
            assert 0 < noise.abs().max() < 0.1


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_first_logits_are_the_targets(architecture, texts):
    """The augmenting block begins as the identity; all else in it as the target's last layer, if it is Llama's."""
    target = tiny_model(architecture)
    module, (token_ids, lengths) = made(target), padded(texts, CPU)
    output = Teacher(target, (3,), None).output(token_ids, lengths)
    for step, logits in enumerate(module.unroll(output.features, token_ids, NUM_HEADS)):
        expected = target(token_ids).logits[:, : token_ids.shape[1] - 1 - step]
        torch.testing.assert_close(logits, expected)
    last = target.model.layers[-1]
    for name in ("self_attn.k_proj", "mlp.up_proj", "input_layernorm"):
        own, other = module.augmenting_block.get_submodule(name).weight, last.get_submodule(name).weight
        is_norm = name == "input_layernorm"  # of a new model, all ones
        assert torch.equal(own, other) == (architecture == "llama" or is_norm)


def trained(target, texts, folder):
    module = made(target)
    settings = TrainingSettings(epochs=12, batch_tokens=60, learning_rate=1e-2, num_steps=NUM_HEADS)
    Trainer(module, Teacher(target, (3,), None), texts, settings, folder).run(1e9)
    return module


def test_training_lowers_the_loss_and_unrolls_what_will_be_drafted(target, texts, batch, tmp_path, monkeypatch):
    token_ids, output = batch
    before = loss_of(made(target), token_ids, output, NUM_HEADS).item()
    weight = target.get_output_embeddings().weight.clone()
    module = trained(target, texts, tmp_path)
    assert loss_of(module, token_ids, output, NUM_HEADS).item() < before - 1
    assert torch.equal(target.get_output_embeddings().weight, weight), "the output layer is the target's, and stays"

    # What was trained drafts by the formulas: row i of a text with what stands behind it, and no padding.
    monkeypatch.setattr(clover, "EPSILON", target.config.rms_norm_eps)
    weights = {name: weight.detach() for name, weight in module.state_dict().items()}
    with torch.no_grad():
        unrolled = module.unroll(output.features, token_ids, NUM_HEADS)
        for text, i in ((0, 0), (0, 5), (4, 20)):
            hidden = clover.augmented(weights, output.features[text, : i + 1])[-1]
            for step in range(NUM_HEADS):
                hidden = clover.behind(weights, step, hidden, weight[token_ids[text, i + 1 + step]])
                expected = clover.logits_of(weights, step, hidden, weight)
                torch.testing.assert_close(unrolled[step][text, i], expected, rtol=1e-4, atol=1e-4)

    save_clover(module, tmp_path, [[0], [0, 0], [1]])
    ragged = RaggedModel(target, resolve(CPU))
    drafter = make_drafter(str(tmp_path), ragged, EngineConfig(), None)
    assert drafter.tree.choices == [(0,), (0, 0), (1,)]
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["clover_num_heads"], config["clover_num_layers"]) == ("clover", NUM_HEADS, 1)
    hidden, tokens = torch.randn(4, 32), torch.tensor([1, 5, 9, 2])
    with torch.no_grad():
        saved = made(target)
        saved.load_state_dict({name: weight.bfloat16().float() for name, weight in weights.items()})
        embedded = normalised(target.get_output_embeddings().weight)[tokens]
        torch.testing.assert_close(drafter.model.step(1, hidden, tokens), saved.heads[1](hidden, embedded))
