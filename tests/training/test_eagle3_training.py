"""Training of EAGLE-3: what is unrolled is what will be drafted, the loss falls, and an interrupt changes nothing."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.drafters.eagle3.model import load_eagle3
from specdec_fast.drafters.eagle3.training import new_module, save_drafter
from specdec_fast.drafters.shared.new_drafter import DrafterSize
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.training.drafter_loss import Teacher, loss_of, padded
from specdec_fast.training.texts import Texts, frequent_ids, write_texts
from specdec_fast.training.trainer import Trainer, TrainingSettings
from support import eagle3
from support.grids import grid
from support.models import TINY_GROUPED, VOCAB_SIZE

TAPS, STEPS = (0, 1, 2), 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def texts(target):
    engine = sd.Engine(target, None, max_batch_size=16)
    prompts = [[i % VOCAB_SIZE, 3 * i % VOCAB_SIZE] for i in range(40)]
    return write_texts(engine, prompts, 700, 20, seed=1)


def made(target, texts, tmp_path, size=None, settings=None, draft_vocab_size=None, loss=loss_of):
    torch.manual_seed(0)
    ids = frequent_ids(texts, VOCAB_SIZE, draft_vocab_size)
    module = new_module(target, size or DrafterSize(16, tap_layers=TAPS), draft_vocab_size or VOCAB_SIZE, ids)
    learnt, _ = texts.split(4)
    settings = settings or TrainingSettings(2, 150, learning_rate=1e-2, num_steps=STEPS, early_share=0.5)
    return Trainer(module, Teacher(target, TAPS, ids), learnt, settings, tmp_path, loss)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_unrolled_logits_are_those_of_drafting(target, texts, tmp_path, monkeypatch, num_layers):
    """Step k at row i is the k-th token of a chain that starts behind position i + 1, if it drafted the text itself."""
    trainer = made(target, texts, tmp_path, DrafterSize(16, tap_layers=TAPS, num_layers=num_layers))
    for layer in trainer.module.layers.values():  # which begin as the identity
        layer.self_attn.o_proj.weight.data.normal_()
        layer.mlp.down_proj.weight.data.normal_()
    layer = trainer.module.config
    for name, value in (
        ("HIDDEN", layer.hidden_size),
        ("HEADS", layer.num_attention_heads),
        ("KV_HEADS", layer.num_key_value_heads),
        ("HEAD_DIM", layer.head_dim),
        ("EPSILON", layer.rms_norm_eps),
    ):
        monkeypatch.setattr(eagle3, name, value)
    token_ids, lengths = padded(texts.split(0)[0][:2], CPU)
    output = trainer.teacher.output(token_ids, lengths)
    weights = {name: weight.detach() for name, weight in trainer.module.named_parameters()}
    with torch.no_grad():
        unrolled = trainer.module.unroll(output.features, token_ids, STEPS)
    text, found = token_ids[0].tolist(), []
    for i in (0, 1, 7):
        features = output.features[0, : i + 1].unflatten(1, (len(TAPS), -1))

        def choose(logits, ahead, i=i):
            found.append((unrolled[ahead][0, i], logits))
            return text[i + 2 + ahead]

        eagle3.dense_chain(weights, {"num_layers": num_layers}, features, text[: i + 2], choose, STEPS)
    assert len(found) == 3 * STEPS
    for one, other in found:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_further_layers_begin_as_the_identity(target, texts, tmp_path):
    token_ids, lengths = padded(texts.split(0)[0][:2], CPU)
    deep, one = (made(target, texts, tmp_path, DrafterSize(16, tap_layers=TAPS, num_layers=n)) for n in (3, 1))
    one.module.load_state_dict(deep.module.state_dict(), strict=False)
    output = deep.teacher.output(token_ids, lengths)
    losses = [loss_of(trainer.module, token_ids, output, STEPS).item() for trainer in (deep, one)]
    assert losses[0] == losses[1]
    assert len(deep.module.state_dict()) > len(one.module.state_dict())


def test_padding_changes_no_loss(target, texts, tmp_path):
    trainer = made(target, texts, tmp_path)
    text = texts.split(0)[0][0]
    losses = []
    for extra in ([], [torch.zeros(len(text) + 9, dtype=torch.int64)]):
        token_ids, lengths = padded([text, *extra], CPU)
        token_ids, lengths = token_ids[:1], lengths[:1]
        loss = loss_of(trainer.module, token_ids, trainer.teacher.output(token_ids, lengths), STEPS)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("matrix_learning_rate", grid({"adamw": None, "muon": 0.02}, keep=["adamw"]))
def test_training_lowers_the_loss_and_raises_agreement(target, texts, tmp_path, matrix_learning_rate):
    settings = TrainingSettings(
        15, batch_tokens=150, learning_rate=1e-2, matrix_learning_rate=matrix_learning_rate, num_steps=STEPS
    )
    trainer = made(target, texts, tmp_path, settings=settings)
    learnt = trainer.texts
    token_ids, lengths = padded(learnt, CPU)
    output = trainer.teacher.output(token_ids, lengths)
    before, loss = trainer.evaluate(learnt), loss_of(trainer.module, token_ids, output, STEPS).item()
    trainer.run(1e9)
    assert trainer.step == trainer.num_steps > 8
    after = trainer.evaluate(learnt)
    assert len(after) == STEPS
    assert after[0] > before[0] + 0.1
    assert loss_of(trainer.module, token_ids, output, STEPS).item() < loss - 0.5


@pytest.mark.parametrize("matrix_learning_rate", [None, 0.02], ids=["adamw", "muon"])
def test_a_resumed_run_ends_with_the_same_weights(target, texts, tmp_path, matrix_learning_rate):
    settings = TrainingSettings(2, 150, 1e-2, matrix_learning_rate, num_steps=STEPS)
    whole = made(target, texts, tmp_path, settings=settings)
    whole.run(1e9)
    part, output = made(target, texts, tmp_path, settings=settings), Teacher.output
    calls = iter(range(5))

    def interrupted(*args):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return output(part.teacher, *args)

    part.teacher.output = interrupted
    with pytest.raises(KeyboardInterrupt):
        part.run(1e9)
    assert part.step == 5
    part.save()
    rest = made(target, texts, tmp_path, settings=settings)
    rest.resume()
    assert rest.step == 5
    rest.run(1e9)
    assert rest.step == whole.step
    assert rest.loss == whole.loss
    assert all(map(torch.equal, rest.module.state_dict().values(), whole.module.state_dict().values()))
    other = made(target, texts, tmp_path, settings=TrainingSettings(epochs=3))
    with pytest.raises(sd.ConfigError, match="written with other settings"):
        other.resume()
    state = torch.load(tmp_path / "training_state.pt", weights_only=True)
    del state["optimizers"]
    torch.save(state, tmp_path / "training_state.pt")
    with pytest.raises(sd.ConfigError, match="is no checkpoint of a training"):
        made(target, texts, tmp_path, settings=settings).resume()
    torch.save({"module": print}, tmp_path / "training_state.pt")
    with pytest.raises(sd.ConfigError, match=r"cannot be read \(it holds print, and only tensors are read"):
        made(target, texts, tmp_path).resume()
    (tmp_path / "training_state.pt").write_bytes(b"damaged")
    with pytest.raises(sd.ConfigError, match="cannot be read"):
        made(target, texts, tmp_path).resume()


def test_muon_trains_the_matrices_of_layers_alone(target, texts, tmp_path):
    """Each optimizer's rate is 0 in turn: what changes is what the other one trains."""
    names = {name for name, _ in made(target, texts, tmp_path).module.named_parameters()}
    matrices = {name for name in names if "proj" in name} | {"fc.weight"}
    for rates, expected in (((0.0, 0.02), matrices), ((1e-2, 0.0), names - matrices)):
        trainer = made(target, texts, tmp_path, settings=TrainingSettings(1, 150, *rates, num_steps=STEPS))
        before = {name: weight.clone() for name, weight in trainer.module.named_parameters()}
        trainer.run(1e9)
        assert {n for n, weight in trainer.module.named_parameters() if not torch.equal(weight, before[n])} == expected


