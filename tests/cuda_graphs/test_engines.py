"""Whole engines with graphs: the tokens are those without graphs, and a step waits for the device once."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

import specdec_fast as sd
from specdec_fast import device_copy
from specdec_fast.batch import sampling_batch
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache import accepted_paths, forward_layout
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.ops.registry import all_ops
from specdec_fast.runner import verification
from specdec_fast.runner.eager import EagerRunner
from specdec_fast.runner.graphs import inputs
from support.graphs import opened_pool
from support.grids import grid
from support.models import truncated_copy
from support.recording_drafter import Recording, hidden_states_of_text
from support.repeated import waits_in_steps
from support.scripted_trees import RandomTrees


@pytest.fixture(scope="module")
def pair(hugging_face_model):
    return hugging_face_model, truncated_copy(hugging_face_model, 2)


PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [40, 3, 3, 8]]
PARAMS = [
    sd.SamplingParams(max_new_tokens=14),
    sd.SamplingParams(max_new_tokens=11, temperature=0.8, seed=3),
    sd.SamplingParams(max_new_tokens=13, temperature=1.1, repetition_penalty=1.3, seed=4),
    sd.SamplingParams(max_new_tokens=1),
    sd.SamplingParams(max_new_tokens=18),
]


@pytest.mark.parametrize(
    ("greedy", "method"), grid(product([True, False], ["eqspec", "exspec"]), keep=[(False, "exspec")])
)
def test_engines_emit_the_same_with_and_without_graphs(pair, method, greedy, graphs_on_cpu):
    params = [replace(p, temperature=0.0, repetition_penalty=1.0) for p in PARAMS] if greedy else PARAMS
    outputs, engines = [], []
    for eager in (False, True):
        engine = sd.Engine(*pair, method=method, max_batch_size=3, num_draft_tokens=3, enforce_eager=eager)
        for _ in range(2):
            outputs.append([output.raise_for_error().token_ids for output in engine.generate(PROMPTS, params)])
        engines.append(engine.describe())
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert [len(ids) for ids in outputs[0]] == [p.max_new_tokens for p in params]
    graphed, eager = engines
    assert graphed["graphs"]
    assert graphed["graphs_captured"] > 0
    assert graphed["draft"]["graphs_captured"] > 0
    assert (eager["graphs"], eager["graphs_captured"], eager["draft"]["graphs"]) == (False, 0, False)


def pack_copies(monkeypatch):
    """Pack the arrays of a copy into one buffer on the CPU as well, as for a GPU; return the names of those that do."""
    names = []
    for module in (forward_layout, sampling_batch, inputs, accepted_paths, verification):

        def packed(arrays, device, name=module.__name__):
            names.append(name)
            return device_copy._in_one_copy(arrays, device)

        monkeypatch.setattr(module, "all_to_device", packed)
    return names


@pytest.mark.grid
def test_packed_copies_change_no_token(pair, graphs_on_cpu, monkeypatch):
    """With graphs and without, greedy, sampled and penalised sequences in one batch."""
    expected = [output.token_ids for output in sd.Engine(*pair, enforce_eager=True).generate(PROMPTS, PARAMS)]
    names, found = pack_copies(monkeypatch), []
    for eager in (False, True):
        engine = sd.Engine(*pair, max_batch_size=3, num_draft_tokens=3, enforce_eager=eager)
        found += [[output.raise_for_error().token_ids for output in engine.generate(PROMPTS, PARAMS)] for _ in range(2)]
    assert {forward_layout.__name__, sampling_batch.__name__} <= set(names)
    assert found == [expected] * 4


def test_a_step_lays_out_its_rows_in_one_copy(model, monkeypatch):
    """The tensors that depend on row counts alone are cached; everything else of a batch is one buffer."""
    pool, rows = opened_pool(model), [Rows(0, 3, 2), Rows(1, 0, 4)]
    expected = lay_out(pool, rows, torch.arange(6))  # also fills the cache of row counts
    sizes = []

    def copied(tensor, device):
        sizes.append(tensor.nbytes)
        return tensor.clone()

    monkeypatch.setattr(device_copy, "_copied", copied)
    monkeypatch.setattr(forward_layout, "all_to_device", device_copy._in_one_copy)
    batch = lay_out(pool, rows, torch.arange(6))
    assert len(sizes) == 1
    for name in ("positions", "slot_mapping", "seqused_k", "block_table"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
        assert getattr(batch, name).dtype == getattr(expected, name).dtype, name


def test_preemption_changes_no_token(pair, graphs_on_cpu):
    """Block tables of preempted sequences change; the graphs stay."""
    expected = [output.token_ids for output in sd.Engine(*pair, enforce_eager=True).generate(PROMPTS, PARAMS)]
    engine = sd.Engine(*pair, max_batch_size=3, num_draft_tokens=3, page_size=4, kv_cache_tokens=32)
    assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
    assert engine.last_run.num_preemptions
    assert engine.describe()["graphs_captured"] > 0


@pytest.mark.parametrize("max_positions", grid({"all": 512, "some": 12}, keep=["some"]))
def test_sequences_at_their_end_draft_in_the_graph_of_the_others(pair, max_positions, graphs_on_cpu, monkeypatch):
    """Otherwise a batch would leave the graph whenever one of its texts ends; past a model's positions it must."""
    without_graph = []
    draft = EagerRunner.draft

    def note(self, pool, plan):
        without_graph.append(plan.num_draft_tokens)
        return draft(self, pool, plan)

    monkeypatch.setattr(EagerRunner, "draft", note)
    outputs = []
    for eager in (True, False):
        engine = sd.Engine(*pair, max_batch_size=3, num_draft_tokens=3, enforce_eager=eager)
        engine.drafter.model.max_positions = max_positions
        engine.drafter.model.use_these_graphs(engine.drafter.model.graphs)
        for _ in range(2):
            without_graph.clear()
            params = [replace(p, repetition_penalty=1.0) for p in PARAMS]
            outputs.append([out.raise_for_error().token_ids for out in engine.generate(PROMPTS, params)])
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    are_mixed = [max(counts) == 3 > min(counts) for counts in without_graph]
    assert any(are_mixed) == (max_positions == 12)


