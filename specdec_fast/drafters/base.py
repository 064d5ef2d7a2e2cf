"""The contract of a drafter. To add one, copy ``ngram/drafter.py`` and name it in ``registry.DRAFTERS``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RowPadding
from specdec_fast.config import EngineConfig
from specdec_fast.device_copy import to_device
from specdec_fast.errors import DrafterError
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_watch import Numbers
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.trees.growing import TreeNodes
from specdec_fast.trees.parents import ROOT, depths_of, parents_among


@dataclass(frozen=True)
class DrafterContext:
    """The argument of a function registered in ``DRAFTERS``."""

    # the model that verifies: target.model is the Hugging Face model with its weights, target.ops has the ops chosen
    # for its device
    target: RaggedModel
    config: EngineConfig
    tokenizer: Any | None = None  # the target's; None if none is known

    @property
    def device(self) -> torch.device:
        """The target's device; proposed tokens on it need no copy."""
        return self.target.layout.device


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


@dataclass(frozen=True)
class StepResult:
    """The result of one verification, for ``B`` sequences.

    Attributes:
        accepted_rows: per sequence, the verified rows whose tokens are committed: first the token that was the last
            committed one before this step, then each accepted draft token. A range, if the drafts were chains.
        hidden_states: the target's hidden states at every verified row, rejected rows included: ``[T, taps, H]`` in the
            dtype of its residual stream, on its device. Those of other rows, of prompts, come by ``observe``. None if
            the drafter has no taps. The drafter may keep it; a slice keeps all of its memory, so copy smaller parts.
    """

    accepted_rows: list[Many[int]]
    hidden_states: Tensor | None = None


