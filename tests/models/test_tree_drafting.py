"""Drafting trees in one call of a program: what a program refuses, and the shape of a tree whose tokens are known."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.program.executors import TokenChoice, TreeRules
from specdec_fast.runner.row_module import RowModule
from specdec_fast.trees.parents import depths_of
from support.programs import needs_programs
from support.row_modules import OPS, VOCAB, WIDTH, function_of, pool_of

ROWS = [Rows("a", 0, 2), Rows("b", 0, 1)]
TOKENS = [1, 2, 3]
CHOICE = TokenChoice(VOCAB, None)


def draft(rules, choice=CHOICE, carried=None):
    function = function_of()
    module, pool = RowModule(function, OPS, 16), pool_of(function)
    inputs = torch.linspace(-1, 1, len(TOKENS) * WIDTH).view(-1, WIDTH) if carried is None else carried
    assert module.program is not None
    return module.program.draft_trees(pool.spans(ROWS, ahead=[8, 8]), TOKENS, rules, choice, inputs)


@needs_programs
def test_trees_keep_to_their_limits():
    drafted = draft(TreeRules([1, 4], [5, 7], 3, [], [], 0.5))
    assert drafted.counts == [3, 7]  # one level of three children; seven nodes on four levels
    assert drafted.parents[:3].tolist() == [-1, -1, -1]
    assert max(depths_of(drafted.parents[3:].tolist())) <= 4
    assert (drafted.scores <= 0).all()


@needs_programs
def test_a_static_tree_is_drafted_as_it_is():
    drafted = draft(TreeRules([2, 2], [4, 3], 4, [-1, 0, -1, 0], [0, 0, 1, 1], 0.5))
    assert drafted.counts == [4, 3]
    assert drafted.parents.tolist() == [-1, 0, 0, -1, -1, 0, -1]
    first, second = drafted.token_ids[:4].tolist(), drafted.token_ids[4:].tolist()
    assert len(set(first[1:3])) == 2
    assert first[0] != first[3]
    assert second[0] != second[2]


@needs_programs
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (TreeRules([1], [1, 1], 1, [], [], 0.5), "2 spans of 3 rows"),
        (TreeRules([1, 0], [1, 1], 1, [], [], 0.5), "at least 1"),
        (TreeRules([1, 1], [1], 1, [], [], 0.5), "2 trees has 1 numbers of nodes"),
        (TreeRules([1, 1], [1, 0], 1, [], [], 0.5), "at least 1"),
        (TreeRules([1, 1], [1, 1], 0, [], [], 0.5), "frontier of 0 nodes"),
        (TreeRules([1, 1], [1, 1], 1, [-1, 1], [0, 0], 0.5), "node 1 of a static tree"),
        (TreeRules([1, 1], [1, 1], 1, [-1], [0, 0], 0.5), "a static tree of 1 nodes has 2 ranks"),
        (TreeRules([1, 1], [1, 1], 1, [], [0], 0.5), "a static tree of 0 nodes has 1 ranks"),
        (TreeRules([1, 1], [1, 1], 1, [], [], 0.0), "temperature of greedy requests is 0.0"),
        (TreeRules([1, 1], [1, 1], 1, [-1], [-1], 0.5), "node 0 of a static tree"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        draft(rules)


@needs_programs
def test_a_choice_that_does_not_fit_is_refused():
    rules = TreeRules([1, 1], [1, 1], 1, [], [], 0.5)
    with pytest.raises(ValueError, match="chosen from 30 ids"):
        draft(rules, TokenChoice(VOCAB + 1, None))
    with pytest.raises(IndexError, match="draft id 1 stands for 29"):
        draft(rules, TokenChoice(2, None, torch.tensor([0, VOCAB]), VOCAB))
    own = torch.tensor([0, VOCAB])
    with pytest.raises(IndexError, match="id 1 of the target stands for 29; the drafter has 29 ids"):
        draft(rules, TokenChoice(2, None, torch.tensor([0, 1]), 2, own, 2))
    with pytest.raises(ValueError, match="of 2 ids of a target, 3 may be chosen"):
        draft(rules, TokenChoice(2, None, torch.tensor([0, 1]), 2, own, 3))
    with pytest.raises(ValueError, match="not contiguous"):
        draft(rules, carried=torch.zeros(WIDTH, len(TOKENS)).t())