def test_there_are_none_on_a_cpu(pair):
    description = sd.Engine(*pair).describe()
    draft = description["draft"]
    assert (description["graphs"], description["why_no_graphs"], draft["graphs"]) == (False, None, False)


def found_in_steps(pair, monkeypatch, params, num_draft_tokens=3):
    engine = sd.Engine(*pair, max_batch_size=3, num_draft_tokens=num_draft_tokens)
    return waits_in_steps(engine, monkeypatch, PROMPTS, params)


@pytest.mark.skipif(all_ops()["linear"].why_unavailable("cpp") is not None, reason="PyTorch's ops wait")
@pytest.mark.parametrize("params", grid({"greedy": PARAMS[0], "mixed": PARAMS}, keep=["mixed"]))
@pytest.mark.parametrize("num_draft_tokens", grid([0, 3], keep=[3]))
def test_a_step_waits_once_and_not_to_be_launched(pair, monkeypatch, params, num_draft_tokens, graphs_on_cpu):
    found_in = found_in_steps(pair, monkeypatch, params, num_draft_tokens)
    assert all(found == ([], ["to_host"]) for found in found_in), found_in


# What the watch calls it, and a way to wait.
WAITS = {
    "item": ("item", lambda x: x.sum().item()),
    "bool": ("__bool__", lambda x: bool((x > 0).any())),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "mask": ("aten.index", lambda x: x[x > 0]),
    "tolist": ("tolist", lambda x: x.argmax(-1).tolist()),
    "tensor": ("tensor", lambda x: torch.tensor([1.0], device=x.device)),
    "list": ("__getitem__ by a list", lambda x: x[..., [0, 1]]),
}


