"""Taps of whole models: the hidden states of the unmodified model, by programs and by PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import RowPadding, Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.runner.batch_invariance import make_deterministic
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import combinations
from support.models import CONFIGS, VOCAB_SIZE, tiny_model
from support.programs import CPU, DTYPES, needs_programs

LAYERS = 3  # of a tiny model
ALL = (*range(LAYERS + 1), "final")
TEXTS = [torch.arange(n) * 7 % VOCAB_SIZE for n in (33, 20, 1)]


def tapped_model(model, taps, executor):
    found = RaggedModel(model, resolve(CPU), enforce_eager=executor == "pytorch")
    assert (found.program is None) == (executor == "pytorch"), found.why_no_program
    found.use_taps(taps)
    return found


def pool_of(model):
    pool = PagePool(model.layout, len(TEXTS) * 64, 16, model.row_padding)
    for owner in range(len(TEXTS)):
        pool.add(owner)
    return pool


def hidden_states(model, pool, rows, token_ids, logit_rows=None):
    batch = lay_out(pool, rows, token_ids)
    found = model.empty_hidden_states(len(token_ids))
    model.forward(batch, pool, logit_rows, found)
    return found


def of_texts(model):
    """All texts in two forwards, the second of which asks for one row's logits, as a prefill does."""
    pool, first = pool_of(model), [len(text) // 2 for text in TEXTS]
    rows = [Rows(i, 0, n) for i, n in enumerate(first) if n]
    begin = hidden_states(model, pool, rows, torch.cat([t[:n] for t, n in zip(TEXTS, first, strict=True)]))
    rows = [Rows(i, n, len(t) - n) for i, (t, n) in enumerate(zip(TEXTS, first, strict=True))]
    last = torch.cat([t[n:] for t, n in zip(TEXTS, first, strict=True)])
    end = hidden_states(model, pool, rows, last, torch.tensor([0]))
    ends = end.split([len(t) - n for t, n in zip(TEXTS, first, strict=True)])
    return torch.cat([piece for pair in zip(begin.split(first), ends, strict=True) for piece in pair])


@torch.inference_mode()
def dense_hidden_states(model):
    """What a copy of the model returns as ``output_hidden_states``, and the residual stream before its final norm."""
    model, found, before_norm = copy.deepcopy(model), [], []
    decoder = model.base_model
    layers = decoder.h if hasattr(decoder, "h") else decoder.layers

    def keep(module, args, output):
        before_norm.append(output if isinstance(output, torch.Tensor) else output[0])

    layers[-1].register_forward_hook(keep)
    for text in TEXTS:
        states = model(text[None], output_hidden_states=True).hidden_states
        assert len(states) == LAYERS + 1
        found.append(torch.stack([*states[:-1], before_norm.pop(), states[-1]], dim=2)[0])
    return torch.cat(found)


def distances(found, truth):
    """The relative distance of each tap."""
    return (found.double() - truth).norm(dim=(0, 2)) / truth.norm(dim=(0, 2))


@pytest.mark.parametrize("executor", [pytest.param("program", marks=needs_programs), "pytorch"])
@combinations(dtype=DTYPES, architecture=list(CONFIGS))
def test_taps_are_the_hidden_states_of_the_unmodified_model(architecture, dtype, executor):
    """At most twice as far from the fp64 model as PyTorch's own; and far from the taps beside them."""
    model = tapped_model(tiny_model(architecture).to(dtype), ALL, executor)
    truth = dense_hidden_states(copy.deepcopy(model.model).double())
    ours, theirs = of_texts(model), dense_hidden_states(model.model)
    assert ours.shape == (sum(map(len, TEXTS)), len(ALL), 32)
    assert ours.dtype == dtype
    assert torch.equal(ours[:, 0], theirs[:, 0]), "embeddings"
    assert (distances(ours, truth) <= 2 * distances(theirs, truth)).all()
    beside = distances(ours, truth.roll(1, dims=1))
    assert (beside > 5 * distances(ours, truth)).all(), "an id that is off by one would show"
    rows = distances(ours.roll(1, dims=0), truth)
    assert (rows > 5 * distances(ours, truth)).all(), "a wrong row would show"


@pytest.mark.parametrize("executor", [pytest.param("program", marks=needs_programs), "pytorch"])
def test_taps_are_written_in_the_order_of_the_drafter(executor):
    everything = of_texts(tapped_model(tiny_model("llama"), ALL, executor))
    some = of_texts(tapped_model(tiny_model("llama"), ("final", 2, 0, LAYERS), executor))
    assert torch.equal(some, everything[:, [4, 2, 0, 3]])


@pytest.mark.parametrize("executor", [pytest.param("program", marks=needs_programs), "pytorch"])
def test_a_row_of_hidden_states_has_the_same_bits_in_every_batch(executor):
    model = tapped_model(tiny_model("qwen3").bfloat16(), ALL, executor)
    make_deterministic(model)
    together = of_texts(model)
    pool = pool_of(model)
    alone = [hidden_states(model, pool, [Rows(i, 0, len(text))], text) for i, text in enumerate(TEXTS)]
    assert torch.equal(torch.cat(alone), together)


def test_rows_that_are_computed_one_by_one_have_hidden_states():
    model = tapped_model(tiny_model("llama"), ALL, "pytorch")
    expected = of_texts(model)
    model.row_padding = RowPadding(one_by_one=True)
    assert distances(of_texts(model), expected.double()).max() < 1e-5


@needs_programs
def test_a_program_without_taps_stays_as_it_is():
    """Taps add copies and change no other instruction, so logits have the same bits."""
    plain, tapped = (RaggedModel(tiny_model("gemma2"), resolve(CPU)) for _ in range(2))
    before = plain.program._plan
    plain.use_taps(())
    assert plain.program._plan is before
    assert before.tap_bytes == 0
    assert all(buffer.place != 3 for buffer in before.buffers)
    tapped.use_taps((1, "final"))
    plan = tapped.program._plan
    written = {n for n, buffer in enumerate(plan.buffers) if buffer.place == 3}
    kept = [i for i in plan.instructions if written.isdisjoint(i.writes)]
    assert len(written) == len(plan.instructions) - len(kept) == 2
    assert list(map(kind, kept)) == list(map(kind, before.instructions))
    assert (plan.arena_bytes, plan.scratch_bytes) == (before.arena_bytes, before.scratch_bytes)
    pools = pool_of(plain), pool_of(tapped)
    logits = [
        m.forward(lay_out(pool, [Rows(0, 0, 33)], TEXTS[0]), pool)
        for m, pool in zip((plain, tapped), pools, strict=True)
    ]
    assert torch.equal(*logits)


def kind(instruction):
    return type(instruction).__name__, getattr(instruction, "code", None), getattr(instruction, "shape", None)


@needs_programs
@pytest.mark.parametrize("wrong", [torch.empty(4, 2, 16), torch.empty(5, 2, 32), torch.empty(2, 4, 32).transpose(0, 1)])
def test_memory_of_another_size_is_refused(wrong):
    model = tapped_model(tiny_model("llama"), (1, 2), "program")
    pool = pool_of(model)
    batch = lay_out(pool, [Rows(0, 0, 4)], TEXTS[0][:4])
    with pytest.raises(ValueError, match=r"hidden states have .* bytes; expected 1024, contiguous"):
        model.forward(batch, pool, None, wrong)


def test_the_model_is_left_as_it_was():
    model = tiny_model("llama")
    tapped = tapped_model(model, ALL, "pytorch")
    of_texts(tapped)
    broken = Rows(0, 0, 4)
    pool = pool_of(tapped)
    with pytest.raises(IndexError):
        hidden_states(tapped, pool, [broken], torch.full((4,), VOCAB_SIZE + 3))
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Elsewhere(torch.nn.Module):
    """Layers that are not in a ModuleList."""

    def __init__(self, layers):
        super().__init__()
        self.first, self.others = layers[0], torch.nn.ModuleList(layers[1:])

    def __iter__(self):
        return iter([self.first, *self.others])

    def __getitem__(self, index):
        return [*self][index]


def test_a_model_whose_layers_are_not_found_is_refused():
    llama = tiny_model("llama")
    llama.model.layers = Elsewhere(llama.model.layers)
    model = RaggedModel(llama, resolve(CPU))
    with pytest.raises(sd.UnsupportedModelError, match="LlamaModel has no ModuleList of 3 layers whose entry i"):
        model.use_taps((1,))


def test_final_is_refused_if_the_output_layer_gets_something_else():
    llama = tiny_model("llama")

    class Scaled(type(llama)):
        def forward(self, *args, logits_to_keep=0, **kwargs):
            out = self.model(*args, **{k: v for k, v in kwargs.items() if k != "use_cache"})
            out["logits"] = self.lm_head(out.last_hidden_state / 2)
            return out

    llama.__class__ = Scaled
    model = RaggedModel(llama, resolve(CPU))
    with pytest.raises(sd.UnsupportedModelError, match="between its decoder and its output layer"):
        model.use_taps((1, "final"))
    model.use_taps((1,))


def test_layers_that_pass_on_something_else_are_refused():
    llama = tiny_model("llama")

    class Paired(type(llama.model.layers[1])):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states.view(1, -1, 2, 16).flatten(2), *args, **kwargs).view(1, -1, 2, 16)

    class Joining(type(llama.model.layers[1])):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states.flatten(2), *args, **kwargs)

    llama.model.layers[1].__class__, llama.model.layers[2].__class__ = Paired, Joining
    model = RaggedModel(llama, resolve(CPU))
    model.use_taps((1,))
    with pytest.raises(sd.UnsupportedModelError, match=r"do not pass on hidden states .*\[1, 8, 2, 16\]"):
        model.use_taps((1, 2))