class Drafter(ABC):
    """Proposes tokens. A poor proposal costs time and changes no output, because the target verifies every token.

    The engine calls ``prepare`` when a run begins, and ``grow`` when later requests need more KV positions. It calls
    ``admit`` before it asks for a sequence's first draft, which it does after the sequence's first token. In each step
    it calls ``propose`` and, after committing the target's tokens, ``commit``. It calls ``release`` when a sequence
    leaves, for whatever reason. If other sequences need its KV pages, the engine releases it as well, and admits it
    again later, with more tokens. The engine may run steps of a sequence without a draft, and may never admit it.

    A drafter with ``taps`` receives hidden states of the target. The engine admits every sequence to it, before the
    target computes the sequence's first row. From then on the hidden states of every committed position but the newest
    (of positions 0 to ``length - 2``, I3) arrive once and in order: those of the prompt but its last token, chunk by
    chunk, by ``observe``, and those of every step by ``commit``, also if nothing was drafted in it. The last prompt
    token is a row of the first step, so ``observe`` is not called for a prompt of one token. A released sequence that
    is admitted again starts again at position 0.

    With ``EngineConfig.prefix_cache`` the engine does not compute rows whose KV entries it has kept of other sequences.
    A drafter with taps never receives their hidden states, so the engine keeps nothing for it unless it sets
    ``knows_prefixes``: then its ``known_positions`` says how many first positions of a sequence it can do without, and
    hidden states begin at position ``sequence.target_kv_length``, as it is in ``admit``.

    Attributes:
        taps: the hidden states that the drafter asks for; the engine reads it once, when it is made. Tap l is the
            residual stream after l of the target's layers (0: the embeddings), before the final norm; ``"final"`` is
            the input of its output layer. Ids must differ.
        max_nodes: the largest number of nodes of a tree, see ``TreeDrafter``; constant; 0 for a drafter of chains.
        has_scores: whether its drafts have ``Draft.scores``; read once, when the engine is made.
        knows_prefixes: whether a drafter with taps implements ``known_positions``.
        settings: which of the settings ``tap_layers``, ``draft_tree`` and ``draft_quantization`` it reads. The engine
            refuses the others, because they would have no effect.
    """

    taps: tuple[int | str, ...] = ()
    max_nodes: int = 0
    has_scores: bool = False
    knows_prefixes: bool = False
    settings: tuple[str, ...] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The drafter's name in reports."""

    @abstractmethod
    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Propose up to ``limits[i]`` tokens to follow ``sequences[i].token_ids``, which must not be changed.

        At least one limit is above 0. A sequence whose limit is 0 may not be admitted yet. The tokens may also be the
        nodes of a tree (``Draft.parents``). A drafter whose trees may have more nodes than a chain has tokens sets
        ``max_nodes`` and overrides ``propose_trees``; if it proposes nothing but trees, it is a ``TreeDrafter``.
        """

    def propose_trees(self, sequences: list[Sequence], limits: list[int], node_limits: list[int]) -> Draft:
        """Propose a tree of at most ``node_limits[i]`` nodes for each sequence; see ``TreeDrafter``.

        The engine calls this. A drafter of chains need not override it.
        """
        return self.propose(sequences, limits)

    def describe(self) -> dict[str, Any]:
        """Return further entries for ``Engine.describe()``."""
        return {}

    # A drafter without state of its own need not override the methods below.

    def weights(self) -> Iterable[Tensor]:
        """Return the tensors of its weights; those that it shares with the target are counted once."""
        return ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of its KV entries of one position; its pool has as many pages as the target's."""
        return 0

    def bytes_per_sequence(self, most_draft_tokens: int) -> int:
        """Return the bytes of its recurrent states of one sequence, in an engine whose largest K this is.

        The engine counts one slot more than sequences, for padding.
        """
        return 0

    @property
    def estimates_memory(self) -> bool:
        """Whether ``step_bytes`` is an estimate, because PyTorch runs its forwards."""
        return False

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        """Return the memory in bytes that it needs in addition to weights, KV entries and recurrent states.

        Args:
            num_sequences: number of sequences of a step.
            num_draft_tokens: largest number of draft tokens per sequence, at least 1.
            prefill_rows: largest number of rows of a prefill forward; None: as many as a forward may have.
        """
        return 0

    def limit_prefill(self, max_prefill_tokens: int | None) -> None:  # noqa: B027
        """Use this ``max_prefill_tokens`` instead of that of the configuration; called before the first step."""

    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        """Measure the time of drafting one token for each of several sequences; called if K is ``"auto"``.

        Returns:
            Seconds by number of sequences, for those of ``row_counts``; key 0 has the part of a proposal's cost that
            does not depend on its length. None if the drafter does not know; then the engine measures the cost during
            the first steps.
        """
        return None

    def expect_sequences(self, num_sequences: int) -> None:  # noqa: B027
        """Learn how many sequences may be admitted at once; called before ``prepare`` and ``grow``."""

    def use_target_pool(self, pool: PagePool | None) -> None:  # noqa: B027
        """Receive the pool of the target's KV pages, for a drafter whose rows attend over the target's own entries.

        The engine calls this before ``prepare``, and whenever it replaces the pool; None: there is none for now. In
        ``propose`` every sequence has the target's entries of its first ``target_kv_length`` positions, which must stay
        as they are, and pages for the positions of its limit. The entries at ``target_kv_length`` and behind may be
        written: the target computes those of the draft tokens itself, and reads no others.
        """

    def prepare(self, num_tokens: int, page_size: int) -> None:  # noqa: B027
        """Make room for ``num_tokens`` KV positions in total, in pages of ``page_size``; no sequence is admitted.

        The engine never needs more: for each admitted sequence, its tokens and those proposed next, in whole pages.
        """

    def grow(self, num_tokens: int) -> None:  # noqa: B027
        """Make room for ``num_tokens`` KV positions in total, and keep the entries of admitted sequences."""

    def keep_prefixes(self) -> None:  # noqa: B027
        """From now on keep what is computed of committed tokens for other sequences; called once, before ``prepare``.

        Sequences whose first tokens agree have the same ``page_keys``, which is None for those that share nothing.
        """

    def known_positions(self, sequence: Sequence) -> int:
        """Return how many first positions of a sequence need no hidden states; only a drafter that ``knows_prefixes``.

        The engine calls this right before ``admit``, and earlier to see how many pages the sequence needs. It computes
        the last position before the newest in any case, so that a proposal can start from its hidden states.
        """
        return 0

    def forget_prefixes(self) -> None:  # noqa: B027
        """Keep nothing for sequences that are admitted later; the target has changed, for example."""

    def sync_weights(self) -> None:  # noqa: B027
        """Learn that the target's weights have been updated in place; any thread may call, also during a step.

        A drafter that has computed something of them computes it again before its next draft.
        """

    def admit(self, sequences: list[Sequence]) -> None:  # noqa: B027
        """Admit sequences, each of at most ``max_length`` tokens; compute the KV of all their tokens but the last."""

    def observe(self, sequences: list[Sequence], positions: list[range], features: Tensor) -> None:  # noqa: B027
        """Receive hidden states of prompts after a forward of the target that had their rows; only a drafter with taps.

        Copy what is to be kept of ``features``, because a later forward may overwrite it.

        Args:
            sequences: the forward's admitted sequences, at most one entry each.
            positions: per sequence, the positions that were computed: they continue those of its last call.
            features: ``[T, taps, H]``, sequence after sequence: row ``sum(map(len, positions[:i])) + j`` belongs to
                position ``positions[i][j]`` of ``sequences[i]``. ``T`` is at most 2,048.
        """

    def commit(self, sequences: list[Sequence], result: StepResult) -> None:  # noqa: B027
        """Learn the result of a step; ``token_ids`` of the sequences already contain the tokens it emitted.

        Args:
            sequences: the step's ``B`` admitted sequences that have not ended.
            result: the step's result for these sequences. The last row in ``accepted_rows[i]`` belongs to position
                ``sequences[i].length - 2``, so its hidden states are those that chose the newest token.
        """

    def commit_ended(self, sequences: list[Sequence], result: StepResult) -> None:  # noqa: B027
        """Learn the last step of sequences that have ended without an error, right before ``release``.

        Only after ``keep_prefixes``, to keep their last pages. ``result`` has the rows of their committed tokens.
        """

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Forget a sequence, which may never have been admitted: no draft was needed, or an error occurred before."""


class TreeDrafter(Drafter):
    """Proposes trees of draft tokens, so that one verification tries several continuations of a sequence.

    K bounds the depth of a tree. The number of its nodes has a limit of its own, because every node is a row of the
    verification and a KV entry. The limit is ``max_nodes``, or K if that is more. If KV pages or memory run short, or
    the engine's memory budget has no room for so many nodes, the limit is K, as for a chain.
    """

    @abstractmethod
    def propose_trees(self, sequences: list[Sequence], limits: list[int], node_limits: list[int]) -> Draft:
        """Propose a tree of at most ``node_limits[i]`` nodes to follow ``sequences[i].token_ids``.

        Args:
            sequences: ``B`` sequences, whose ``token_ids`` must not be changed.
            limits: per sequence, the largest depth of its tree; at least one is above 0.
            node_limits: per sequence, the largest number of nodes; 0 where the depth must be 0.
        """

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Propose trees of as many nodes as a chain may have tokens."""
        return self.propose_trees(sequences, limits, limits)


