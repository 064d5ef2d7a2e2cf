"""The SpecBlock drafter proposes what the formulas say, whatever the batch, the chunks, rejections and preemptions."""

from __future__ import annotations

import math
import random

import pytest
import torch

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext
from specdec_fast.drafters.specblock.drafter import SpecBlockDrafter
from specdec_fast.ops.registry import all_ops
from specdec_fast.ops.sampling import gumbel_noise
from specdec_fast.trees.rows import rows_of_trees
from support.models import VOCAB_SIZE
from support.simulated_engine import features_of
from support.specblock import (
    TAPS,
    K,
    dense_blocks,
    logits_and_class,
    visible,
    write_checkpoint,
)
from support.trees import paths_of, trees_of

HAS_PROGRAMS = all_ops()["linear"].why_unavailable("cpp") is None

PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 2, 19, 9))]
GREEDY = sd.SamplingParams(max_new_tokens=12)
SAMPLED = sd.SamplingParams(max_new_tokens=12, temperature=0.8, seed=5)
WIDTHS, SAMPLED_SCORES = (2, 4, 10, 0), (-0.5, -2.25, -3.0, -3.5)


def _sees_own_block(row, other, last, chosen):
    return (row[0] == other[0]) | visible(row, other, last, chosen)


def _sees_whole_block_above(row, other, last, chosen):
    return visible(row, other, last, K)


def _misses_the_chosen_slot(row, other, last, chosen):
    return visible(row, other, last, chosen - 1)


def _sees_later_positions(row, other, last, chosen):
    return ((other[0] <= last) & (row[0] <= last)) | visible(row, other, last, chosen)


WRONG_MASKS = {
    "slots of its own block behind it": _sees_own_block,
    "slots behind the chosen one": _sees_whole_block_above,
    "one slot too few": _misses_the_chosen_slot,
    "slots of later positions": _sees_later_positions,
}


