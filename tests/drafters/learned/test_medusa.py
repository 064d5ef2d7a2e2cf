"""The Medusa drafter proposes what the formula says, whatever the batch, the chunks, rejections and preemptions."""

from __future__ import annotations

import pytest
import torch

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext, make_drafter
from specdec_fast.drafters.medusa.drafter import MedusaDrafter
from specdec_fast.ops.sampling import gumbel_noise
from specdec_fast.request.sequence import Sequence
from support.compared_trees import ComparedTrees
from support.medusa import FORMATS, logits_by_formula, named, random_heads, write_heads
from support.models import VOCAB_SIZE

HIDDEN = 32
TREE = [[0], [1], [0, 0], [0, 1], [2], [1, 0], [0, 0, 0], [0, 0, 3]]
PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 2, 33, 9, 17))]
GREEDY = sd.SamplingParams(max_new_tokens=8)
SAMPLED = sd.SamplingParams(max_new_tokens=8, temperature=0.8)


def load(target, folder, **config):
    with torch.inference_mode():
        return MedusaDrafter(DrafterContext(target, EngineConfig(**config)), str(folder))


class Compared(ComparedTrees):
    def __init__(self, engine, model, heads, token_map=None):
        super().__init__(engine.core.drafting.drafter, model)
        self.heads, self.token_map = heads, token_map

    def compare(self, s, tokens, shape):
        by_depth = self.scores(s)
        for token, depth, rank in zip(tokens, shape.depths, shape.ranks, strict=True):
            expected = by_depth[depth].sort(descending=True).values[rank]
            torch.testing.assert_close(by_depth[depth][token], expected, rtol=1e-4, atol=1e-4)

    def scores(self, s):
        """What each head's tokens are ranked by, ``[V]`` per depth."""
        last, by_depth = self.states(s)[-1:], []
        for ahead, head in enumerate(self.heads):
            scores = logits_by_formula(head, last)[0].double()
            if self.token_map is not None:
                scores = scores.new_full((VOCAB_SIZE,), -torch.inf).index_copy(0, self.token_map, scores)
            if s.samples:
                noise = gumbel_noise(VOCAB_SIZE, s.seed, s.length + ahead, scores.device)
                scores = scores / s.params.temperature + noise
            by_depth.append(scores)
        return by_depth


@pytest.mark.parametrize(
    ("num_blocks", "config"),
    [
        pytest.param(1, {"draft_tree": TREE}, marks=pytest.mark.grid),
        (2, {"max_prefill_tokens": 7, "num_draft_tokens": 2, "draft_tree": "chain"}),
        (0, {"kv_cache_tokens": 48, "draft_tree": TREE, "num_draft_tokens": 3}),
    ],
)
def test_proposals_are_those_of_the_formula(tmp_path, model, num_blocks, config):
    heads = random_heads(VOCAB_SIZE, HIDDEN, num_blocks=num_blocks)
    write_heads(tmp_path, named(heads, "safetensors"))
    engine = sd.Engine(model, f"medusa:{tmp_path}", max_batch_size=4, **config)
    compared = Compared(engine, model, heads)
    params = [(GREEDY, SAMPLED)[i % 2] for i in range(len(PROMPTS))]
    for output in engine.generate(PROMPTS, params):
        output.raise_for_error()
    assert compared.num_trees > 25
    assert compared.drafter.num_kept_rows == 0, "released sequences leave nothing behind"


def test_a_smaller_vocabulary_is_mapped(tmp_path, model):
    heads = random_heads(VOCAB_SIZE, HIDDEN)
    token_map = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))[:40]
    cut = [(blocks, output[token_map]) for blocks, output in heads]
    weights = [named(heads, "vllm"), named(cut, "vllm")]  # vLLM cuts whole output layers when it loads them
    drafted = []
    for i, own in enumerate(weights):
        write_heads(tmp_path / str(i), own | {"token_map": token_map}, "vllm")
        engine = sd.Engine(model, str(tmp_path / str(i)), max_batch_size=1, draft_tree=TREE)
        compared = Compared(engine, model, cut, token_map)
        engine.generate(PROMPTS[1:3], [GREEDY, SAMPLED])
        drafted.append(compared.num_trees)
    assert drafted[0] == drafted[1] > 5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_loads_alike(tmp_path, target, kind, bias):
    heads = random_heads(VOCAB_SIZE, HIDDEN, num_heads=4, num_blocks=2, bias=bias)
    folder = write_heads(tmp_path, named(heads, kind), kind)
    drafter = make_drafter(str(folder), target, EngineConfig(), None)
    assert isinstance(drafter, MedusaDrafter)
    assert drafter.describe()["num_heads"] == 4, "counted by the weights: config.json says 9"
    expected = [part for blocks, output in heads for part in (output, *(p for block in blocks for p in block))]
    assert all(map(torch.equal, drafter.weights(), filter(torch.is_tensor, expected)))
    assert drafter.taps == ("final",)
    assert sum(weight.nbytes for weight in drafter.weights()) == sum(w.nbytes for w in named(heads, kind).values())


def test_one_output_layer_for_all_heads(tmp_path, target):
    heads = random_heads(VOCAB_SIZE, HIDDEN, num_heads=3)
    weights = {
        name: w for name, w in named(heads, "vllm").items() if name not in ("lm_heads.1.weight", "lm_heads.2.weight")
    }
    write_heads(tmp_path / "one", weights, "vllm")
    weights["lm_head.weight"] = weights.pop("lm_heads.0.weight")
    write_heads(tmp_path / "other", weights, "vllm")
    for name in ("one", "other"):
        weights = load(target, tmp_path / name).weights()
        assert sum(torch.equal(weight, heads[0][1]) for weight in weights) == 3