class PooledDrafter(Drafter):
    """A drafter that keeps KV entries in a pool with as many pages as the target's; there is none before ``prepare``.

    ``row_padding`` has the row counts of its forwards; None: any.
    """

    def __init__(self, layout: KVLayout, row_padding: RowPadding | None = None) -> None:
        self._kv_layout = layout
        self._row_padding = row_padding
        self._num_sequences = 0
        self._keeps_prefixes = False
        self._numbers: Numbers | None = None  # of the weights with which the kept entries were computed
        self.pool: PagePool | None = None

    @property
    def bytes_per_token(self) -> int:
        return self._kv_layout.bytes_per_token

    def bytes_per_sequence(self, most_draft_tokens: int) -> int:
        return self._kv_layout.bytes_per_sequence

    def expect_sequences(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences

    def keep_prefixes(self) -> None:
        self._keeps_prefixes = True
        self.pool = None  # one that was made to measure times keeps none

    def forget_prefixes(self) -> None:
        if self.pool is not None:
            self.pool.forget_prefixes()

    def prepare(self, num_tokens: int, page_size: int) -> None:
        # Keep the present pool if it is large enough and no interrupted call left pages.
        pool = self.pool
        if pool is None or not pool.is_vacant or not pool.holds(num_tokens, self._num_sequences):
            pool = self.pool = None  # frees the old pool's memory before the new one is allocated
            self.pool = PagePool(self._kv_layout, num_tokens, page_size, self._row_padding, self._num_sequences)
            if self._keeps_prefixes:
                self.pool.keep_prefixes()
        if self._keeps_prefixes:
            numbers = Numbers(self.weights())
            if numbers != self._numbers:
                self.forget_prefixes()
            self._numbers = numbers

    def grow(self, num_tokens: int) -> None:
        if not self._pool().holds(num_tokens, self._num_sequences):
            self.pool = self._pool().grown(num_tokens, self._num_sequences)

    def _pool(self) -> PagePool:
        if self.pool is None:
            raise RuntimeError("prepare() has not been called.")
        return self.pool


class NoDrafter(Drafter):
    """Plain decoding: proposes nothing, so that every step emits the one token the target chooses."""

    def __init__(self, context: DrafterContext) -> None:
        self._no_tokens = torch.empty(0, dtype=torch.int64, device=context.device)

    @property
    def name(self) -> str:
        return "none"

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        return Draft(self._no_tokens, [0] * len(sequences))


def _expect_dense(name: str, tensor: Tensor) -> None:
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
        raise DrafterError(f"a drafter's {name} are {kind}; expected a dense tensor on a device with memory.")