def test_ids_that_cannot_be_proposed_teach_nothing(target, texts, tmp_path):
    trainer = made(target, texts, tmp_path, draft_vocab_size=20)
    token_ids, lengths = padded(trainer.texts[:3], CPU)
    output = trainer.teacher.output(token_ids, lengths)
    ids = frequent_ids(texts, VOCAB_SIZE, 20)
    counts = torch.bincount(texts.token_ids.long(), minlength=VOCAB_SIZE)
    assert counts[ids].min() >= counts.sort(descending=True).values[20:].max()
    with torch.no_grad():
        best = target(token_ids).logits.argmax(-1)
    expected = torch.where(torch.isin(best, ids), torch.searchsorted(ids, best), -1)
    assert torch.equal(output.best, expected)
    assert (expected < 0).any()
    torch.testing.assert_close(output.probabilities.sum(-1), torch.ones(token_ids.shape))
    loss = loss_of(trainer.module, token_ids, output, STEPS)
    output.probabilities[expected < 0] = torch.nan
    assert torch.equal(loss, loss_of(trainer.module, token_ids, output, STEPS))


@pytest.mark.parametrize(
    ("hidden_size", "draft_vocab_size", "num_layers"), [(16, None, 1), (16, 20, 2), (32, None, 2), (32, 20, 1)]
)
def test_what_is_saved_loads_as_a_drafter(target, texts, tmp_path, hidden_size, draft_vocab_size, num_layers):
    size = DrafterSize(hidden_size, tap_layers=TAPS, num_layers=num_layers)
    trainer = made(target, texts, tmp_path, size, draft_vocab_size=draft_vocab_size)
    ids = frequent_ids(texts, VOCAB_SIZE, draft_vocab_size)
    save_drafter(trainer.module, tmp_path, target, TAPS, ids)
    ragged = RaggedModel(target, resolve(CPU))
    loaded = load_eagle3(tmp_path, ragged)
    assert loaded.taps == TAPS
    assert loaded.config.layer.num_hidden_layers == num_layers
    head = trainer.module.lm_head.weight.bfloat16().float()
    assert any(torch.equal(weight, head) for weight in loaded.weights())
    assert (loaded.target_ids is None) if ids is None else torch.equal(loaded.target_ids, ids)
    embedding = target.get_input_embeddings().weight.data_ptr()
    shares = embedding in {weight.data_ptr() for weight in loaded.weights()}
    assert shares is (hidden_size == TINY_GROUPED["hidden_size"])


