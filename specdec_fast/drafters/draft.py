"""What a drafter returns: the draft tokens of one step, chains or trees, and their checks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec_fast.device_copy import to_device
from specdec_fast.errors import DrafterError
from specdec_fast.trees.growing import TreeNodes
from specdec_fast.trees.parents import ROOT, depths_of, parents_among


@dataclass(frozen=True)
class Draft:
    """The draft tokens of one step.

    Attributes:
        token_ids: ``[sum(num_draft_tokens)]`` int64, sequence after sequence. The engine copies them to the target's
            device if they are on another one.
        num_draft_tokens: number of tokens per sequence, in batch order; 0 is allowed.
        parents: for trees, ``[sum(num_draft_tokens)]`` int32: the index of each token's parent among the tokens of its
            own sequence, -1 for a child of the last committed token. A parent comes before its children, and the
            children of one parent are different tokens. In depth-first order with the likeliest child first, KV entries
            seldom move. On the CPU: reading it elsewhere waits. None if every sequence has a chain.
        scores: how confident the drafter is of each token, ``[sum(num_draft_tokens)]`` fp32, as the logarithm of its
            estimate that the target accepts the token and all before it on its path. So at most 0, and at most the
            score of the parent. On the CPU. None if it has no estimates. They decide no token.
    """

    token_ids: Tensor
    num_draft_tokens: list[int]
    parents: Tensor | None = None
    scores: Tensor | None = None

    def check(self, limits: list[int], node_limits: list[int] | None = None) -> list[int]:
        """Check the draft against the contract; return the depth of each sequence's draft.

        Args:
            limits: per sequence, the largest depth: of a chain, its number of tokens.
            node_limits: per sequence, the largest number of draft tokens; None: ``limits``.

        Raises:
            DrafterError: there is not one count per sequence, a count or a depth exceeds its limit, the counts do not
                add up to the number of tokens, the tokens are not a dense int64 tensor in memory, the parents are not
                those of trees, or the scores rise along a path.
        """
        self._check_tokens(limits if self.parents is None or node_limits is None else node_limits)
        depths = self.num_draft_tokens if self.parents is None else self._checked_depths(limits)
        if self.scores is not None:
            self._check_scores(self.scores)
        return depths

    def depths(self) -> list[int]:
        """Return the depth of each sequence's draft; of a chain, the number of its tokens."""
        if self.parents is None:
            return self.num_draft_tokens
        return [max(depths_of(parents), default=0) for parents in self.parents_by_sequence()]

    def tokens_by_sequence(self) -> list[list[int]]:
        """Return each sequence's tokens."""
        return self._by_sequence(self.token_ids.tolist())

    def parents_by_sequence(self) -> list[Many[int]]:
        """Return the parents of each sequence's tokens; in a chain, each token's is the one before."""
        if self.parents is None:
            return [range(ROOT, count - 1) for count in self.num_draft_tokens]
        return self._by_sequence(self.parents.tolist())

    def scores_by_sequence(self) -> list[list[float]] | None:
        """Return the scores of each sequence's tokens."""
        return None if self.scores is None else self._by_sequence(self.scores.tolist())

    def pruned(self, least_score: float) -> Draft:
        """Return the draft without the tokens of a lower score; a checked draft stays one."""
        scores = self.scores_by_sequence()
        assert scores is not None
        kept: list[int] = []
        parents: list[int] = []
        counts = []
        places = self._by_sequence(range(len(self.token_ids)))
        for of_tree, above, in_draft in zip(scores, self.parents_by_sequence(), places, strict=True):
            nodes = [node for node, score in enumerate(of_tree) if score >= least_score]
            parents += parents_among(nodes, above)
            kept += [in_draft[node] for node in nodes]
            counts.append(len(nodes))
        return Draft(
            self.token_ids[to_device(kept, self.token_ids.device)],
            counts,
            None if self.parents is None else torch.tensor(parents, dtype=torch.int32, device="cpu"),
            self.scores[kept] if self.scores is not None else None,
        )

    def _by_sequence(self, per_token: Many[Any]) -> list[Any]:
        counts = self.num_draft_tokens
        return [per_token[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]

    def _check_tokens(self, limits: list[int]) -> None:
        counts = self.num_draft_tokens
        if not isinstance(self.token_ids, Tensor) or self.token_ids.dtype != torch.int64:
            kind = getattr(self.token_ids, "dtype", type(self.token_ids).__name__)
            raise DrafterError(f"a drafter's token_ids are {kind}; expected a tensor of int64.")
        _expect_dense("token_ids", self.token_ids)
        if not isinstance(counts, (list, tuple)) or not all(type(n) is int for n in counts):
            raise DrafterError(f"a drafter's num_draft_tokens are {counts!r}; expected a list of integers.")
        if len(counts) != len(limits) or any(not 0 <= n <= limit for n, limit in zip(counts, limits, strict=False)):
            raise DrafterError(f"a drafter proposed {counts} tokens per sequence; at most {limits} were asked for.")
        if self.token_ids.dim() != 1 or len(self.token_ids) != sum(counts):
            raise DrafterError(
                f"a drafter's token_ids have shape {list(self.token_ids.shape)}; expected [{sum(counts)}], the sum of "
                f"num_draft_tokens {counts}."
            )

    def _checked_depths(self, limits: list[int]) -> list[int]:
        parents = self._per_token("parents", self.parents, torch.int32).tolist()
        depths = []
        # Reading the tokens would wait for a device. There the first of equal children is the one that is accepted.
        tokens = self.token_ids.tolist() if self.token_ids.device.type == "cpu" else range(len(parents))
        for above, of_tree, limit in zip(self._by_sequence(parents), self._by_sequence(tokens), limits, strict=True):
            if not all(ROOT <= parent < node for node, parent in enumerate(above)):
                raise DrafterError(f"a drafter's parents are {above}; expected -1 or the index of an earlier token.")
            if len(set(zip(above, of_tree, strict=True))) < len(above):
                raise DrafterError("a drafter proposed two children of one parent with the same token; merge them.")
            depths.append(max(depths_of(above), default=0))
            if depths[-1] > limit:
                raise DrafterError(f"a drafter proposed a tree of depth {depths[-1]}; at most {limit} was asked for.")
        return depths

    def _check_scores(self, scores: Tensor) -> None:
        values = self._per_token("scores", scores, torch.float32).tolist()
        for of_tree, above in zip(self._by_sequence(values), self.parents_by_sequence(), strict=True):
            for score, parent in zip(of_tree, above, strict=True):
                most = 0.0 if parent == ROOT else of_tree[parent]
                if not score <= most:  # NaN too
                    raise DrafterError(
                        f"a drafter's scores have a node of {score} under {most}; expected log-probabilities of paths, "
                        "which never rise from a parent (the last committed token has 0) to its child."
                    )

    def _per_token(self, name: str, tensor: Any, dtype: torch.dtype) -> Tensor:
        """Return ``tensor`` if it has one value of ``dtype`` per token."""
        shape = self.token_ids.shape
        kind = type(tensor).__name__
        if isinstance(tensor, Tensor):
            _expect_dense(name, tensor)
            if tensor.dtype == dtype and tensor.shape == shape:
                return tensor
            kind = f"{tensor.dtype} {list(tensor.shape)}"
        raise DrafterError(f"a drafter's {name} are {kind}; expected a tensor of {str(dtype)[6:]} {list(shape)}.")


def draft_of_trees(trees: Iterable[TreeNodes | None], device: torch.device, has_scores: bool = False) -> Draft:
    """Return the draft of a batch.

    Args:
        trees: of each sequence, in batch order; None: no draft tokens.
        device: of the tokens.
        has_scores: whether the scores of the nodes are log-probabilities.
    """
    drafted = [tree or TreeNodes([], [], []) for tree in trees]
    tokens, parents, scores = ([value for tree in drafted for value in tree[field]] for field in range(3))
    return Draft(
        to_device(tokens, device),
        [len(tree.token_ids) for tree in drafted],
        torch.tensor(parents, dtype=torch.int32, device="cpu"),
        torch.tensor(scores, dtype=torch.float32, device="cpu") if has_scores else None,
    )


def _expect_dense(name: str, tensor: Tensor) -> None:
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
        raise DrafterError(f"a drafter's {name} are {kind}; expected a dense tensor on a device with memory.")