class Compared:
    """Wraps ``propose_trees`` of an engine's drafter: compares every tree with the formulas.

    Then it proposes some of the target's own tokens instead, so that features of several positions arrive at once.
    """

    def __init__(self, engine, model, weights, outputs, is_chain=False):
        self.outputs, self.rng = {tuple(o.prompt_ids): o.token_ids for o in outputs}, random.Random(0)
        self.drafter, self.model, self.weights, self.is_chain = engine.core.drafting.drafter, model, weights, is_chain
        self.propose, self.num_trees, self.num_nodes, self.deepest = self.drafter.propose_trees, 0, 0, 0
        self.drafter.propose_trees = self

    def __call__(self, sequences, limits, node_limits):
        draft = self.propose(sequences, limits, node_limits)
        draft.check(limits, node_limits)
        for s, limit, num_nodes, own in zip(sequences, limits, node_limits, trees_of(draft), strict=True):
            paths = paths_of(*own)
            if limit == 0 or s.length == 1:
                assert not paths
                continue
            expected = self.candidates(s, limit, num_nodes)
            best = sorted(expected.values(), reverse=True)[:num_nodes]
            assert len(paths) == len(best)
            # Scores instead of paths: rounding may exchange two that are equal but for it.
            found = sorted((expected[path] for path in paths), reverse=True)
            torch.testing.assert_close(torch.tensor(found), torch.tensor(best), rtol=1e-3, atol=1e-3)
            self.num_trees, self.num_nodes = self.num_trees + 1, self.num_nodes + len(paths)
            self.deepest = max(self.deepest, *map(len, paths))
        chains = [self.rest(s)[: self.rng.randint(0, limit)] for s, limit in zip(sequences, limits, strict=True)]
        tokens = torch.tensor([token for chain in chains for token in chain], dtype=torch.int64)
        return sd.Draft(tokens, [len(chain) for chain in chains])

    def rest(self, s):
        """The target's own tokens that follow."""
        for prompt, tokens in self.outputs.items():
            done = s.length - len(prompt)
            if (*prompt, *tokens[:done]) == tuple(s.token_ids):
                return tokens[done:]
        raise AssertionError(f"{s.token_ids} is no beginning of an output")

    @torch.no_grad()
    def candidates(self, s, limit, num_nodes):
        """The score of every node that two calls find, by path."""
        features = features_of(self.model, s.token_ids, TAPS)[:-1]
        scores = {}
        self.add_block(scores, (), dense_blocks(self.weights, features, s.token_ids)[-1], s, limit)
        if limit <= K:
            return scores
        best = sorted(scores, key=lambda path: -scores[path])[:num_nodes]
        for path in [path for path in best if len(path) < limit][-1 if self.is_chain else None :][:10]:
            blocks = dense_blocks(self.weights, features, s.token_ids, (len(path) - 1, path[-1]))
            self.add_block(scores, path, blocks[-1], s, limit)
        return scores

    def add_block(self, scores, path, hidden, s, limit):
        above, can_branch = scores.get(path, 0.0), not self.is_chain
        is_first, first_tokens, alternatives = not path, [], []
        for slot in range(K):
            if len(path) == limit:
                break
            logits, rank_class = logits_and_class(self.weights, hidden[slot])
            if s.samples:
                noise = gumbel_noise(VOCAB_SIZE, s.seed, s.length + len(path), logits.device)
                ranked = (logits.double() / s.params.temperature + noise).argsort(descending=True)[:4].tolist()
                found = list(zip(ranked, SAMPLED_SCORES, strict=True))
            else:
                log_probs = logits.double().log_softmax(-1)
                ranked = log_probs.argsort(descending=True)[:10].tolist()
                found = [(token, float(log_probs[token])) for token in ranked]
            can_branch &= rank_class < 3 or slot == 0
            width = self.width(math.exp(found[0][1]), rank_class, is_first and slot == 0) if can_branch else 1
            for token, value in found[:width]:
                child = (*path, token)
                scores[child] = max(scores.get(child, -math.inf), above + value)
            first_tokens.append(found[0])
            alternatives += [((*path, token), slot) for token, _ in found[1:width]]
            path = (*path, found[0][0])
            above = scores[path]
        for start, slot in alternatives if limit <= K else []:
            behind = start
            for token, value in first_tokens[slot + 1 :]:
                scores[(*behind, token)] = scores[behind] + value
                behind = (*behind, token)

    @staticmethod
    def width(probability, rank_class, is_first):
        if is_first:
            return 3 if probability >= 0.9 else 5 if probability >= 0.8 else 8 if probability >= 0.6 else 10
        width = max(1, WIDTHS[rank_class])
        return min(2, width) if probability >= 0.95 else min(3, width) if probability >= 0.85 else width


