"""Graphs of models with recurrent layers: states advance once per step, whatever is recorded, padded or repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.device_copy import to_host
from specdec_fast.kv_cache.forward_layout import decode_batches, lay_out, lay_out_on_host, take_back
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.runner.batch_invariance import make_deterministic
from specdec_fast.runner.drafting import chosen_tokens
from specdec_fast.runner.graphs.capture import Captured
from specdec_fast.runner.ragged_model import RaggedModel
from support.graphs import LIMITS, RULE, Everything, eagerly
from support.grids import combinations, grid
from support.hybrid_programs import HYBRIDS, tiny_hybrid
from support.models import VOCAB_SIZE
from support.programs import CPU
from support.repeated import Repeated, graphs_for_cpu, waits_in_steps

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [40, 3, 3, 8]]
GREEDY = [sd.SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (10, 3, 8, 1, 6)]
SAMPLED = [replace(params, temperature=0.9, seed=seed) for seed, params in enumerate(GREEDY)]
SAMPLED[2] = replace(SAMPLED[2], repetition_penalty=1.2)  # for which there are no graphs
OWNERS = 5


@pytest.fixture(autouse=True)
def graphs_on_cpu(monkeypatch):
    graphs_for_cpu(monkeypatch)


@pytest.fixture(params=grid(list(HYBRIDS), keep=["qwen3_5", "mamba"]))
def model(request):
    """A model that records every forward the first time it sees its bucket."""
    made = RaggedModel(tiny_hybrid(request.param), resolve(CPU), most_draft_tokens=LIMITS.rows_each)
    make_deterministic(made)
    if made.row_padding.multiple > 1:
        made.row_padding = RULE  # so that rows of a bucket are not all padded to the same number
    made.use_graphs(LIMITS)
    made.graphs.asked = Everything()
    return made


def opened_pool(model):
    """Return a pool in which every owner has a prompt of its own."""
    pool = PagePool(model.layout, 256, 16, model.row_padding, num_owners=OWNERS)
    for owner in range(OWNERS):
        pool.add(owner)
        eagerly(model, lay_out(pool, [Rows(owner, 0, owner + 2)], torch.arange(owner + 2) * 5 % VOCAB_SIZE), pool)
    return pool


def expect_same_states(*pools):
    """Check all slots but the scratch slot."""
    first, second = (pool.states for pool in pools)
    assert first.lengths.tolist() == second.lengths.tolist()
    for one, other in zip(first.tensors, second.tensors, strict=True):
        assert all(torch.equal(a[1:], b[1:]) for a, b in zip(one, other, strict=True))


def draft_model_of(target):
    """Return a model that agrees with a target about most tokens."""
    draft = tiny_hybrid(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.02 * parameter.abs().mean())
    return draft


@combinations(name=["qwen3_5", "mamba"], num_draft_tokens=[1, 3], params={"greedy": GREEDY, "sampled": SAMPLED})
def test_engines_emit_what_plain_decoding_emits(name, num_draft_tokens, params):
    """Target and draft model have states. Five sequences leave one after the other, so buckets are padded."""
    target = tiny_hybrid(name)
    plain = sd.Engine(target, None, max_batch_size=1, enforce_eager=True)
    expected = [output.raise_for_error().token_ids for output in plain.generate(PROMPTS, params, progress=False)]
    assert len({token for token_ids in expected for token in token_ids}) > 8
    engine = sd.Engine(target, draft_model_of(name), max_batch_size=5, num_draft_tokens=num_draft_tokens)
    for count in (2, 5, 5):  # the second run needs more state slots than the first one
        outputs = engine.generate(PROMPTS[:count], params[:count], progress=False)
        assert [output.raise_for_error().token_ids for output in outputs] == expected[:count]
    assert engine.last_run.decoding.mean_acceptance_length > 1.2
    described = engine.describe()
    assert min(described["graphs_captured"], described["draft"]["graphs_captured"]) > 0


@torch.inference_mode()
def test_verifications_have_the_bits_and_states_of_eager_forwards(model):
    """The second step replays a row that the first one accepted, and pads a place that had a sequence before."""
    pools = [opened_pool(model) for _ in range(2)]
    for starts, counts in (([2, 3, 4, 5], [2, 4, 1, 1]), ([4, 5, 5], [2, 4, 1]), ([5, 6, 6], [2, 4, 1])):
        each = enumerate(zip(starts, counts, strict=True))
        rows = [Rows(owner, start, count, count - 1) for owner, (start, count) in each]
        ids = torch.arange(sum(counts)) * 11 % VOCAB_SIZE
        batch = lay_out(pools[0], rows, ids)
        logits = eagerly(model, batch, pools[0])
        expected = model.ops.verify_chain(logits, ids, batch.cu_seqlens, None)
        layout = lay_out_on_host(pools[1], rows)
        is_draft = torch.from_numpy(layout.counts.draft_index >= 0)
        found = model.graphs.verify(layout, ids[~is_draft].tolist(), ids[is_draft], {}, pools[1], None)
        assert torch.equal(found[0], logits)
        assert to_host(found[1]) == [part.tolist() for part in expected]
        expect_same_states(*pools)
    assert model.graphs.num_captured == 1


@torch.inference_mode()
def test_drafting_loops_have_the_bits_and_states_of_eager_forwards(model):
    """The second loop replays draft tokens: 1, 0 and 2 were accepted."""
    pools = [opened_pool(model) for _ in range(2)]
    for starts, counts in (([2, 3, 4], [1, 2, 1]), ([4, 5, 7], [2, 2, 1])):
        rows = [Rows(owner, start, count) for owner, (start, count) in enumerate(zip(starts, counts, strict=True))]
        token_ids = list(range(sum(counts)))
        tokens, expected = torch.tensor(token_ids), []
        for batch_of in decode_batches(pools[0], rows, LIMITS.num_forwards):
            batch = batch_of(token_ids=tokens)
            tokens = chosen_tokens(model.ops, eagerly(model, batch, pools[0], batch.last_rows), VOCAB_SIZE, None)
            expected.append(tokens)
        layout = lay_out_on_host(pools[1], rows, ahead=LIMITS.num_forwards - 1)
        chosen = model.graphs.draft(layout, token_ids, LIMITS.num_forwards, {}, pools[1], VOCAB_SIZE)
        assert torch.equal(chosen, torch.stack(expected, dim=1))
        expect_same_states(*pools)


@pytest.mark.parametrize("name", grid(["qwen3_5", "mamba"], keep=["qwen3_5"]))
def test_a_step_waits_once_and_not_to_be_launched(name, monkeypatch):
    """Rows of Mamba are computed one by one without a program."""
    engine = sd.Engine(tiny_hybrid(name), draft_model_of(name), max_batch_size=2, num_draft_tokens=2)
    found_in = waits_in_steps(engine, monkeypatch, PROMPTS, SAMPLED)
    assert all(found == ([], ["to_host"]) for found in found_in), found_in


class _AtAddresses(Repeated):
    """Checks what a CUDA graph cannot: that the states are where they were when it was recorded."""

    def __init__(self, pool):
        super().__init__(CPU)
        self._pool = pool

    def __call__(self, run):
        found = super().__call__(run)
        recorded = self._addresses()

        def replay():
            assert self._addresses() == recorded
            found.replay()

        return Captured(replay, found.output)

    def _addresses(self):
        return self._pool.states.memory().addresses.tolist()


@torch.inference_mode()
def test_graphs_are_recorded_again_after_states_have_moved(model):
    pools = [opened_pool(model) for _ in range(2)]
    model.graphs._capture = _AtAddresses(pools[1])
    for turn in range(4):
        if turn == 2:
            for pool in pools:
                pool.add("new")
        rows = [Rows(owner, owner + 2 + turn, 1) for owner in (1, 3)]
        ids = torch.tensor([turn, 9])
        expected = eagerly(model, lay_out(pools[0], rows, ids), pools[0])
        assert torch.equal(model.forward(lay_out(pools[1], rows, ids), pools[1]), expected)
        expect_same_states(*pools)
    assert model.graphs.num_captured == 1


@torch.inference_mode()
def test_a_layout_that_is_taken_back_can_be_made_again(model):
    """The first time that a step needs a bucket there is no graph, and its rows are laid out for forwards."""
    pool = opened_pool(model)
    rows = [Rows(1, 3, 4, 3), Rows(4, 6, 2)]
    first = lay_out_on_host(pool, rows)
    with pytest.raises(RuntimeError, match="new rows come"):
        lay_out_on_host(pool, rows)
    take_back(pool, first)
    again = lay_out_on_host(pool, rows)
    assert [array.tolist() for array in again.recurrent] == [array.tolist() for array in first.recurrent]
