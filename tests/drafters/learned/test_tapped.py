"""Drafters that compute from hidden states, of every kind: features wait, are computed in portions, and are dropped."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext, make_drafter
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support import clover, dflash, eagle3
from support.grids import grid
from support.models import VOCAB_SIZE
from support.mtp import Case
from support.simulated_engine import SimulatedEngine

GREEDY = sd.SamplingParams()
PARAMS = [GREEDY, sd.SamplingParams(temperature=1.0), sd.SamplingParams(temperature=0.7, top_k=9)]
KINDS = ["eagle3", "dflash", "clover", "mtp"]
of_every_kind = pytest.mark.parametrize("kind", grid(KINDS, keep=["eagle3", "mtp"]))
and_by_pytorch = pytest.mark.parametrize(
    ("kind", "config"),
    grid(
        [*((kind, {}) for kind in KINDS), ("eagle3", {"enforce_eager": True})],
        keep=[("dflash", {}), ("clover", {}), ("eagle3", {"enforce_eager": True})],
    ),
    ids=str,
)


@pytest.fixture(scope="module")
def mtp_case(tmp_path_factory):
    """A target with an MTP layer, and the folder of both."""
    case, folder = Case("qwen3"), tmp_path_factory.mktemp("mtp")
    case.write(folder, "deepseek")
    return case, RaggedModel(case.target, resolve(torch.device("cpu"))), folder


@pytest.fixture
def simulated(tmp_path, model, target, mtp_case):
    """A function that makes a drafter of one kind, and the engine for it; it compares with the formulas of the kind."""

    def make(kind, append=None, **config):
        own_model, own_target, folder = model, target, tmp_path
        if kind == "eagle3":
            expected = partial(eagle3.dense_chain, eagle3.write_checkpoint(folder, model, taps=(0, 1, 2)), {})
        elif kind == "dflash":
            expected = partial(dflash.dense_block, dflash.write_checkpoint(folder, model, taps=(3, 0, 1)), {})
        elif kind == "clover":
            weights = clover.random_clover(num_heads=5)
            clover.write_clover(folder, weights, VOCAB_SIZE)
            expected = partial(clover.dense_chain, weights, model.get_output_embeddings().weight)
            config["draft_tree"] = "chain"
        else:
            case, own_target, folder = mtp_case
            own_model, expected = case.target, case.drafted
        if append is not None:
            own_target = RaggedModel(own_model, own_target.ops, enforce_eager=True)
            unchecked = own_target.ops.without_checks
            own_target.ops = replace(own_target.ops, unchecked=unchecked.replaced(append_kv_=append(unchecked)))
        context = DrafterContext(own_target, EngineConfig(**config))
        drafter = make_drafter(f"{kind}:{folder}", own_target, context.config, None)
        return SimulatedEngine(own_model, drafter, expected)

    return make


@pytest.fixture
def few_wait(monkeypatch):
    """Of each sequence, eight rows of hidden states may wait."""
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED", 8)
    monkeypatch.setattr("specdec_fast.drafters.shared.tapped.MOST_QUEUED_BYTES", 0)


class Counting:
    """Counts the rows of every forward that writes KV entries, layer by layer."""

    def __init__(self):
        self.num_rows = []

    def __call__(self, ops):
        def append(*args):
            self.num_rows.append(len(args[-1]))
            return ops.append_kv_(*args)

        return append


@pytest.mark.usefixtures("few_wait")
@and_by_pytorch
def test_features_wait_while_nothing_is_drafted(simulated, kind, config):
    engine = simulated(kind, **config)
    sequences = engine.new_sequences((5, 2, 9), PARAMS)
    engine.step(sequences, 3)
    for _ in range(12):
        engine.step(sequences, 0)
        assert engine.drafter.num_kept_rows <= 3 * 8
    for _ in range(3):
        engine.step(sequences, 3)
    assert engine.num_proposed > 5
    engine.drafter.grow(4000)
    engine.step(sequences, 3)


@pytest.mark.usefixtures("few_wait")
@of_every_kind
def test_rejected_rows_count_while_they_are_kept(simulated, kind):
    """One sequence is drafted for, the other only keeps rows of the same forwards: it is caught up in time."""
    engine = simulated(kind)
    sequences = engine.new_sequences((5, 5), [GREEDY])
    for _ in range(9):
        draft = engine.drafter.propose(sequences, [5, 0])
        engine.emit(sequences, [draft.token_ids.tolist(), []])
        assert engine.drafter.num_kept_rows <= 2 * 8
    engine.step(sequences, 5, least=1)


@of_every_kind
def test_small_hidden_states_wait_however_many(simulated, kind):
    counting = Counting()
    engine = simulated(kind, counting, enforce_eager=True)
    counting.num_rows.clear()
    sequences = engine.new_sequences((5, 5), [GREEDY])
    for _ in range(70):
        engine.step(sequences, 0)
    assert not counting.num_rows, "nothing is computed before it is needed"
    assert engine.drafter.num_kept_rows == 2 * 74
    engine.drafter.release(sequences[1])
    assert engine.drafter.num_kept_rows == 2 * 70 + 8, "the others of a step still need its hidden states"
    engine.step(sequences[:1], 5, least=1)
    assert engine.drafter.num_kept_rows <= 6


@of_every_kind
def test_forwards_have_as_many_rows_as_the_memory_plan_counts(simulated, kind):
    counting = Counting()
    engine = simulated(kind, counting, enforce_eager=True)
    counting.num_rows.clear()
    engine.drafter.limit_prefill(8)
    sequences = engine.new_sequences((40, 3, 18), [GREEDY])
    for _ in range(10):
        engine.step(sequences, 0)
    engine.step(sequences, 2, least=1)
    assert engine.num_proposed
    assert counting.num_rows.count(8) > 5, "queued features are computed in portions"
    assert max(counting.num_rows) <= max(8, 3 * (2 + 1))


@and_by_pytorch
def test_a_preempted_sequence_starts_again(simulated, kind, config):
    engine = simulated(kind, **config)
    sequences = engine.new_sequences((30, 30, 30), PARAMS)
    engine.step(sequences, 4)
    engine.drafter.release(sequences[1])
    engine.step([sequences[0], sequences[2]], 4)
    engine.prefill([sequences[1]])
    engine.drafter.grow(4000)
    engine.step(sequences, 4)
    assert engine.num_proposed
    engine.release(sequences)