@pytest.mark.parametrize(
    ("options", "config"),
    [
        pytest.param({}, {"num_draft_tokens": 8}, marks=pytest.mark.grid),
        ({"draft_vocab_size": 40, "num_layers": 3}, {"max_prefill_tokens": 7, "num_draft_tokens": 3}),
        ({"seed": 1}, {"kv_cache_tokens": 48, "page_size": 4, "num_draft_tokens": 5}),
        pytest.param({"seed": 2}, {"draft_tree": "chain", "num_draft_tokens": 7}, marks=pytest.mark.grid),
    ],
    ids=["two-blocks", "subset", "short-of-pages", "chain"],
)
def test_proposals_are_those_of_the_formulas(tmp_path, model, options, config):
    weights = write_checkpoint(tmp_path, model, **options)
    params = [(GREEDY, SAMPLED)[i % 2] for i in range(len(PROMPTS))]
    plain = sd.Engine(model, None).generate(PROMPTS, params)
    engine = sd.Engine(model, f"specblock:{tmp_path}", max_batch_size=4, **config)
    compared = Compared(engine, model, weights, plain, is_chain="draft_tree" in config)
    found = engine.generate(PROMPTS, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    assert engine.last_run.decoding.num_accepted_tokens >= 8
    assert compared.num_trees >= 8
    assert compared.num_nodes > compared.num_trees
    assert compared.deepest <= config["num_draft_tokens"]
    assert compared.drafter.num_admitted == 0, "released sequences leave nothing behind"
    assert compared.drafter.pool.is_vacant


class Blocks:
    """The true blocks of one sequence in a drafter's pool, and blocks behind drafted tokens."""

    def __init__(self, folder, target, model, enforce_eager):
        self.weights = write_checkpoint(folder, model)
        config = EngineConfig(enforce_eager=enforce_eager)
        self.drafter = SpecBlockDrafter(DrafterContext(target, config), str(folder))
        self.drafter.prepare(100, 8)
        for keys, values in self.drafter.pool.layers:
            keys.fill_(torch.nan)  # an entry that was never written must not be read
            values.fill_(torch.nan)
        self.token_ids = PROMPTS[3]
        self.features = features_of(model, self.token_ids, TAPS)[:-1]
        self.drafter.pool.add("own")
        self.conditions = self.drafter.model.project(self.features)
        self.true = self.run(range(len(self.features)))

    def run(self, positions):
        tokens = [self.token_ids[i + 1] for i in positions]
        blocks = [Rows("own", K * positions[0], K * len(positions))]
        conditions = self.conditions[list(positions)]
        return self.drafter.rows(self.drafter.pool, blocks, conditions, list(positions), tokens, None)[0]

    def behind(self, branches):
        """Compute one block for each branch (slot, token), all in one forward: ``[branches, K, H]``."""
        last = len(self.features) - 1
        parents = [-1, 0, 1]
        for place, (slot, _) in enumerate(branches, start=1):
            parents += [slot - 1, *range(K * place - 1, K * place + K - 2)]
        rows = [Rows("own", K * last, K * (1 + len(branches)))]
        tokens = [self.token_ids[-1], *(token for _, token in branches)]
        trees = rows_of_trees(parents, [len(parents)])
        inputs = torch.stack([self.conditions[-1], *(self.true[-1, slot] for slot, _ in branches)])
        bases = [last] * (1 + len(branches))
        return self.drafter.rows(self.drafter.pool, rows, inputs, bases, tokens, None, trees)[0][1:]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["program", "eager"])
@torch.inference_mode()
def test_a_slot_sees_what_the_formula_lets_it_see(tmp_path, target, model, enforce_eager):
    blocks = Blocks(tmp_path, target, model, enforce_eager)
    described = blocks.drafter.describe()
    assert described["forward_program"] == (HAS_PROGRAMS and not enforce_eager), described
    branches = [(0, 3), (0, 11), (2, 5), (3, 7)]
    found = blocks.behind(branches)
    for branch, hidden in zip(branches, found, strict=True):
        dense = dense_blocks(blocks.weights, blocks.features, blocks.token_ids, branch)
        torch.testing.assert_close(blocks.true, dense[:-1], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(hidden, dense[-1], rtol=1e-3, atol=1e-3)
        for name, wrong in WRONG_MASKS.items():
            if name == "slots behind the chosen one" and branch[0] == K - 1:
                continue  # there are none
            other = dense_blocks(blocks.weights, blocks.features, blocks.token_ids, branch, wrong)[-1]
            assert (other - hidden).abs().max() > 1e-2, f"the comparison does not notice that a row sees {name}"


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["program", "eager"])
@torch.inference_mode()
def test_blocks_do_not_see_one_another(tmp_path, target, model, enforce_eager):
    blocks = Blocks(tmp_path, target, model, enforce_eager)
    one, other = blocks.behind([(1, 3), (2, 5)]), blocks.behind([(1, 90), (2, 5)])
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1]), "a block sees a block of another branch"
    changed = Blocks(tmp_path, target, model, enforce_eager)
    changed.true[-1] += 1.0  # what the blocks behind are made of, and nothing else
    assert torch.equal(blocks.run(range(4)), blocks.true[:4]), "a block sees blocks of later positions"
