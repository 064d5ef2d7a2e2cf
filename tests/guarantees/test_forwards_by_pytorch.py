"""Forwards that PyTorch runs: the same bits in every engine, batch and number of threads; a model is left as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config

import specdec_fast as sd
from bench.common.tiny_models import tiny_model as tiny_default_model
from specdec_fast.errors import DeterminismError
from specdec_fast.models import row_counts
from specdec_fast.ops import resolve
from specdec_fast.runner.batch_invariance import make_deterministic
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import grid
from support.models import WITH_CHUNKS, tiny_model
from support.row_bits import SPECULATIONS, Alone, RecordedEngine, assert_same_bits, assert_same_bits_of_pair
from support.source_tree import ROOT

CPU = torch.device("cpu")
PROMPTS = [torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 9, 17, 30, 5)]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_demo_pair_has_the_same_bits_in_every_batch(dtype, prompt_ids, monkeypatch):
    monkeypatch.setattr("support.row_bits.NEW_TOKENS", 8)
    assert_same_bits_of_pair(dtype, [prompt_ids[i][:12] for i in (4, 5, 9, 0, 1, 12, 6)], SPECULATIONS)


ON_THREADS = """
import torch
from support import row_bits

row_bits.NEW_TOKENS = 3
for threads in (2, 3):
    torch.set_num_threads(threads)
    row_bits.assert_same_bits_of_pair(torch.bfloat16, [[5, 6, 7], [8], [9, 10, 11, 12]], row_bits.SPECULATIONS[2:])
print("the same")
"""


@pytest.mark.grid
def test_demo_pair_has_the_same_bits_on_several_threads():
    """In a process whose threads sleep while they wait, because spinning takes minutes on a busy machine."""
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": paths}
    found = subprocess.run(
        [sys.executable, "-c", ON_THREADS], env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip().endswith("the same"), found.stderr


@pytest.fixture(scope="module")
def gpt2():
    """Linears of 768 features, whose sums differ with the number of rows; 256 positions."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=768, n_layer=2, n_head=12, n_positions=256, initializer_range=0.1)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.grid
@pytest.mark.parametrize(("batch_size", "k"), [(4, 2), (32, 9)])
def test_engines_of_all_sizes_have_the_same_bits(gpt2, batch_size, k):
    alone = Alone(gpt2, PROMPTS, enforce_eager=True)
    settings = {"max_batch_size": batch_size, "num_draft_tokens": k, "enforce_eager": True}
    assert_same_bits(gpt2, gpt2, PROMPTS, alone, **settings)


@pytest.fixture
def no_two_counts_alike(monkeypatch):
    """Linears of every number of rows have bits of their own, whatever this machine's library does."""
    original = functional.linear

    def linear(rows, weight, bias=None):
        count = rows.numel() // rows.shape[-1]
        return original(rows, weight, bias) * (1 + count / 2**22)

    monkeypatch.setattr(functional, "linear", linear)
    monkeypatch.setitem(row_counts.FUNCTIONS, "linear", linear)
    monkeypatch.setattr(row_counts, "_found", {})


@pytest.mark.grid
def test_a_library_with_no_two_counts_alike_gives_all_engines_the_same_bits(no_two_counts_alike):
    """Also where more rows are verified at once than the model has positions."""
    model = tiny_model("gpt2")
    alone = Alone(model, PROMPTS, backend="torch")
    for batch_size, k in ((4, 2), (32, 9)):
        assert batch_size < 32 or batch_size * (k + 1) > model.config.n_positions
        settings = {"max_batch_size": batch_size, "num_draft_tokens": k, "backend": "torch"}
        assert_same_bits(model, "ngram", PROMPTS, alone, **settings)


def changed(change):
    """A tiny model whose first MLP computes something else."""
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Changed", (type(mlp),), {"forward": change})
    return model


def with_routers(mlp, rows):
    """Calls linears without a module, as routers do, and by their weights in another dtype."""
    weight = mlp.gate_proj.weight
    gate = functional.linear(rows.float(), weight.float()) + rows @ weight.T + torch.matmul(rows, mlp.up_proj.weight.T)
    return mlp.down_proj(mlp.act_fn(gate))


def in_a_batch_of_matrices(mlp, rows):
    weights = torch.stack([mlp.gate_proj.weight, mlp.up_proj.weight])
    gate, up = torch.bmm(rows.expand(2, -1, -1), weights.transpose(1, 2))
    return mlp.down_proj(mlp.act_fn(gate) * up)[None]


@pytest.mark.parametrize("architecture", grid(list(WITH_CHUNKS), keep=list(WITH_CHUNKS)[::3]))
def test_no_known_architecture_needs_to_be_computed_one_by_one(architecture):
    described = sd.Engine(tiny_model(architecture), None, enforce_eager=True).describe()
    assert (described["rows_one_by_one"], described["why_one_by_one"]) == (False, None)


@pytest.mark.grid
def test_positions_as_complex_numbers_are_computed_in_batches():
    """DeepSeek-V2 rotates by products of complex numbers, whose bits differ in batches that are not padded."""
    model = tiny_default_model("deepseek_v2")
    described = sd.Engine(model, None, enforce_eager=True).describe()
    assert (described["rows_one_by_one"], described["why_one_by_one"]) == (False, None)
    alone = Alone(model, PROMPTS, enforce_eager=True)
    assert_same_bits(model, "ngram", PROMPTS, alone, max_batch_size=5, num_draft_tokens=3, enforce_eager=True)