def test_the_first_batches_unroll_fewer_steps(target, texts, tmp_path):
    counts = []

    def counted(module, token_ids, output, num_steps):
        counts.append(num_steps)
        return loss_of(module, token_ids, output, num_steps)

    trainer = made(target, texts, tmp_path, loss=counted)
    trainer.run(1e9)
    half = trainer.num_steps // 2
    assert counts == [2] * half + [STEPS] * (trainer.num_steps - half)


def test_texts_shorter_than_the_steps_are_evaluated(target, texts, tmp_path):
    settings = TrainingSettings(batch_tokens=9, num_steps=5)
    trainer = made(target, texts, tmp_path, settings=settings)
    shares = trainer.evaluate([torch.tensor([1, 2, 3, 4])])
    assert len(shares) == 5
    assert shares[2:] == [0.0, 0.0, 0.0]
    longer = trainer.evaluate([torch.arange(9)])
    assert trainer.evaluate([torch.arange(4), torch.arange(9)])[2:] == longer[2:]


def test_diverged_training_is_an_error(target, texts, tmp_path):
    trainer = made(target, texts, tmp_path)
    trainer.module.fc.weight.data.fill_(torch.nan)
    with pytest.raises(sd.TrainingError, match="the loss became nan at step 1"):
        trainer.run(1e9)


