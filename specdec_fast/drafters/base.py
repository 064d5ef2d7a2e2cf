"""The contract of a drafter. To add one, copy ``ngram/drafter.py`` and name it in ``registry.DRAFTERS``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import inf
from typing import Any, final

import torch
from torch import Tensor

from specdec_fast.config import EngineConfig
from specdec_fast.drafters.draft import Draft
from specdec_fast.errors import DrafterError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.ragged_model import RaggedModel


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

    # The engine calls the methods below; nothing overrides them.

    @final
    def checked_max_nodes(self) -> int:
        """Return ``max_nodes``, held to the contract; raises DrafterError if it is not an integer from 0 on."""
        most = self.max_nodes
        if not isinstance(most, int) or not 0 <= most < 2**31:
            raise DrafterError(
                f"a drafter's max_nodes is {most!r}; expected an integer from 0 on, 0 if it drafts chains."
            )
        return most

    @final
    def checked_forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        """Return ``forward_seconds``, held to the contract; raises DrafterError if they break it."""
        found = self.forward_seconds(list(row_counts))
        if found is None:
            return None
        is_valid = isinstance(found, dict) and all(
            type(count) is int and count >= 0 and isinstance(seconds, (int, float)) and 0 <= seconds < inf
            for count, seconds in found.items()
        )
        if not is_valid or not any(found):
            raise DrafterError(
                f"a drafter's forward_seconds are {found!r}; expected None, or seconds by number of sequences, such as "
                "{0: 0.001, 1: 0.002, 8: 0.003}."
            )
        return found

    @final
    def checked_proposal(
        self, sequences: list[Sequence], limits: list[int], node_limits: list[int]
    ) -> tuple[Draft, list[int]]:
        """Return ``propose_trees``, held to the contract, and the depth of each sequence's draft.

        Raises:
            DrafterError: it is no valid Draft, or a sequence was changed.
        """
        ends = [(s.length, s.token_ids[-1]) for s in sequences]  # comparing all tokens would take longer than a step
        draft = self.propose_trees(list(sequences), list(limits), list(node_limits))
        if [(s.length, *s.token_ids[-1:]) for s in sequences] != ends:
            raise DrafterError("a drafter changed the token_ids of a sequence; copy them before editing.")
        if not isinstance(draft, Draft):
            raise DrafterError(
                f"a drafter proposed a {type(draft).__name__}; expected a Draft, empty if it has no tokens."
            )
        counts = draft.num_draft_tokens
        if isinstance(counts, (list, tuple)):
            counts = list(counts)  # the drafter may change its own later
        draft = Draft(draft.token_ids, counts, draft.parents, draft.scores)
        return draft, draft.check(limits, node_limits)


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


class NoDrafter(Drafter):
    """Plain decoding: proposes nothing, so that every step emits the one token the target chooses."""

    def __init__(self, context: DrafterContext) -> None:
        self._no_tokens = torch.empty(0, dtype=torch.int64, device=context.device)

    @property
    def name(self) -> str:
        return "none"

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        return Draft(self._no_tokens, [0] * len(sequences))