@pytest.mark.skipif(all_ops()["linear"].why_unavailable("cpp") is not None, reason="PyTorch's ops wait")
@pytest.mark.parametrize(("named", "which"), grid(product(WAITS, ["verify", "draft"]), keep=[("mask", "draft")]))
def test_a_wait_inside_a_forward_is_found(pair, monkeypatch, named, which, graphs_on_cpu):
    (name, wait), inner = WAITS[named], pair[["verify", "draft"].index(which)].lm_head
    forward = inner.forward

    def waiting(x):
        wait(x)
        return forward(x)

    monkeypatch.setitem(inner.__dict__, "forward", waiting)
    found_in = found_in_steps(pair, monkeypatch, sd.SamplingParams(max_new_tokens=12))
    drafting = found_in[1:4]  # the first step emits the first tokens
    assert all(name in launched for launched, _ in drafting), drafting


def test_graphs_hand_over_hidden_states(pair, graphs_on_cpu):
    """The recording drafter asserts that each position arrives once; bits are those of one forward of the text."""
    params = [replace(p, max_new_tokens=12) for p in PARAMS]
    drafter = Recording((2, "final"), lambda s, limit: [5] * limit)
    engine = sd.Engine(pair[0], drafter, max_batch_size=3)
    expected = sd.Engine(pair[0], None, enforce_eager=True).generate(PROMPTS, params)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert engine.describe()["graphs_captured"] > 0
    assert len(engine.drafter.released) == 2 * len(PROMPTS)
    for token_ids, seen in engine.drafter.released:
        assert torch.equal(seen, hidden_states_of_text(engine.target, token_ids))


@pytest.mark.parametrize(
    ("sampled", "dtype"),
    grid(product([False, True], [torch.float32, torch.bfloat16]), keep=[(True, torch.bfloat16)]),
    ids=str,
)
def test_trees_are_verified_by_graphs(pair, sampled, dtype, graphs_on_cpu):
    """Tokens and log-probability bits are those of plain decoding. Steps of a penalised sequence have no graph."""
    target = copy.deepcopy(pair[0]).to(dtype)
    params = [replace(p, logprobs=True, **({} if sampled else {"temperature": 0.0})) for p in PARAMS]
    params = [p if i != 2 else replace(p, max_new_tokens=4) for i, p in enumerate(params)]

    def outputs_of(engine):
        return [(o.raise_for_error().token_ids, o.logprobs) for o in engine.generate(PROMPTS, params, progress=False)]

    expected = outputs_of(sd.Engine(target, None, max_batch_size=1))
    drafter = RandomTrees([token_ids for token_ids, _ in expected], max_nodes=12)
    engine = sd.Engine(target, drafter, max_batch_size=4, num_draft_tokens=4)
    assert [outputs_of(engine) for _ in range(3)] == [expected] * 3
    assert engine.last_run.decoding.mean_acceptance_length > 1.5, "the trees held little of the text"
    assert any(kind.has_trees and kind.samples == sampled for kind in engine.target.graphs._graphs)


def test_engines_with_kept_pages_emit_the_same(pair, graphs_on_cpu):
    """A graph reads the block tables of every launch, so pages may have other places in each."""
    prompts = [[*range(20), i] for i in range(3)] + [list(range(18))]
    expected = sd.Engine(*pair, max_batch_size=3, num_draft_tokens=3).generate(prompts, PARAMS[0])
    engine = sd.Engine(*pair, max_batch_size=3, num_draft_tokens=3, page_size=4, prefix_cache=True)
    for _ in range(2):
        outputs = engine.generate(prompts, PARAMS[0])
        assert [o.raise_for_error().token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [output.num_cached_tokens for output in outputs] == [20, 20, 20, 16]
    assert engine.describe()["graphs_captured"] > 0
    assert engine.describe()["draft"]["graphs_captured"] > 0