@pytest.mark.parametrize(
    ("size", "message"),
    [({"tap_layers": (0, 3)}, "from 0 to 2"), ({"tap_layers": (1, 1)}, "different"), ({}, "no default taps"),
     ({"hidden_size": 64, "tap_layers": TAPS}, "divides the target's 32")],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(target, size, message):
    with pytest.raises(sd.ConfigError, match=message):
        new_module(target, DrafterSize(**size), VOCAB_SIZE, None)


def test_texts_that_begin_alike_are_held_out_together(target):
    prompts = [[i, 3, 5] for i in range(20)]
    texts = write_texts(sd.Engine(target, None, max_batch_size=16), prompts, 150, 4, seed=1)
    firsts = [int(text[0]) for text in texts.split(0)[0]]
    assert firsts != sorted(firsts)
    assert max(map(firsts.count, firsts)) == 2, "each prompt is sampled and continued greedily"
    for num_held_out in range(1, len(firsts) - 1):
        learnt, held_out = ({int(text[0]) for text in side} for side in texts.split(num_held_out))
        assert learnt
        assert not learnt & held_out


@pytest.mark.parametrize("num_tokens", [1, 100, 700])
def test_the_target_writes_about_as_many_tokens_as_are_asked_for(target, monkeypatch, num_tokens):
    engine = sd.Engine(target, None, max_batch_size=16)
    written, generate = [], engine.generate

    def counted(*args, **keywords):
        outputs = generate(*args, **keywords)
        written.extend(len(output.prompt_ids) + len(output.token_ids) for output in outputs)
        return outputs

    monkeypatch.setattr(engine, "generate", counted)
    longest = 20
    largest_pair = 2 * (2 + longest)
    lengths = write_texts(engine, [[i, 3] for i in range(20)], num_tokens, longest, seed=1).lengths.tolist()
    assert num_tokens <= sum(lengths) < num_tokens + largest_pair
    assert sum(written) < num_tokens + largest_pair, "none is written in vain, as all have the same length"


def test_texts_that_end_at_once_are_refused(target, monkeypatch):
    engine = sd.Engine(target, None, max_batch_size=64)
    with pytest.raises(sd.ConfigError, match="ends its texts within 4 tokens"):
        write_texts(engine, [[3]], 100, 1, seed=1)


def test_texts_depend_on_the_seed_alone(target, texts, tmp_path):
    prompts = [[i % VOCAB_SIZE, 3 * i % VOCAB_SIZE] for i in range(3)]
    engines = [sd.Engine(target, None, max_batch_size=size) for size in (2, 5)]
    one, again = (write_texts(engine, prompts, 150, 12, seed=1) for engine in engines)
    assert torch.equal(one.token_ids, again.token_ids)
    engine = engines[0]
    assert not torch.equal(write_texts(engine, prompts, 150, 12, seed=2).token_ids, one.token_ids)
    assert int(texts.lengths.sum()) >= 700
    texts.save(tmp_path / "texts.safetensors")
    assert torch.equal(Texts.load(tmp_path / "texts.safetensors").lengths, texts.lengths)
    with pytest.raises(sd.ConfigError, match="no token that begins a text"):
        write_texts(engine, [], 700, 20, seed=1)
    with pytest.raises(sd.ConfigError, match="cannot continue a prompt"):
        write_texts(engine, [[VOCAB_SIZE + 5]], 700, 20, seed=1)
    (tmp_path / "texts.safetensors").write_bytes(b"damaged")
    with pytest.raises(sd.ConfigError, match="no file of training texts"):
        Texts.load(tmp_path / "texts.safetensors")
