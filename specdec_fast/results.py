"""The results that callers receive: outputs, stream chunks and their statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from specdec_fast.errors import RequestError

FinishReason = Literal["stop", "length", "error"]


@dataclass
class DecodingStats:
    """Counts of one sequence, or of a whole run when summed.

    Attributes:
        num_drafts: verifications with at least one draft token.
        num_draft_tokens: draft tokens verified; of a tree, all its nodes.
        num_accepted_tokens: draft tokens accepted.
        num_steps: steps the sequence took part in (verifications, with or without draft tokens).
        num_emitted_tokens: tokens emitted, cut at EOS, a stop string and ``max_new_tokens``.
        accepted_per_position: at index i, the number of times that a draft token at depth i + 1 was accepted; in a
            chain, that is draft token i (0-based).
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    num_emitted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per step with draft tokens, counted before the cut at EOS: accepted + 1 on average.

        It is 1 if nothing was drafted, and 0 before the first step.
        """
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts) if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens that were accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def record(self, num_draft_tokens: int, num_accepted: int, num_emitted: int, depth: int | None = None) -> None:
        """Count one step of one sequence; ``depth`` is that of a tree, and None for a chain."""
        self.num_steps += 1
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        self.num_emitted_tokens += num_emitted
        missing = (num_draft_tokens if depth is None else depth) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for i in range(num_accepted):
            self.accepted_per_position[i] += 1

    def add(self, other: DecodingStats) -> None:
        """Add the counts of ``other`` to these."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_steps += other.num_steps
        self.num_emitted_tokens += other.num_emitted_tokens
        missing = len(other.accepted_per_position) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for i, count in enumerate(other.accepted_per_position):
            self.accepted_per_position[i] += count


class _Stage:
    """Times a ``with`` block. A generator would take three times as long, and a step has several blocks."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds = seconds
        self._name = name

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + perf_counter() - self._start


class StageTimer:
    """Wall-clock seconds per stage of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at_last_lap: dict[str, float] = {}

    def __call__(self, stage: str) -> _Stage:
        return _Stage(self.seconds, stage)

    def move(self, seconds: float, source: str, destination: str) -> None:
        """Count seconds of stage ``source`` as seconds of ``destination``, because one call did the work of both."""
        self.seconds[source] -= seconds
        self.seconds[destination] = self.seconds.get(destination, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Return the seconds per stage since the last lap (or the beginning)."""
        before = self._at_last_lap
        self._at_last_lap = dict(self.seconds)
        return {stage: total - before.get(stage, 0.0) for stage, total in self.seconds.items()}

    def shares(self) -> dict[str, float]:
        """Return each stage's share of the time measured so far (they sum to 1)."""
        total = sum(self.seconds.values())
        return {stage: seconds / total for stage, seconds in self.seconds.items()} if total else {}


@dataclass
class RunStats:
    """Counts and times of one call of ``generate`` or ``stream``.

    Attributes:
        num_steps: steps of the engine (one verification each).
        num_sequence_steps: number of sequences, summed over the steps.
        num_preemptions: how often a sequence gave up its KV pages to others, because too few were free, and was
            prefilled again later.
        num_out_of_memory: forwards that ran out of memory and were repeated with fewer rows.
        num_cached_tokens: prompt tokens whose KV entries were found in the prefix cache, of all sequences that ended.
        seconds: wall-clock time of the call so far. The stages add up to less, because there is host work between them.
        timer: seconds per stage: prefill, draft, verify, accept, commit. A forward with rows of prompts is a prefill,
            also if it verifies draft tokens of other sequences.
        decoding: acceptance counts, summed over all sequences.
    """

    num_steps: int = 0
    num_sequence_steps: int = 0
    num_preemptions: int = 0
    num_out_of_memory: int = 0
    num_cached_tokens: int = 0
    seconds: float = 0.0
    timer: StageTimer = field(default_factory=StageTimer)
    decoding: DecodingStats = field(default_factory=DecodingStats)

    def add_step(self, num_sequences: int, ran_out_of_memory: bool) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_sequence_steps += num_sequences
        self.num_out_of_memory += ran_out_of_memory

    def add_ended(self, decoding: DecodingStats, num_cached_tokens: int) -> None:
        """Add the counts of a sequence that has ended."""
        self.decoding.add(decoding)
        self.num_cached_tokens += num_cached_tokens


@dataclass
class TokenScores:
    """What the target's logits say of consecutive tokens; each token is scored by the logits before it.

    Attributes:
        logprobs: per token, its log-probability.
        ranks: per token, its place among all tokens by their logits, of equal ones by their ids; 1 is the most likely
            one. Empty if they were not asked for.
        top_logprobs: per token, the most likely tokens with their log-probabilities, in the order of their ranks. Empty
            if they were not asked for.

    """

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)

    def extend(self, later: TokenScores) -> None:
        """Append the scores of the tokens that follow."""
        self.logprobs += later.logprobs
        self.ranks += later.ranks
        self.top_logprobs += later.top_logprobs

    def part(self, start: int, stop: int, num_top: int) -> TokenScores:
        """Return the scores of tokens ``start`` to ``stop - 1``, with ``num_top`` of the most likely tokens each."""
        tops = self.top_logprobs[start:stop] if num_top else []
        shorter = [dict(list(top.items())[:num_top]) for top in tops]  # any number, while islice expects a 64-bit one
        return TokenScores(self.logprobs[start:stop], self.ranks[start:stop], shorter)


