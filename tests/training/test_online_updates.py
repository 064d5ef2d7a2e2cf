"""A SpecBlock drafter that is updated between calls: it drafts with the new weights, and no output changes."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.drafters.shared.checkpoint.writing import trained_weights
from specdec_fast.training.online import OnlineSettings, OnlineUpdates
from specdec_fast.training.update_bandit import FULL, HEAD, SKIP
from support.models import VOCAB_SIZE, tiny_model
from support.sharded import take_for_sharded
from support.specblock import write_checkpoint

PROMPTS = [torch.randint(VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(5, 11)]
PARAMS = sd.SamplingParams(max_new_tokens=24, ignore_eos=True)


def make(folder, monkeypatch, arm, dtype=torch.float32, learning_rate=5e-3, **options):
    """Return an engine, and updates that always take the same arm and all the time they want."""
    target = tiny_model("llama").to(dtype)
    write_checkpoint(folder, target, **options)
    engine = sd.Engine(target, f"specblock:{folder}", max_batch_size=4, num_draft_tokens=4)
    updates = OnlineUpdates(engine, OnlineSettings(learning_rate=learning_rate, time_share=1e6))
    monkeypatch.setattr(updates.bandit, "choose", lambda tokens_ahead: arm)
    monkeypatch.setattr(updates.bandit, "updated", lambda seconds: None)
    return engine, updates


def outputs_of(engine):
    return engine.generate(PROMPTS, PARAMS, progress=False)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(torch.float32, {}, marks=pytest.mark.grid),
        (torch.bfloat16, {"draft_vocab_size": 60}),
    ],
    ids=["fp32", "bf16, fewer ids"],
)
def test_an_update_changes_drafts_and_no_output(tmp_path, monkeypatch, dtype, options):
    engine, updates = make(tmp_path, monkeypatch, FULL, dtype, **options)
    plain = sd.Engine(engine.target.model, None, max_batch_size=4)
    expected = [output.token_ids for output in outputs_of(plain)]
    model = engine.drafter.model
    learnt = [weight for weight in model.tensors() if weight.is_floating_point()]
    before = [weight.clone() for weight in learnt]
    for _ in range(3):
        outputs = outputs_of(engine)
        assert [output.token_ids for output in outputs] == expected
        update = updates.observe(outputs)
        assert update.arm == FULL
        assert update.num_tokens > 0
    head = updates.module.lm_head.weight.detach().to(dtype)
    assert any(torch.equal(weight, head) for weight in learnt)
    for weight, old in zip(learnt, before, strict=True):
        assert not torch.equal(weight, old)
    assert (model.target_ids is None) == ("draft_vocab_size" not in options)


@pytest.mark.grid
def test_a_drafter_learns_its_traffic(tmp_path, monkeypatch):
    engine, updates = make(tmp_path, monkeypatch, FULL, learning_rate=2e-2)
    first = updates.observe(outputs_of(engine)).tokens_per_step
    for _ in range(12):
        last = updates.observe(outputs_of(engine)).tokens_per_step
    assert last > first + 0.2


def test_the_heads_alone_are_updated(tmp_path, monkeypatch):
    engine, updates = make(tmp_path, monkeypatch, HEAD)
    before = {name: weight.detach().clone() for name, weight in updates.module.named_parameters()}
    updates.observe(outputs_of(engine))
    changed = {name for name, weight in updates.module.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"}
    assert all(weight.requires_grad for weight in updates.module.parameters())


def test_what_is_saved_is_what_drafts(tmp_path, monkeypatch):
    engine, updates = make(tmp_path / "old", monkeypatch, FULL, torch.bfloat16)
    updates.observe(outputs_of(engine))
    (tmp_path / "new").mkdir()
    updates.save(str(tmp_path / "new"))
    loaded = sd.Engine(engine.target.model, f"specblock:{tmp_path / 'new'}", max_batch_size=4, num_draft_tokens=4)
    for own, other in zip(engine.drafter.model.weights(), loaded.drafter.model.weights(), strict=True):
        assert torch.equal(own, other)


def test_nothing_is_updated_while_a_call_is_open(tmp_path, monkeypatch):
    engine, updates = make(tmp_path, monkeypatch, FULL)
    outputs = outputs_of(engine)
    stream = engine.stream(PROMPTS, PARAMS)
    next(stream)
    with pytest.raises(sd.EngineBusyError, match="a call of the engine is open"):
        updates.observe(outputs)
    with pytest.raises(sd.DrafterError, match=r"\d sequences are admitted"):
        engine.drafter.replace_weights(trained_weights(updates.module))
    stream.close()
    assert updates.observe(outputs).arm == FULL


def test_the_default_settings_update_within_their_share_of_the_time(tmp_path):
    target = tiny_model("llama")
    write_checkpoint(tmp_path, target)
    engine = sd.Engine(target, f"specblock:{tmp_path}", max_batch_size=4, num_draft_tokens=4)
    updates = OnlineUpdates(engine, OnlineSettings(kept_tokens=100))
    assert updates.observe([]).arm == SKIP
    for _ in range(3):
        updates.observe(outputs_of(engine))
    assert updates.num_kept_tokens <= 100 + 64
    assert updates.bandit.num_tokens == 3 * 6 * 24


def test_other_drafters_are_refused():
    engine = sd.Engine(tiny_model("llama"), "ngram")
    with pytest.raises(sd.ConfigError, match="drafts with 'ngram'; only SpecBlock drafters are updated"):
        OnlineUpdates(engine)


def test_settings_are_checked():
    with pytest.raises(sd.ConfigError, match="time_share is 0; expected a positive number"):
        OnlineSettings(time_share=0)


def test_weights_of_another_shape_are_refused(tmp_path, monkeypatch):
    engine, updates = make(tmp_path, monkeypatch, FULL)
    weights = trained_weights(updates.module) | {"norm.weight": torch.ones(3)}
    with pytest.raises(sd.ConfigError, match=r"norm\.weight has the shape"):
        engine.drafter.replace_weights(weights)


def test_a_sharded_target_is_refused(tmp_path, monkeypatch):
    """Only rank 0 would run the copy of the target that teaches."""
    take_for_sharded(monkeypatch)
    with pytest.raises(sd.ConfigError, match="the target is sharded over processes, and updates need whole weights"):
        make(tmp_path, monkeypatch, FULL)
