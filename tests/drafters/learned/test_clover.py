"""The Clover drafter proposes what the formulas say, whatever the batch, the chunks, rejections and preemptions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext, make_drafter
from specdec_fast.drafters.clover.drafter import CloverDrafter
from specdec_fast.ops.sampling import gumbel_noise
from specdec_fast.request.sequence import Sequence
from support.clover import HIDDEN, augmented, behind, logits_of, random_clover, write_clover
from support.compared_trees import ComparedTrees
from support.lazy_signs import with_lazy_weights
from support.models import VOCAB_SIZE, tiny_model

# Nodes of one depth have different numbers of children, and a deep node is the child of a second-ranked one.
TREE = [[0], [1], [0, 0], [1, 1], [0, 1], [1, 0], [2], [0, 0, 0], [1, 1, 0], [0, 0, 3]]
PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 2, 33, 9, 17, 5))]
KINDS = (
    sd.SamplingParams(max_new_tokens=8),
    sd.SamplingParams(max_new_tokens=8, temperature=0.8),
    sd.SamplingParams(max_new_tokens=8, repetition_penalty=1.5),
)
PARAMS = [KINDS[i % 3] for i in range(len(PROMPTS))]


@pytest.fixture
def folder(tmp_path):
    return write_clover(tmp_path / "clover", random_clover(), VOCAB_SIZE)


def load(target, folder, **config):
    return CloverDrafter(DrafterContext(target, EngineConfig(**config)), str(folder))


class Compared(ComparedTrees):
    def __init__(self, drafter, model, weights):
        super().__init__(drafter, model)
        self.weights = weights

    def compare(self, s, tokens, shape):
        output = self.model.get_output_embeddings().weight
        hidden = {-1: augmented(self.weights, self.states(s))[-1]}  # of each node, without its own token
        nodes = zip(tokens, shape.depths, shape.ranks, shape.parents, strict=True)
        for node, (token, depth, rank, parent) in enumerate(nodes):
            last = s.token_ids[-1] if parent == -1 else tokens[parent]
            own = behind(self.weights, depth, hidden[parent], output[last])
            hidden[node] = own
            scores = logits_of(self.weights, depth, own, output).double()
            if (penalty := s.params.repetition_penalty) != 1:
                seen = torch.tensor(sorted({*s.token_ids, last}))
                scores[seen] = torch.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
            if s.params.temperature:
                noise = gumbel_noise(VOCAB_SIZE, s.seed, s.length + depth, scores.device)
                scores = scores / s.params.temperature + noise
            expected = scores.sort(descending=True).values[rank]
            torch.testing.assert_close(scores[token], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        pytest.param({}, {"draft_tree": TREE}, marks=pytest.mark.grid),
        ({"num_blocks": 2, "qk_norm": True}, {"max_prefill_tokens": 7, "num_draft_tokens": 2, "draft_tree": TREE}),
        ({"num_heads": 4}, {"kv_cache_tokens": 64, "page_size": 4, "enforce_eager": True, "draft_tree": TREE}),
    ],
    ids=["tree", "chunks", "pytorch"],
)
def test_proposals_are_those_of_the_formulas(tmp_path, model, options, config):
    weights = random_clover(**options)
    engine = sd.Engine(model, f"clover:{write_clover(tmp_path, weights, VOCAB_SIZE)}", max_batch_size=4, **config)
    assert engine.drafter.describe()["forward_program"] is not config.get("enforce_eager", False)
    compared = Compared(engine.core.drafting.drafter, model, weights)
    for output in engine.generate(PROMPTS, PARAMS):
        output.raise_for_error()
    assert compared.num_trees > 25
    assert engine.drafter.num_admitted == 0, "released sequences leave nothing behind"
    assert engine.drafter.pool.is_vacant


def test_a_shared_output_layer_has_the_sign_that_it_shows(model, folder):
    lazy = with_lazy_weights(tiny_model("llama"))
    engine = sd.Engine(lazy, f"clover:{folder}", max_batch_size=4, draft_tree=TREE, enforce_eager=True)
    compared = Compared(engine.core.drafting.drafter, model, random_clover())
    for output in engine.generate(PROMPTS[:4], PARAMS[:4]):
        output.raise_for_error()
    assert compared.num_trees > 5


def test_which_tree_is_drafted(tmp_path, target, folder, monkeypatch):
    drafter = make_drafter(str(folder), target, EngineConfig(), None)
    assert isinstance(drafter, CloverDrafter), "config.json says which kind it is"
    assert drafter.tree.choices == [(0,), (0, 0), (0, 0, 0), (1,)]
    assert drafter.max_nodes == drafter.describe()["num_heads"] + 1 == 4
    assert drafter.taps == ("final",)
    own = write_clover(tmp_path / "own", random_clover(num_heads=2), VOCAB_SIZE, clover_choices=TREE)
    assert load(target, own).tree.choices == [(0,), (1,), (0, 0), (1, 1), (0, 1), (1, 0), (2,)]
    assert load(target, own, draft_tree="chain").max_nodes == 0
    with pytest.raises(sd.ConfigError, match=r"draft_tree has the node \[0, 0, 0\], but the checkpoint has 2 heads"):
        load(target, own, draft_tree=TREE)
    monkeypatch.setattr("specdec_fast.ops.registry.Ops.has_trees", lambda self, op: False)
    assert load(target, own).tree.choices == [(0,), (0, 0)], "a target that verifies no trees gets a chain"


def test_nan_features_give_different_siblings(target, folder):
    drafter = load(target, folder, draft_tree=TREE)
    drafter.prepare(200, 16)
    sequences = [Sequence(i, [1] * 5, 5, 90, PARAMS[i], frozenset(), seed=7 * i) for i in range(2)]
    drafter.admit(sequences)
    drafter.observe(sequences, [range(4)] * 2, torch.full((8, 1, HIDDEN), torch.nan))
    for sequence in sequences:
        drafter.propose_trees([sequence], [3], [10]).check([3], [10])


def test_memory_counts_the_targets_output_layer_once(target, model, folder):
    drafter = load(target, folder)
    own = {weight.data_ptr() for weight in drafter.weights()}
    assert model.get_output_embeddings().weight.data_ptr() in own
    assert drafter.bytes_per_token == 2 * 2 * 8 * 4
    assert drafter.step_bytes(4, 3, 64) < drafter.step_bytes(8, 3, 64) < drafter.step_bytes(8, 3, None)


def without(name):
    return lambda weights: weights.pop(name)


def added(name, *shape):
    return lambda weights: weights.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (without("heads.1.v_proj.weight"), {}, r"lacks the weights heads.1.v_proj.weight"),
        (without("augmenting_block.mlp.up_proj.weight"), {}, "lacks the weights layers.0.mlp.up_proj.weight"),
        (added("lm_head.weight", 97, 32), {}, "has weights that Clover does not: lm_head.weight"),
        (added("heads.0.q_proj.weight", 16, 32), {}, r"heads.0.q_proj.weight has the shape \[16, 32\]"),
        (dict, {"clover_num_heads": 4}, "lacks the weights heads.3"),
        (dict, {"clover_num_heads": "three"}, "clover_num_heads is 'three'; expected a positive integer"),
        (dict, {"clover_num_layers": 0}, "clover_num_layers is 0; expected a positive integer"),
        (dict, {"clover_choices": [[1, 1]]}, r"clover_choices of .* has the node \[1, 1\] without its parent"),
        (dict, {"num_attention_heads": 6}, "not a multiple of the number of attention heads"),
        (dict, {"vocab_size": 90}, "was made for 90 ids"),
        (dict, {"hidden_size": 64}, "has the shape|was made for hidden states of 64"),
        (dict, {"intermediate_size": None}, "config.json lacks intermediate_size"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, target, change, config, message):
    weights = random_clover()
    change(weights)
    write_clover(tmp_path, weights, VOCAB_SIZE, **config)
    with pytest.raises((sd.ConfigError, sd.VocabularyMismatchError), match=message):
        load(target, tmp_path)


def test_other_folders_and_targets_are_refused(tmp_path, target, folder):
    with pytest.raises(sd.ConfigError, match="expected the folder of a Clover drafter"):
        load(target, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(sd.ConfigError, match=r"has no weights; expected one of .*model\.safetensors"):
        load(target, folder)


def test_a_target_without_a_linear_output_layer_is_refused(target, model, folder, monkeypatch):
    monkeypatch.setattr(model, "get_output_embeddings", lambda: nn.Embedding(4, 5))
    with pytest.raises(sd.ConfigError, match="is a Embedding; Clover's heads share a linear layer"):
        load(target, folder)
