"""Training of SpecBlock drafters: what is trained is what drafts, the losses are the formulas', and the loss falls."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import make_drafter
from specdec_fast.drafters.shared.new_drafter import DrafterSize
from specdec_fast.drafters.specblock.module import SpecBlockModule
from specdec_fast.drafters.specblock.training import new_blocks, save_blocks
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.training.drafter_loss import Teacher, TeacherOutput, padded
from specdec_fast.training.specblock_loss import _rank_loss, _slots_loss, block_loss, rank_labels
from specdec_fast.training.trainer import Trainer, TrainingSettings
from support.models import VOCAB_SIZE
from support.specblock import HIDDEN, TAPS, K, config_of, dense_blocks, random_weights

CPU, SIZE = torch.device("cpu"), DrafterSize(hidden_size=16, tap_layers=TAPS)


@torch.no_grad()
def test_what_is_trained_is_what_drafts(target, texts):
    """Blocks, and blocks behind them, are those of the oracle of drafting, which computes one text at a time."""
    weights = random_weights(VOCAB_SIZE, target.config.hidden_size, {})
    layer = LlamaConfig(**{name: value for name, value in config_of(target, {}).items() if value is not None})
    module = SpecBlockModule(layer, len(TAPS) * target.config.hidden_size, K, VOCAB_SIZE, None)
    missing, unknown = module.load_state_dict(weights, strict=False)
    assert not missing
    assert not unknown
    token_ids, lengths = padded(texts[:3], CPU)
    features = Teacher(target, TAPS, None).output(token_ids, lengths).features
    hidden, key_values = module.true_blocks(features, token_ids)
    for slot in range(K):
        positions = torch.tensor([0, 3, 4])
        behind = module.blocks_behind(hidden, key_values, token_ids, positions, slot)
        for b, (length, text) in enumerate(zip(lengths.tolist(), token_ids.tolist(), strict=True)):
            own = features[b].unflatten(1, (len(TAPS), -1))
            dense = dense_blocks(weights, own[: length - 1], text[:length])
            torch.testing.assert_close(hidden[b, : length - 1], dense, rtol=1e-3, atol=1e-3)
            for place, position in enumerate(positions.tolist()):
                if position + slot + 2 < length:
                    branch = (slot, text[position + slot + 2])
                    dense = dense_blocks(weights, own[: position + 1], text[: position + 2], branch)[-1]
                    torch.testing.assert_close(behind[b, place], dense, rtol=1e-3, atol=1e-3)
    logits = module.unroll(features, token_ids, K)
    assert [own.shape for own in logits] == [(3, 16 - slot, VOCAB_SIZE) for slot in range(K)]
    torch.testing.assert_close(logits[2], module.lm_head(module.norm(hidden[:, :-2, 2])))


@pytest.mark.parametrize("length", range(4, 8))
def test_texts_too_short_for_a_second_block_are_learnt_from(target, length):
    """The slot and the first position with a second block depend on the sum of the ids, so many sums are tried."""
    module = new_blocks(target, SIZE, VOCAB_SIZE, None)
    teacher = Teacher(target, TAPS, None)
    for total in range(32):
        token_ids, lengths = padded([torch.tensor([total, *[0] * (length - 1)])], CPU)
        loss = block_loss(module, token_ids, teacher.output(token_ids, lengths), min(K, length - 2))
        assert loss.isfinite()
        assert loss.requires_grad


class Fixed(torch.nn.Module):
    """A drafter of three slots whose logits and classes are given."""

    num_slots = 3

    def __init__(self, logits, classes):
        super().__init__()
        self.norm, self.lm_head, self.rank_head = torch.nn.Identity(), lambda hidden: logits, lambda inputs: classes
        self.draft_ids_of = lambda token_ids: token_ids


def test_a_slot_is_trained_where_those_before_it_drafted_the_text():
    vocab_size = 25
    token_ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    logits = torch.randn(1, 2, 3, vocab_size, generator=torch.Generator().manual_seed(0))
    # The block of position 0 drafts 4 (right), then 7 (wrong); that of position 1 drafts 1, 5 and 9, all right.
    for (block, slot), token in {(0, 0): 4, (0, 1): 7, (1, 0): 1, (1, 1): 5, (1, 2): 9}.items():
        logits[0, block, slot, token] += 20
    probabilities = torch.randn(1, 6, vocab_size, generator=torch.Generator().manual_seed(1)).softmax(-1)
    counts = torch.tensor([[True, True, True, True, True, False]])
    output = TeacherOutput(None, probabilities, probabilities.argmax(-1), counts)
    classes = torch.zeros(5, 4)
    found = _slots_loss(Fixed(logits, classes), torch.zeros(1, 2, 3, 2), token_ids, output, torch.tensor([1, 2]))
    expected, learnt = 0.0, {0: [0, 1], 1: [0, 1], 2: [1]}  # by slot, the blocks with a valid prefix
    for slot, blocks in learnt.items():
        for block in blocks:
            wanted = probabilities[0, block + 1 + slot]
            loss = -(wanted * logits[0, block, slot].log_softmax(-1)).sum()
            expected += 0.8**slot * loss / len(blocks) / (1 + 0.8 + 0.64)
    ids = torch.cat([logits[0, :, slot][learnt[slot]].topk(20).indices for slot in range(3)])
    assert len(ids) == 5
    rows = [(block, slot) for block in range(2) for slot in range(3) if block in learnt[slot]]
    own = torch.stack([logits[0, block, slot] for block, slot in rows])
    best = torch.stack([output.best[0, block + 1 + slot] for block, slot in rows])
    rank = _rank_loss(Fixed(logits, classes), torch.zeros(5, 2), own, best, torch.tensor([slot for _, slot in rows]))
    torch.testing.assert_close(found, expected + rank)


def test_the_loss_of_ranks_is_the_formula():
    ids = torch.arange(20).expand(13, 20)
    best = torch.tensor([0, 1, 3, 4, 9, 10, 24, *[0] * 6])
    assert rank_labels(ids, best).tolist() == [0, 1, 1, 2, 2, 3, 3, *[0] * 6]
    logits = -torch.arange(25.0).expand(13, 25)
    predicted = torch.randn(13, 4, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([0] * 12 + [1])
    best = torch.tensor([*[0] * 11, 4, 24])  # 11 positions of a class count as 10
    found = _rank_loss(Fixed(None, predicted), torch.zeros(13, 2), logits, best, slots)
    total = weights = 0.0
    for row, true, frequency in [*((row, 0, 10 / 11) for row in range(11)), (11, 2, 1.0), (12, 3, 1.0)]:
        raw = torch.tensor([1 / (1 + abs(c - true) + max(true - c, 0)) ** 2 for c in range(4)])
        loss = -(raw / raw.sum() * predicted[row].log_softmax(-1)).sum()
        chosen = int(predicted[row].argmax())
        total += frequency * loss * (1 + abs(true - chosen) + max(true - chosen, 0))
        weights += frequency
    torch.testing.assert_close(found, total / weights)


@pytest.mark.parametrize("draft_ids", [pytest.param(None, marks=pytest.mark.grid), torch.arange(60)], ids=["all", "60"])
def test_training_lowers_the_loss_and_what_is_saved_loads(target, texts, tmp_path, draft_ids):
    torch.manual_seed(0)
    module = new_blocks(target, SIZE, VOCAB_SIZE if draft_ids is None else 60, draft_ids)
    teacher = Teacher(target, TAPS, draft_ids)
    token_ids, lengths = padded(texts, CPU)
    output = teacher.output(token_ids, lengths)
    before = block_loss(module, token_ids, output, K).item()
    settings = TrainingSettings(epochs=12, batch_tokens=90, learning_rate=1e-2, num_steps=K)
    trainer = Trainer(module, teacher, texts, settings, tmp_path, block_loss)
    trainer.run(1e9)
    assert block_loss(module, token_ids, output, K).item() < before - 1
    assert len(trainer.evaluate(texts)) == K
    save_blocks(module, tmp_path, target, TAPS, draft_ids, 9)
    ragged = RaggedModel(target, resolve(CPU))
    drafter = make_drafter(str(tmp_path), ragged, EngineConfig(), None)
    assert drafter.taps == TAPS
    assert drafter.max_nodes == 9
    stored = module.lm_head.weight.detach().bfloat16().float()
    assert any(weight.shape == stored.shape and torch.equal(weight, stored) for weight in drafter.weights())


def test_a_new_drafter_passes_on_conditions_and_tokens(target, texts):
    torch.manual_seed(0)
    module = new_blocks(target, DrafterSize(tap_layers=TAPS), VOCAB_SIZE, None)
    assert module.config.hidden_size == target.config.hidden_size != HIDDEN
    assert not module.input_layer.embed_tokens.weight.requires_grad
    token_ids, lengths = padded(texts, CPU)
    features = Teacher(target, TAPS, None).output(token_ids, lengths).features
    hidden, _ = module.true_blocks(features, token_ids)
    size = module.config.hidden_size
    condition = torch.nn.functional.rms_norm(features[:, :-1, -size:], (size,))
    token = torch.nn.functional.rms_norm(module.input_layer.embed_tokens(token_ids[:, 1:]), (size,))
    query = module.input_layer.query_norm(module.input_layer.position_queries.weight)
    expected = (condition + token)[:, :, None] + query
    similarity = torch.nn.functional.cosine_similarity(hidden, expected, dim=-1)
    assert similarity.min() > 0.8


def test_the_valid_prefix_of_a_text_that_is_too_short(target):
    module = new_blocks(target, SIZE, VOCAB_SIZE, None)
    token_ids, lengths = padded([torch.arange(4)], CPU)
    loss = block_loss(module, token_ids, Teacher(target, TAPS, None).output(token_ids, lengths), 2)
    assert loss.isfinite()
