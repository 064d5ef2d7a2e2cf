"""The drafter's contract. To add one: copy ``ngram.py``, and name it in ``DRAFTERS`` of ``drafters/__init__.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.config import EngineConfig
from specdec_fast.errors import DrafterError, NotYetSupportedError
from specdec_fast.models.ragged_model import RaggedModel
from specdec_fast.request.sequence import Sequence


@dataclass(frozen=True)
class DrafterContext:
    """What a registered drafter is made with.

    Attributes:
        target: the model that verifies; ``target.model`` is the Hugging Face model with its weights, ``target.ops``
            has the ops chosen for its device.
        config: the engine's settings.
        tokenizer: the target's; None if none is known.

    """

    target: RaggedModel
    config: EngineConfig
    tokenizer: Any | None = None

    @property
    def device(self) -> torch.device:
        """Where the target computes, and best where proposed tokens are."""
        return self.target.layout.device


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one step.

    Attributes:
        token_ids: ``[sum(num_draft_tokens)]`` int64, sequence after sequence; best on the target's device, else
            they are copied there.
        num_draft_tokens: per sequence, in batch order; 0 is allowed.
        parents: for a tree, ``[sum(num_draft_tokens)]`` int32: the index of each token's parent among the tokens of its
            own sequence, -1 for a child of the last committed token. None for a chain; trees are not served yet.

    """

    token_ids: Tensor
    num_draft_tokens: list[int]
    parents: Tensor | None = None

    def check(self, limits: list[int]) -> None:
        """Hold a drafter to its contract.

        Raises:
            DrafterError: the counts are not one per sequence, exceed a limit, or do not add up to the tokens; or
                these are no dense tensor of int64 that can be read.
            NotYetSupportedError: the draft is a tree.

        """
        if self.parents is not None:
            raise NotYetSupportedError(
                "a drafter proposed a tree (Draft.parents), and trees are not served yet; propose a chain, with "
                "parents=None."
            )
        counts = self.num_draft_tokens
        if not isinstance(self.token_ids, Tensor) or self.token_ids.dtype != torch.int64:
            kind = getattr(self.token_ids, "dtype", type(self.token_ids).__name__)
            raise DrafterError(f"a drafter's token_ids are {kind}; expected a tensor of int64.")
        if self.token_ids.is_meta or self.token_ids.is_nested or self.token_ids.layout is not torch.strided:
            kind = "nested" if self.token_ids.is_nested else f"{self.token_ids.layout} on {self.token_ids.device}"
            raise DrafterError(f"a drafter's token_ids are {kind}; expected a dense tensor on a device with memory.")
        if not isinstance(counts, (list, tuple)) or not all(isinstance(n, int) for n in counts):
            raise DrafterError(f"a drafter's num_draft_tokens are {counts!r}; expected a list of integers.")
        if len(counts) != len(limits) or any(not 0 <= n <= limit for n, limit in zip(counts, limits, strict=False)):
            raise DrafterError(f"a drafter proposed {counts} tokens per sequence; at most {limits} were asked for.")
        if self.token_ids.dim() != 1 or len(self.token_ids) != sum(counts):
            raise DrafterError(
                f"a drafter's token_ids have shape {list(self.token_ids.shape)}; expected [{sum(counts)}], the sum of "
                f"num_draft_tokens {counts}."
            )


@dataclass(frozen=True)
class StepResult:
    """What one verification left behind, of ``B`` sequences.

    Attributes:
        accepted_rows: per sequence the rows of the target's forward that hold committed tokens: of the token that was
            its last one, then of each draft token that was accepted.
        hidden_states: what the target computed at every row of that forward, ``[T, ...]``; None, because nothing asks
            for it yet.

    """

    accepted_rows: list[range]
    hidden_states: Tensor | None = None


class Drafter(ABC):
    """Proposes tokens. A poor proposal costs time, never a wrong token: the target verifies every one.

    The engine calls ``prepare`` when a run begins and ``grow`` when later requests need more room; ``admit`` before it
    asks for a sequence's first draft; then per step ``propose`` and, once the target's tokens are committed,
    ``commit``; ``release`` when a sequence leaves, for whatever reason. The engine may run steps without asking for a
    sequence's draft, and need never admit a sequence.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What reports call it."""

    @abstractmethod
    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Propose up to ``limits[i]`` tokens to follow ``sequences[i].token_ids``, which must not be changed.

        At least one limit is above 0.
        """

    def describe(self) -> dict[str, Any]:
        """Return what ``Engine.describe()`` tells of it besides its name."""
        return {}

    # The hooks below do nothing for a drafter that keeps no state of its own.

    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        """Measure drafting one token for so many sequences at once; asked when ``num_draft_tokens="auto"``.

        Returns:
            Seconds by count, and at 0 what a proposal takes besides, however long it is. A drafter that does not know
            is measured while it is at work.

        """
        return None

    def prepare(self, num_tokens: int, page_size: int) -> None:  # noqa: B027
        """Make room for ``num_tokens`` KV positions in all, in pages of ``page_size``; no sequence is admitted."""

    def grow(self, num_tokens: int) -> None:  # noqa: B027
        """Make room for ``num_tokens`` KV positions in all, and keep those of the sequences that are admitted."""

    def admit(self, sequences: list[Sequence]) -> None:  # noqa: B027
        """Admit sequences, each of at most ``max_length`` tokens; prefill all their tokens but the last."""

    def commit(self, sequences: list[Sequence], result: StepResult) -> None:  # noqa: B027
        """Observe that ``token_ids`` of these sequences, all admitted, have grown by what the target emitted.

        Args:
            sequences: ``B`` of the step's; those that ended with it are not among them.
            result: of the step, for the same ``B``.

        """

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """Forget a sequence. It may be unknown: nothing was proposed for it, or an error came before ``admit``."""
