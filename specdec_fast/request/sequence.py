"""The state of one request while it is being decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec_fast.errors import RequestError
from specdec_fast.request.page_keys import PageKeys
from specdec_fast.request.stopping import Ending, cut_emission
from specdec_fast.request.token_masks import TokenMasks
from specdec_fast.results import DecodingStats, FinishReason, TokenScores
from specdec_fast.sampling_params import SamplingParams


@dataclass(eq=False)
class Sequence:
    """The committed tokens of one request, and how many of them have KV entries.

    Attributes:
        index: index of the prompt in the call.
        token_ids: committed ids: the prompt, then the emitted tokens.
        prompt_length: number of tokens of the prompt.
        max_length: number of committed tokens at which the request ends: ``max_new_tokens`` emitted, or no position
            left.
        params: the request's sampling parameters.
        stop_ids: ids that end the request.
        target_kv_length: positions whose KV entries in the target's pool are those of committed tokens.
        is_admitted: whether the sequence is admitted to the drafter.
        passed_over: number of steps since the sequence last took part in one (the scheduler's counter).
        stop_strings: the search for the request's stop strings, or another rule where it ends; None if it has none.
        masks: which tokens it may choose; None: all, always.
        logprobs: one log-probability per emitted token; None if the request does not ask for them.
        seed: seed of its noise; None if it is greedy.
        request_id: the number that ``EngineCore.add`` gave it; 0 before.
        resident_since: when it first got KV pages, on the clock of ``time.monotonic``; None before.
        num_preemptions: how often it gave them up for other sequences.
        choice: number of this text among the ``n`` of its prompt, from 0.
        top_logprobs: the most likely tokens at every emitted one; None if the request does not ask for them.
        prompt_scores: the scores of the prompt's tokens after the first, as far as they are known; None if the request
            does not ask for them.
        page_keys: the keys of its pages, by which others find them; None if no pages are kept.
        num_cached_tokens: tokens of the prompt whose KV entries others had computed.
    """

    index: int
    token_ids: list[int]
    prompt_length: int
    max_length: int
    params: SamplingParams
    stop_ids: frozenset[int]
    target_kv_length: int = 0
    is_admitted: bool = False
    passed_over: int = 0
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    stats: DecodingStats = field(default_factory=DecodingStats)
    stop_strings: Ending | None = None
    masks: TokenMasks | None = None
    logprobs: list[float] | None = None
    seed: int | None = None
    request_id: int = 0
    resident_since: float | None = None
    num_preemptions: int = 0
    choice: int = 0
    top_logprobs: list[dict[int, float]] | None = None
    prompt_scores: TokenScores | None = None
    page_keys: PageKeys | None = None
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        self._params_edit_logits = self.params.edits_logits  # a step asks several times
        if self.params.logprobs:
            self.logprobs = []
        if self.params.num_top_logprobs:
            self.top_logprobs = []
        if self.params.prompt_logprobs is not None:
            self.prompt_scores = TokenScores()

    @property
    def turn(self) -> tuple[int, int]:
        """What orders the requests of a core: those of a higher priority are smaller, then those added earlier."""
        return -self.params.priority, self.request_id

    @property
    def is_only_scored(self) -> bool:
        """Whether it ends with its prompt: it emits nothing."""
        return self.params.max_new_tokens == 0

    @property
    def first_unscored(self) -> int | None:
        """The first position of the prompt whose logits are still wanted; None if none are.

        The logits of a position score the token after it. Those of the last position belong to the first emitted token.
        """
        if self.prompt_scores is None:
            return None
        num_scored = len(self.prompt_scores.logprobs)
        return num_scored if num_scored < self.prompt_length - 1 else None

    @property
    def num_positions(self) -> int:
        """The number of KV positions that it may need at most; its last token needs none."""
        return max(1, self.max_length - 1)

    @property
    def length(self) -> int:
        """The number of committed tokens: prompt plus emitted."""
        return len(self.token_ids)

    @property
    def most_from_cache(self) -> int:
        """The number of its first positions that need no row: those before the last, and before unscored ones."""
        first_unscored = self.first_unscored
        return self.length - 1 if first_unscored is None else first_unscored

    @property
    def num_uncomputed(self) -> int:
        """The number of its committed tokens without KV entries: the newest (I3), or the end of its prompt."""
        return self.length - self.target_kv_length

    @property
    def samples(self) -> bool:
        """Whether its choice is other than the largest of the target's logits."""
        return self.params.temperature > 0 or self.edits_logits

    @property
    def edits_logits(self) -> bool:
        """Whether something other than temperature and filters changes its logits: a penalty, a bias, a mask."""
        return self._params_edit_logits or self.masks is not None

    @property
    def num_remaining(self) -> int:
        """The number of tokens that the sequence may still emit."""
        return self.max_length - self.length

    @property
    def emitted_ids(self) -> list[int]:
        """The ids emitted so far."""
        return self.token_ids[self.prompt_length :]

    def append_emission(
        self,
        num_draft_tokens: int,
        num_accepted: int,
        emission: list[int],
        scores: TokenScores | None = None,
        depth: int | None = None,
    ) -> list[int]:
        """Append the tokens of one step, cut where the request ends.

        The target's KV then covers every committed token except the newest (invariant I3). The entries of rejected
        draft tokens lie after it; the next step overwrites them (I4).

        Args:
            num_draft_tokens: draft tokens verified in this step.
            num_accepted: draft tokens accepted.
            emission: the step's tokens: ``num_accepted + 1``, or ``num_accepted`` if the logits after them have a NaN.
            scores: of the tokens of ``emission``, if the request asks for them; cut with the tokens.
            depth: of a tree of draft tokens; None for a chain.

        Returns:
            The tokens committed.
        """
        tokens, reason = cut_emission(emission, self.stop_ids, self.num_remaining)
        if self.stop_strings is not None:
            tokens, reason = self.stop_strings.cut(tokens, reason)
            self.error = self.stop_strings.error
        self.finish_reason = reason
        self.token_ids.extend(tokens)
        if self.logprobs is not None and scores is not None:
            self.logprobs += scores.logprobs[: len(tokens)]
        if self.top_logprobs is not None and scores is not None:
            self.top_logprobs += scores.top_logprobs[: len(tokens)]
        self.target_kv_length = self.length - 1
        self.stats.record(num_draft_tokens, num_accepted, len(tokens), depth)
        return tokens

    def fail(self, error: RequestError) -> None:
        """End the request with an error; it keeps the tokens that it has emitted."""
        self.finish_reason = "error"
        self.error = error
