"""Training of DFlash and DSpark: blocks are those that will be drafted, from random anchors, and the loss falls."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.drafters.dflash.model import load_dflash
from specdec_fast.drafters.dflash.training import BlockSize, new_dflash, save_dflash
from specdec_fast.drafters.shared.new_drafter import DrafterSize
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.training.drafter_loss import Teacher, agreement, loss_of, padded
from specdec_fast.training.dspark_loss import confidence_report, dspark_loss
from specdec_fast.training.texts import Texts, rarest_id
from specdec_fast.training.trainer import Trainer, TrainingSettings
from support import dflash
from support.models import VOCAB_SIZE

TAPS, CPU = (1, 2), torch.device("cpu")


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator) for n in (12, 19, 19, 25, 30, 14)]


def made(target, rank):
    torch.manual_seed(0)
    size = BlockSize(num_layers=2, block_size=dflash.BLOCK, markov_rank=rank)
    return new_dflash(target, DrafterSize(tap_layers=TAPS), size, dflash.MASK)


@pytest.mark.parametrize("rank", [0, dflash.RANK], ids=["dflash", "dspark"])
def test_blocks_are_those_of_drafting(target, texts, tmp_path, monkeypatch, rank):
    """Step k at row i is the k-th token of a block that starts at position i + 1, if it drafted the text itself."""
    module = made(target, rank)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            random = torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 2.0 / weight.shape[-1] ** 0.5)
            weight.copy_((random + (1.0 if "norm" in name else 0.0)).bfloat16().float())  # checkpoints hold bf16
    layer = module.config
    for name, value in (
        ("HEADS", layer.num_attention_heads),
        ("KV_HEADS", layer.num_key_value_heads),
        ("HEAD_DIM", layer.head_dim),
        ("EPSILON", layer.rms_norm_eps),
    ):
        monkeypatch.setattr(dflash, name, value)
    token_ids, lengths = padded(texts[1:3], CPU)
    output = Teacher(target, TAPS, None).output(token_ids, lengths)
    num_steps = module.most_steps
    with torch.no_grad():
        unrolled = module.unroll(output.features, token_ids, num_steps)
        chosen = module.drafts(output.features, token_ids, num_steps)
    for step, (logits, rows) in enumerate(chosen):
        torch.testing.assert_close(logits, unrolled[step][:, rows - step - 1])
    assert sorted(chosen[0][1].tolist()) != sorted(module.drafts(output.features, token_ids, num_steps)[0][1].tolist())
    save_dflash(module, tmp_path, target, TAPS)
    loaded = load_dflash(tmp_path, RaggedModel(target, resolve(CPU)))
    assert (loaded.taps, loaded.config.most_draft_tokens) == (TAPS, num_steps)
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    weights |= {"embed_tokens.weight": target.get_input_embeddings().weight.detach()}
    weights |= {"lm_head.weight": target.get_output_embeddings().weight.detach()}
    for text, row in ((0, 0), (1, 7), (0, 10)):
        features = output.features[text, : row + 1].unflatten(-1, (len(TAPS), -1))
        tokens, found = token_ids[text].tolist(), []

        def choose(logits, ahead, tokens=tokens, row=row, found=found):
            found.append(logits)
            return tokens[row + 2 + ahead]

        dflash.dense_block(
            weights, {"markov": "vanilla" if rank else None}, features, tokens[: row + 2], choose, num_steps
        )
        expected = [logits[text, row] for logits in unrolled]
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_training_lowers_the_loss(target, texts, tmp_path):
    module, teacher = made(target, dflash.RANK), Teacher(target, TAPS, None)
    token_ids, lengths = padded(texts, CPU)
    output = teacher.output(token_ids, lengths)
    before = loss_of(module, token_ids, output, module.most_steps).item()
    settings = TrainingSettings(epochs=12, batch_tokens=80, learning_rate=1e-2, num_steps=module.most_steps)
    Trainer(module, teacher, texts, settings, tmp_path).run(1e9)
    assert loss_of(module, token_ids, output, module.most_steps).item() < before - 0.5
    counts = agreement(module, token_ids, output, module.most_steps)
    assert counts[:, 1].min() > 0


@pytest.mark.grid
def test_the_confidence_head_learns_what_is_accepted(target, texts, tmp_path):
    """Its estimates come nearer to what is accepted than the share of accepted tokens does."""
    module, teacher = made(target, dflash.RANK), Teacher(target, TAPS, None)
    settings = TrainingSettings(epochs=30, batch_tokens=80, learning_rate=1e-2, num_steps=module.most_steps)
    Trainer(module, teacher, texts, settings, tmp_path).run(1e9)  # so that some tokens are accepted
    token_ids, lengths = padded(texts, CPU)
    output = teacher.output(token_ids, lengths)
    optimizer = torch.optim.AdamW(module.confidence_head.parameters(), lr=3e-2)
    for _ in range(150):
        dspark_loss(module, token_ids, output, module.most_steps).backward()
        optimizer.step()
        optimizer.zero_grad()
    estimated, accepted, errors, count = confidence_report(module, token_ids, output, module.most_steps).sum(0).tolist()
    rate = accepted / count
    assert 0.1 < rate < 0.9
    assert estimated / count == pytest.approx(rate, abs=0.1)
    assert errors / count < 0.9 * rate * (1 - rate)


def test_the_confidence_head_changes_no_other_gradient(target, texts):
    token_ids, lengths = padded(texts, CPU)
    output = Teacher(target, TAPS, None).output(token_ids, lengths)
    gradients = []
    for loss in (dspark_loss, loss_of):
        module = made(target, dflash.RANK)
        loss(module, token_ids, output, module.most_steps).backward()
        gradients.append({name: weight.grad for name, weight in module.named_parameters()})
    scored, plain = gradients
    assert [name for name, gradient in plain.items() if gradient is None] == [
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    ]
    assert all(torch.equal(scored[name], gradient) for name, gradient in plain.items() if gradient is not None)
    assert scored["confidence_head.proj.weight"].abs().max() > 0


def test_the_markov_head_is_no_matrix_of_layers(target, texts, tmp_path):
    module = made(target, dflash.RANK)
    before = module.markov_head.markov_w2.weight.clone()
    settings = TrainingSettings(2, 80, 0.0, matrix_learning_rate=0.02, num_steps=module.most_steps)
    Trainer(module, Teacher(target, TAPS, None), texts, settings, tmp_path).run(1e9)
    assert torch.equal(module.markov_head.markov_w2.weight, before), "its rows belong to ids"


def test_the_mask_is_the_id_that_texts_use_least():
    texts = Texts.of([[0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 0, 1]])
    assert rarest_id(texts, 6) == 5
    assert rarest_id(texts, 8) == 7
