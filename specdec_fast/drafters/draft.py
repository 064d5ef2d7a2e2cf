"""What a drafter proposes for one step, held to its contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.trees import depths_of
from specdec_fast.device_copy import to_device
from specdec_fast.errors import DrafterError


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
        """Check the draft against the contract.

        Args:
            limits: per sequence, the largest depth: of a chain, its number of tokens.
            node_limits: per sequence, the largest number of draft tokens; None: ``limits``.

        Returns:
            The depth of each sequence's draft.

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
        return [max(depths_of(own), default=0) for own in self._by_sequence(self.parents)]

    def scores_by_sequence(self) -> list[list[float]] | None:
        """Return the scores of each sequence's tokens."""
        return None if self.scores is None else self._by_sequence(self.scores)

    def pruned(self, least_score: float) -> Draft:
        """Return the draft without the tokens of a lower score; a checked draft stays one."""
        scores = self.scores_by_sequence()
        assert scores is not None
        kept: list[int] = []
        parents: list[int] = []
        counts = []
        first = 0
        above = self._by_sequence(self.parents) if self.parents is not None else [range(-1, len(s) - 1) for s in scores]
        for own, own_parents in zip(scores, above, strict=True):
            places = {-1: -1}
            for node, score in enumerate(own):
                if score >= least_score:
                    parents.append(places[own_parents[node]])
                    places[node] = len(places) - 1
                    kept.append(first + node)
            counts.append(len(places) - 1)
            first += len(own)
        return Draft(
            self.token_ids[to_device(kept, self.token_ids.device)],
            counts,
            None if self.parents is None else torch.tensor(parents, dtype=torch.int32, device="cpu"),
            self.scores[kept] if self.scores is not None else None,
        )

    def _by_sequence(self, per_token: Tensor) -> list[list[Any]]:
        return [own.tolist() for own in per_token.split(self.num_draft_tokens)]

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
        nodes, first, depths = self._per_token("parents", self.parents, torch.int32).tolist(), 0, []
        # Reading the tokens would wait for a device. There the first of equal children is the one that is accepted.
        tokens = self.token_ids.tolist() if self.token_ids.device.type == "cpu" else range(len(nodes))
        for count, limit in zip(self.num_draft_tokens, limits, strict=True):
            own = nodes[first : first + count]
            if not all(-1 <= parent < node for node, parent in enumerate(own)):
                raise DrafterError(f"a drafter's parents are {own}; expected -1 or the index of an earlier token.")
            if len(set(zip(own, tokens[first : first + count], strict=True))) < count:
                raise DrafterError("a drafter proposed two children of one parent with the same token; merge them.")
            depths.append(max(depths_of(own), default=0))
            if depths[-1] > limit:
                raise DrafterError(f"a drafter proposed a tree of depth {depths[-1]}; at most {limit} was asked for.")
            first += count
        return depths

    def _check_scores(self, scores: Tensor) -> None:
        values = self._per_token("scores", scores, torch.float32).tolist()
        above = None if self.parents is None else self.parents.tolist()
        first = 0
        for count in self.num_draft_tokens:
            own = values[first : first + count]
            parents = range(-1, count - 1) if above is None else above[first : first + count]
            for score, parent in zip(own, parents, strict=True):
                most = own[parent] if parent >= 0 else 0.0
                if not score <= most:  # NaN too
                    raise DrafterError(
                        f"a drafter's scores have a node of {score} under {most}; expected log-probabilities of paths, "
                        "which never rise from a parent (the last committed token has 0) to its child."
                    )
            first += count

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


def _expect_dense(name: str, tensor: Tensor) -> None:
    """Check that the values of a tensor can be read."""
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
        raise DrafterError(f"a drafter's {name} are {kind}; expected a dense tensor on a device with memory.")
