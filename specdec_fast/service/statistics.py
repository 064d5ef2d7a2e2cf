"""What a service counts: requests now, tokens and drafts so far, and the times of every request that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from specdec_fast.request.sequence import Sequence
from specdec_fast.results import DecodingStats


@dataclass(frozen=True)
class RequestRecord:
    """A request that was served and has ended."""

    # that of its output; "abort" if the caller dropped it
    finish_reason: Literal["stop", "length", "error", "abort"]
    num_prompt_tokens: int  # tokens of its prompt
    num_emitted_tokens: int  # tokens that it emitted
    queue_seconds: float | None  # from its arrival until it held KV pages; None if it never did
    # from its arrival until the end of the step that emitted its first token; None without one
    first_token_seconds: float | None
    seconds: float  # from its arrival to its end


Observer = Callable[[RequestRecord], None]


@dataclass(frozen=True)
class ServiceStats:
    """Counts of a service at one moment. Those of tokens and drafts never decrease."""

    num_running: int  # requests that hold KV pages
    num_waiting: int  # requests that do not yet
    kv_usage: float  # share of the KV pages that are in use, 0 to 1; those of the engine's other callers count as well
    num_prompt_tokens: int  # prompt tokens of the requests that took part in a step, or were scored
    num_cached_tokens: int  # those of them whose KV entries were found in the prefix cache
    num_preemptions: int  # how often a request gave up its KV pages for others
    decoding: DecodingStats  # counts of steps, drafts and tokens of all requests


@dataclass
class Totals:
    """Counts of sequences; not for several threads at once."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    decoding: DecodingStats = field(default_factory=DecodingStats)

    def add(self, sequence: Sequence) -> None:
        """Add the counts of a sequence."""
        self.num_preemptions += sequence.num_preemptions
        if sequence.stats.num_steps or (sequence.is_only_scored and sequence.finish_reason == "length"):
            self.num_prompt_tokens += sequence.prompt_length
            self.num_cached_tokens += sequence.num_cached_tokens
            self.decoding.add(sequence.stats)

    def with_(self, sequences: Iterable[Sequence]) -> Totals:
        """Return these counts together with those of some sequences."""
        totals = Totals(self.num_prompt_tokens, self.num_cached_tokens, self.num_preemptions)
        totals.decoding.add(self.decoding)
        for sequence in sequences:
            totals.add(sequence)
        return totals