@pytest.mark.grid
def test_linears_without_a_module_are_computed_in_chunks():
    model = changed(with_routers)
    engine = sd.Engine(model, None, backend="torch")
    assert engine.describe()["rows_one_by_one"] is False
    assert engine.target.hf.linears.sees_all
    alone = Alone(model, PROMPTS, backend="torch")
    assert_same_bits(model, model, PROMPTS, alone, max_batch_size=5, num_draft_tokens=3, backend="torch")


def test_what_may_mix_rows_is_computed_one_by_one():
    model = changed(in_a_batch_of_matrices)
    described = sd.Engine(model, None, enforce_eager=True).describe()
    assert described["rows_one_by_one"] is True
    assert "bmm" in described["why_one_by_one"]
    alone = Alone(model, PROMPTS, enforce_eager=True)
    assert_same_bits(model, "ngram", PROMPTS, alone, max_batch_size=5, num_draft_tokens=3, enforce_eager=True)


def counting(depends):
    """A model with linears whose bits depend on the number of rows in ways that no chunk helps."""

    def forward(mlp, rows):
        out = type(mlp).__mro__[1].forward(mlp, rows)
        return out + 1e-5 * depends(rows.numel() // rows.shape[-1])

    return RaggedModel(changed(forward), resolve(CPU, "torch"))


def test_a_model_that_fails_in_batches_is_computed_one_by_one():
    model = counting(lambda count: count > 64)
    make_deterministic(model)
    assert model.row_padding.one_by_one
    assert model.why_one_by_one == "rows had other bits in another batch"


def test_a_program_of_launches_that_fails_in_batches_gives_way_to_pytorch():
    model = RaggedModel(tiny_model("llama"), resolve(CPU, "torch"))
    model.why_no_program = None
    model.use_programs(None, lambda batch, *rest: model.hf.forward(batch, *rest) * (1 + 1e-5 * len(batch.token_ids)))
    make_deterministic(model)
    assert (model.has_program, model.why_no_program) == (False, "rows had other bits in another batch")
    assert (model.row_padding.multiple, model.row_padding.largest) == (64, 2048), "as without a program"
    assert model.why_one_by_one is None


def test_a_model_that_is_never_the_same_is_refused():
    calls = []

    def never_twice_alike(count):
        calls.append(count)
        return len(calls)

    with pytest.raises(DeterminismError, match="pass deterministic=False"):
        make_deterministic(counting(never_twice_alike))


def test_a_model_that_is_computed_one_by_one_is_checked_on_few_rows(monkeypatch):
    """Its forwards have one row each, so every row of the check costs a forward of the whole model."""
    model, checked = RaggedModel(changed(in_a_batch_of_matrices), resolve(CPU, "torch")), []
    forward = model.hf.forward

    def counted(batch, pool, *rest):
        if pool.row_padding.one_by_one:
            checked.append(len(batch.token_ids))
        return forward(batch, pool, *rest)

    monkeypatch.setattr(model.hf, "forward", counted)
    make_deterministic(model)
    assert model.row_padding.one_by_one
    assert 64 <= sum(checked) <= 96, "a text of 32 tokens, computed twice, and some rows of another"


def test_a_model_that_remembers_its_last_row_is_refused():
    """One row at a time, its rows are repeated by the same forwards, but after those of another text."""
    last = [torch.zeros(())]

    def remembering(mlp, rows):
        out = type(mlp).__mro__[1].forward(mlp, rows) + 1e-5 * last[0]
        last[0] = rows[0, -1].clone()
        return out

    with pytest.raises(DeterminismError, match="not even one row at a time"):
        make_deterministic(RaggedModel(changed(remembering), resolve(CPU, "torch")))


def test_bits_do_depend_on_the_batch_without_determinism(no_two_counts_alike):
    """Negative control: what is computed by one rule above differs without it."""
    target = tiny_model("llama")
    alone = Alone(target, PROMPTS, backend="torch")
    run = RecordedEngine(target, target, max_batch_size=5, num_draft_tokens=4, backend="torch", deterministic=False)
    run.decode(PROMPTS)
    shared = set(alone.logits) & set(run.logits)
    assert any(not torch.equal(run.logits[key], alone.logits[key]) for key in shared)


@pytest.mark.grid
def test_two_engines_over_one_model_in_two_threads():
    model = tiny_model("llama")
    attention = model.config._attn_implementation
    params = sd.SamplingParams(max_new_tokens=12, logprobs=True)
    engines = [sd.Engine(model, model, num_draft_tokens=k, backend="torch") for k in (2, 5)]
    expected = [(o.token_ids, o.logprobs) for o in engines[0].generate(PROMPTS, params)]
    found, begun = {}, threading.Barrier(2)

    def decode(number):
        begun.wait()
        found[number] = [
            [(o.raise_for_error().token_ids, o.logprobs) for o in engines[number].generate(PROMPTS, params)]
            for _ in range(3)
        ]

    workers = [threading.Thread(target=decode, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {0: [expected] * 3, 1: [expected] * 3}
    assert_untouched(model, attention)


def test_model_is_left_as_it_was_after_an_exception(monkeypatch):
    model = tiny_model("llama")
    attention = model.config._attn_implementation
    engine = sd.Engine(model, None, enforce_eager=True)
    hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS)
    hook.remove()
    assert_untouched(model, attention)
    assert all(o.finish_reason != "error" for o in engine.generate(PROMPTS, sd.SamplingParams(max_new_tokens=2)))


def assert_untouched(model, attention):
    assert model.config._attn_implementation == attention
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(torch.tensor([[1, 2, 3]]))