def without(name):
    return lambda weights: weights.pop(name)


def replaced(name, *shape):
    return lambda weights: weights.update({name: torch.zeros(shape)})


def mapped(*ids):
    return lambda weights: weights.update({"token_map": torch.tensor(ids)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("1.1.weight"), "lacks the output layer of head 1"),
        (without("1.0.linear.weight"), "lacks the weight 1.0.linear.weight"),
        (replaced("3.0.linear.weight", 32, 32), "lacks the output layer of head 3"),
        (replaced("0.1.linear.weight", 32, 32), "has the block 0.1.linear, but the output 0.1"),
        (replaced("0.norm.weight", 32), "has the weight 0.norm.weight, which Medusa heads do not have"),
        (replaced("2.0.linear.weight", 16, 16), r"2.0.linear.weight has the shape \[16, 16\]; expected \[32, 32\]"),
        (replaced("2.0.linear.bias", 16), r"2.0.linear.bias has the shape \[16\]; expected \[32\]"),
        (replaced("2.1.weight", 97, 16), r"2.1.weight has the shape \[97, 16\]; expected \[any number, 32\]"),
        (replaced("2.1.weight", 90, 32), r"heads of \[90, 97\] ids"),
        (mapped(3, 97), "token_map names ids outside"),
        (mapped(3, 3), "token_map in .* names 1 different ids"),
        (dict.clear, "has no head"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, target, change, message):
    weights = named(random_heads(VOCAB_SIZE, HIDDEN), "safetensors")
    change(weights)
    write_heads(tmp_path, weights)
    with pytest.raises((sd.ConfigError, sd.VocabularyMismatchError), match=message):
        load(target, tmp_path)


def test_other_checkpoints_are_refused(tmp_path, target, model):
    with pytest.raises(sd.ConfigError, match="has no Medusa heads; expected one of medusa_lm_head"):
        load(target, tmp_path)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"damaged")
    with pytest.raises(sd.ConfigError, match=r"cannot read the weights in .*medusa_lm_head\.pt"):
        load(target, tmp_path)
    torch.save([1], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(sd.ConfigError, match="holds a list; expected tensors by name"):
        load(target, tmp_path)
    write_heads(tmp_path / "vocabulary", named(random_heads(90, HIDDEN), "pt"), "pt")
    with pytest.raises(sd.VocabularyMismatchError, match=r"know 90 ids, target .* has 97"):
        load(target, tmp_path / "vocabulary")


def test_which_tree_is_drafted(tmp_path, target, model, monkeypatch):
    weights = named(random_heads(VOCAB_SIZE, HIDDEN, num_heads=2), "pt")
    plain, own = (
        write_heads(tmp_path / "a", weights, "pt"),
        write_heads(tmp_path / "b", weights, "pt", medusa_choices=TREE),
    )
    default = load(target, plain).tree
    assert len(default.choices) == 16
    assert len(default.num_ranks) == 2
    # Nodes beyond the last head are left out: published choices are for more heads than a file may hold.
    assert load(target, own).tree.choices == [(0,), (1,), (0, 0), (0, 1), (2,), (1, 0)]
    assert load(target, own, draft_tree=[[0], [1]]).tree.choices == [(0,), (1,)]
    assert load(target, own, draft_tree="chain").max_nodes == 0
    with pytest.raises(sd.ConfigError, match=r"draft_tree has the node \[0, 0, 0\], but the checkpoint has 2 heads"):
        load(target, own, draft_tree=TREE)
    with pytest.raises(sd.ConfigError, match=r"medusa_choices of .* has the node \[1, 1\] without its parent"):
        load(target, write_heads(tmp_path / "c", weights, "pt", medusa_choices=[[1, 1]]))
    monkeypatch.setattr("specdec_fast.ops.registry.Ops.has_trees", lambda self, op: False)
    assert load(target, own).tree.choices == [(0,), (0, 0)], "a target that verifies no trees gets a chain"
    with pytest.raises(sd.NotYetSupportedError, match="verifies no trees"):
        sd.Engine(model, str(own), draft_tree=[[0], [1]])


def test_nan_logits_give_different_siblings(tmp_path, target):
    drafter = load(target, write_heads(tmp_path, named(random_heads(VOCAB_SIZE, HIDDEN), "pt"), "pt"), draft_tree=TREE)
    sequences = [Sequence(i, [1] * 5, 5, 90, params, frozenset(), seed=1) for i, params in enumerate((GREEDY, SAMPLED))]
    for group in (sequences[:1], sequences):
        drafter.observe(group, [range(4)] * len(group), torch.full((4 * len(group), 1, HIDDEN), torch.nan))
        drafter.propose_trees(group, [3] * len(group), [9] * len(group)).check([3] * len(group), [9] * len(group))


def test_a_repetition_penalty_counts_the_tokens_of_the_sequence_and_no_other(tmp_path, target):
    """Token 0 is the likeliest one, and has not been seen."""
    ((blocks, output),) = random_heads(VOCAB_SIZE, HIDDEN, num_heads=1, num_blocks=0)
    output[:] = 0.0
    output[0], output[5] = 1.0, 0.9
    drafter = load(target, write_heads(tmp_path, named([(blocks, output)], "pt"), "pt"), draft_tree="chain")
    params = sd.SamplingParams(temperature=1e-3, repetition_penalty=1.5)
    sequence = Sequence(0, [1, 2, 3], 3, 90, params, frozenset(), seed=1)
    drafter.observe([sequence], [range(2)], torch.ones(2, 1, HIDDEN))
    assert drafter.propose_trees([sequence], [1], [1]).token_ids.tolist() == [0]
