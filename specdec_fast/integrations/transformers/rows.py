"""One row of a ``generate`` call while the engine decodes it: its processors, its criteria, its scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_fast.errors import StoppingCriteriaError
from specdec_fast.results import FinishReason


class Scores(NamedTuple):
    """What the row of one emitted token was chosen from, ``[vocab_size]`` float32 each."""

    logits: Tensor  # the model's own
    processed: Tensor


class BatchRow:
    """Calls transformers' processors and criteria with the ids that ``generate`` would pass, one row at a time.

    A ``BatchRow`` is a logits processor of its request, and decides where the request ends (``Sequence.stop_strings``).

    Args:
        given: the ids of the row as the caller padded it.
        prompt: those without padding, which the engine decodes.
        processors: called with ``input_ids`` ``[1, length]`` and ``scores`` ``[1, vocab_size]``.
        criteria: called with ``input_ids`` ``[1, length]`` after every emitted token.
        keeps_scores: whether the logits of emitted tokens are kept, in ``scores``.
        device: of the ids that criteria receive.
    """

    def __init__(
        self,
        given: list[int],
        prompt: list[int],
        processors: Sequence[Callable[..., Any]],
        criteria: Sequence[Callable[..., Any]],
        keeps_scores: bool,
        device: torch.device,
    ) -> None:
        self.prompt = prompt
        self.__qualname__ = ", ".join(type(each).__qualname__ for each in processors) or "output_scores"  # for errors
        self.error: StoppingCriteriaError | None = None
        self.scores: list[Scores] = []
        self._given = given
        self._processors = list(processors)
        self._criteria = list(criteria)
        self._keeps_scores = keeps_scores
        self._device = device
        self._emitted: list[int] = []
        self._verified: dict[tuple[int, ...], Scores] = {}  # since the last commit, by the emitted tokens before a row

    @property
    def processes(self) -> bool:
        """Whether it must see the logits of the request."""
        return bool(self._processors) or self._keeps_scores

    @property
    def watches(self) -> bool:
        """Whether it must see the tokens of the request."""
        return bool(self._criteria) or self._keeps_scores

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        """Return the processed logits of one verified row."""
        emitted = token_ids[len(self.prompt) :]
        own = logits.clone() if self._keeps_scores else logits
        processed = logits[None]
        if self._processors:
            input_ids = torch.tensor([self._given + emitted], device=logits.device)
            for processor in self._processors:
                processed = processor(input_ids, processed)
        if self._keeps_scores:
            self._verified[tuple(emitted)] = Scores(own, processed[0].clone())
        return processed[0]

    def cut(self, tokens: list[int], reason: FinishReason | None) -> tuple[list[int], FinishReason | None]:
        """Cut the tokens of a step after the first at which a criterion ends the row; see ``StopStrings.cut``."""
        for i, token in enumerate(tokens, start=1):
            if self._keeps_scores:
                self.scores.append(self._verified[tuple(self._emitted)])
            self._emitted.append(token)
            try:
                ends = self._ends()
            except Exception as error:  # a criterion of the caller may raise anything; other requests go on
                self.error = StoppingCriteriaError(f"a stopping criterion raised {type(error).__name__}: {error}")
                self.error.__cause__ = error
                return tokens[:i], "error"
            if ends:
                self._verified.clear()
                return tokens[:i], "stop"
        self._verified.clear()
        return tokens, reason

    def take(self, last: bool) -> str:
        """Return no text: ``generate`` returns ids."""
        return ""

    def _ends(self) -> bool:
        if not self._criteria:
            return False
        input_ids = torch.tensor([self._given + self._emitted], device=self._device)
        ends = (criterion(input_ids, None) for criterion in self._criteria)
        return any(bool(torch.as_tensor(each, device=self._device).all()) for each in ends)
