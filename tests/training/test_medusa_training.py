"""Training of Medusa heads: they begin as the target's output layer, the loss falls, and hits are counted."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import make_drafter
from specdec_fast.drafters.medusa.training import new_heads, save_heads
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.training.drafter_loss import Teacher, loss_of, padded
from specdec_fast.training.hit_counts import hit_counts
from specdec_fast.training.trainer import Trainer, TrainingSettings
from support.models import VOCAB_SIZE

CPU, NUM_HEADS = torch.device("cpu"), 3


def test_heads_begin_as_the_targets_output_layer(target, texts):
    module, teacher = new_heads(target, NUM_HEADS), Teacher(target, (3,), None)
    token_ids, lengths = padded(texts, CPU)
    output = teacher.output(token_ids, lengths)
    for step, logits in enumerate(module.unroll(output.features, token_ids, NUM_HEADS)):
        # The last hidden state of transformers is the input of the output layer, so these are the target's logits.
        expected = target(token_ids).logits[:, : token_ids.shape[1] - 1 - step]
        torch.testing.assert_close(logits, expected)


def test_training_lowers_the_loss_and_what_is_saved_loads(target, texts, tmp_path):
    module, teacher = new_heads(target, NUM_HEADS), Teacher(target, (3,), None)
    token_ids, lengths = padded(texts, CPU)
    output = teacher.output(token_ids, lengths)
    before = loss_of(module, token_ids, output, NUM_HEADS).item()
    settings = TrainingSettings(epochs=15, batch_tokens=60, learning_rate=1e-2, num_steps=NUM_HEADS)
    trainer = Trainer(module, teacher, texts, settings, tmp_path)
    trainer.run(1e9)
    assert loss_of(module, token_ids, output, NUM_HEADS).item() < before - 1
    save_heads(module, tmp_path, [[0], [0, 0], [1]])
    ragged = RaggedModel(target, resolve(CPU))
    drafter = make_drafter(str(tmp_path), ragged, EngineConfig(), None)
    assert drafter.tree.choices == [(0,), (0, 0), (1,)]
    assert json.loads((tmp_path / "config.json").read_text())["medusa_num_heads"] == NUM_HEADS
    saved = [weight.detach().bfloat16().float() for weight in module.parameters()]
    assert sum(weight.sum().item() for weight in drafter.weights()) == pytest.approx(sum(w.sum().item() for w in saved))


def test_the_last_layers_of_heads_are_no_matrices_of_layers(target, texts, tmp_path):
    module = new_heads(target, NUM_HEADS)
    settings = TrainingSettings(batch_tokens=60, learning_rate=0.0, matrix_learning_rate=0.02, num_steps=NUM_HEADS)
    Trainer(module, Teacher(target, (3,), None), texts, settings, tmp_path).run(1e9)
    for head in module.heads:
        assert torch.equal(head[-1].weight, target.get_output_embeddings().weight), "its rows belong to ids"
        assert head[0].linear.weight.any()


class Ranked(nn.Module):
    """Logits by which the token at depth d of text b at row i has the rank ``ranks[d][b][i]``."""

    def __init__(self, token_ids, ranks):
        super().__init__()
        self.token_ids, self.ranks = token_ids, ranks

    def unroll(self, features, token_ids, num_steps):
        found = []
        for depth, ranks in enumerate(self.ranks[:num_steps]):
            logits = torch.zeros(*token_ids.shape, VOCAB_SIZE)[:, : token_ids.shape[1] - 1 - depth]
            for b, own in enumerate(ranks):
                for i, rank in enumerate(own):
                    token = int(token_ids[b, i + 2 + depth])
                    others = [t for t in range(VOCAB_SIZE) if t != token]
                    order = [*others[:rank], token, *others[rank:]]
                    logits[b, i, order] = torch.arange(VOCAB_SIZE, 0, -1).float()
            found.append(logits)
        return found


def test_hits_are_counted_by_depth_and_rank():
    """Of rows whose earlier tokens had a counted rank; padding and the end of a text count nothing."""
    token_ids, lengths = padded([torch.arange(6), torch.arange(10, 14)], CPU)
    ranks = [
        [[0, 1, 5, 0], [1, 0]],  # rows 0 to 3 of a text of six tokens, and 0 to 1 of one of four
        [[0, 5, 0], [1]],
    ]
    counts = hit_counts(Ranked(token_ids, ranks), None, token_ids, lengths, [2, 2])
    # Depth 1: ranks 0, 1, 5, 0, 1, 0. Depth 2 looks at rows 0 and 1 of the first text and row 0 of the second one.
    assert counts.tolist() == [[6, 3, 2], [3, 1, 1]]


def test_texts_shorter_than_the_heads_are_counted_as_far_as_they_go(target):
    token_ids, lengths = padded([torch.arange(4)], CPU)
    features = Teacher(target, (3,), None).output(token_ids, lengths).features
    counts = hit_counts(new_heads(target, 5), features, token_ids, lengths, [5, VOCAB_SIZE])
    assert counts[:, 0].tolist() == [2, 1, 0, 0, 0]
    assert counts[:, 1:].sum(1).tolist() == [2, 1, 0, 0, 0]