@dataclass(frozen=True)
class GenerationOutput:
    """The output of one prompt, or one of its ``n`` outputs.

    Attributes:
        index: position of the prompt in the call; outputs are returned in this order.
        prompt_ids: the prompt's token ids.
        token_ids: emitted ids, including the EOS or stop id, or the token that completed a stop string.
        text: the emitted ids decoded without special tokens, up to the beginning of a stop string; where it follows a
            grammar (``structured_outputs``), without the id that ended it; None if no tokenizer is known.
        finish_reason: ``"stop"`` (EOS, a stop id or a stop string), ``"length"`` (``max_new_tokens``, or no position
            left), or ``"error"``.
        stats: acceptance counts of this sequence.
        error: the reason why ``finish_reason`` is ``"error"``; None otherwise. Tokens emitted before it are kept.
        logprobs: one per token of ``token_ids``, see ``SamplingParams.logprobs``; None if not requested.
        seed: the request's seed, which draws the same tokens again; None for greedy decoding.
        choice: number of this text among the ``n`` of its prompt, from 0.
        top_logprobs: per token of ``token_ids``, the most likely tokens by id, with their log-probabilities, the most
            likely first; None if not requested. The token itself need not be among them.
        prompt_logprobs: one per token of ``prompt_ids``; None for the first token, which nothing precedes. None if not
            requested. If the request failed, those of its last tokens may be missing, here and in the next two.
        prompt_top_logprobs: per token of ``prompt_ids``, what ``top_logprobs`` has for an emitted one; None for the
            first token. None if not requested.
        prompt_ranks: per token of ``prompt_ids``, its place by the logits, of equal ones by the ids; 1 is the most
            likely one; None for the first token. None if ``prompt_logprobs`` is.
        num_cached_tokens: prompt tokens whose KV entries were found in the prefix cache.
    """

    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    stats: DecodingStats
    error: RequestError | None = None
    logprobs: list[float] | None = None
    seed: int | None = None
    choice: int = 0
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    prompt_ranks: list[int | None] | None = None
    num_cached_tokens: int = 0

    def raise_for_error(self) -> GenerationOutput:
        """Return self, or raise the error that ended this request."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(frozen=True)
class ScoreOutput:
    """The scores of one given text, from ``Engine.score``.

    Attributes:
        index: position of the text in the call; outputs are returned in this order.
        token_ids: the text's token ids.
        logprobs: one per token after the first: the log-probability with which the target continues the tokens before.
        ranks: per token after the first, its place by the target's logits, of equal ones by the ids; 1 is the token
            that greedy decoding would have emitted.
        top_logprobs: per token after the first, the most likely tokens by id, with their log-probabilities, the most
            likely first; None if not requested.
        error: why the text was not scored; None otherwise. The scores before it are kept.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    top_logprobs: list[dict[int, float]] | None = None
    error: RequestError | None = None

    def raise_for_error(self) -> ScoreOutput:
        """Return self, or raise the error because of which the text was not scored."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(frozen=True)
class StreamChunk:
    """The tokens one step added to one sequence.

    Attributes:
        index: position of the prompt in the call.
        token_ids: ids emitted by this step; several when draft tokens were accepted.
        text: text that became certain with these ids; None if no tokenizer is known. Text that later tokens may change
            (an incomplete character, for example) or complete to a stop string is held back. The chunks of a sequence
            concatenate to its ``GenerationOutput.text``.
        finish_reason: None until the sequence's last chunk.
        error: set on the last chunk of a request that failed.
        logprobs: one per token of ``token_ids``; None if not requested.
        choice: number of the text among the ``n`` of its prompt, from 0.
        top_logprobs: per token of ``token_ids``, as in ``GenerationOutput``; None if not requested.
        prompt_logprobs, prompt_top_logprobs, prompt_ranks: those of ``GenerationOutput``, in the sequence's first
            chunk; None in all others.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    logprobs: list[float] | None = None
    choice: int = 0
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    prompt_ranks: list[int | None] | None = None
