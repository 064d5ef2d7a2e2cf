"""Trees that a drafter of heads proposes in an engine, compared with what its formulas say."""

from __future__ import annotations

import torch


class ComparedTrees:
    """Wraps ``propose_trees`` of a drafter with a static tree; a subclass compares every tree with the formulas."""

    def __init__(self, drafter, model):
        self.drafter, self.model = drafter, model
        self.propose, self.num_trees = drafter.propose_trees, 0
        drafter.propose_trees = self

    @torch.no_grad()
    def __call__(self, sequences, limits, node_limits):
        draft = self.propose(sequences, limits, node_limits)
        draft.check(limits, node_limits)
        counts = draft.num_draft_tokens
        parents = torch.zeros(0, dtype=torch.int32) if draft.parents is None else draft.parents
        trees = zip(draft.token_ids.split(counts), parents.split(counts), strict=True)
        for s, limit, num_nodes, (tokens, above) in zip(sequences, limits, node_limits, trees, strict=True):
            if limit == 0:
                assert len(tokens) == 0
                continue
            shape = self.drafter.tree.within(limit, num_nodes)
            assert above.tolist() == shape.parents
            self.num_trees += 1
            self.compare(s, tokens.tolist(), shape)
        return draft

    def states(self, s):
        """The input of the target's output layer at every position but the newest: ``[n - 1, H]``."""
        return self.model(torch.tensor([s.token_ids[:-1]]), output_hidden_states=True).hidden_states[-1][0]

    def compare(self, s, tokens, shape):
        """Compare the tokens of one tree: by scores, because rounding may exchange ids that are equal but for it."""
        raise NotImplementedError
