"""One speculative step on a dense batch, which both algorithms use, and the statistics of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_fast.oracle.dense import DenseModel
from specdec_fast.oracle.drafting import DenseDrafter
from specdec_fast.request.stopping import cut_emission
from specdec_fast.results import DecodingStats, StageTimer


@dataclass(frozen=True)
class StopRule:
    """The rule by which every request of a run ends: after ``max_new_tokens``, or at one of ``stop_ids``."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class Row:
    """One sequence: its committed tokens, and whether it has ended."""

    token_ids: list[int]
    prompt_length: int
    limits: StopRule
    finished: bool = False

    @property
    def emitted_ids(self) -> list[int]:
        """The ids emitted so far."""
        return self.token_ids[self.prompt_length :]

    def commit(self, emission: list[int]) -> int:
        """Append one step's tokens, cut where the request ends; return their number. A finished row appends none."""
        if self.finished:
            return 0
        remaining = self.limits.max_new_tokens - len(self.emitted_ids)
        tokens, reason = cut_emission(emission, self.limits.stop_ids, remaining)
        self.token_ids += tokens
        self.finished = reason is not None
        return len(tokens)


@dataclass(frozen=True)
class StepRecord:
    """The statistics of one step."""

    num_accepted: list[int]  # draft tokens accepted, per row
    num_emitted: list[int]  # tokens emitted, per row; 0 for a row that had finished before
    moved_bytes: int  # bytes of KV moved to realign rows
    equal_length: bool  # whether all rows had the same length before the step
    seconds: dict[str, float]  # seconds per stage; those of the first step include the prefill


@dataclass
class OracleRun:
    """Outputs in input order, and the statistics of every step.

    ``timer`` has the stages prefill, draft, verify, accept, commit, realign, and for exspec assemble: stacking the KV
    of a group's sequences before a step and splitting it afterwards.
    """

    outputs: list[list[int]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    timer: StageTimer = field(default_factory=StageTimer)
    decoding: DecodingStats = field(default_factory=DecodingStats)

    @property
    def moved_bytes(self) -> int:
        """Bytes of KV moved by realignment in the whole run."""
        return sum(step.moved_bytes for step in self.steps)


def make_rows(prompts: list[list[int]], limits: StopRule) -> list[Row]:
    """Make one row per prompt."""
    return [Row(list(prompt), len(prompt), limits) for prompt in prompts]


def paddings(rows: list[Row]) -> list[int]:
    """Return the columns of padding per row: ``padding_i = L - content_i``."""
    longest = max(len(row.token_ids) for row in rows)
    return [longest - len(row.token_ids) for row in rows]


def prefill(model: DenseModel, rows: list[Row]) -> None:
    """Compute the KV entries of all prompt columns except the last ``lag``."""
    padding = paddings(rows)
    columns = [[0] * p + row.token_ids for p, row in zip(padding, rows, strict=True)]
    kept = len(columns[0]) - model.lag
    if kept > 0:
        token_ids = torch.tensor(columns, device=model.device)[:, :kept]
        model.feed(token_ids, torch.tensor(padding, device=model.device))


def speculative_step(
    rows: list[Row], target: DenseModel, drafter: DenseDrafter, num_draft_tokens: int, run: OracleRun
) -> tuple[list[int], list[int]]:
    """Draft, verify, accept and commit for every row; the caller realigns the caches.

    Returns the numbers of accepted and of emitted tokens per row; rows that had finished before emit 0.
    """
    padding = torch.tensor(paddings(rows), device=target.device)
    with run.timer("draft"):
        committed = [row.token_ids for row in rows]
        drafted, num_proposed = drafter.draft(committed, padding, num_draft_tokens)
    with run.timer("verify"):
        newest = torch.tensor([[tokens[-1]] for tokens in committed], device=target.device)
        logits = target.feed(torch.cat([newest, drafted], dim=1), padding)  # [B, K + 1, vocab_size]
    with run.timer("accept"):
        wanted = logits.argmax(dim=-1)  # [B, K + 1]
        accepted = _accept(wanted, drafted, num_proposed)
        emissions = [tokens[: a + 1] for tokens, a in zip(wanted.tolist(), accepted, strict=True)]
    with run.timer("commit"):
        was_finished = [row.finished for row in rows]
        emitted = [row.commit(emission) for row, emission in zip(rows, emissions, strict=True)]
        for idle, proposed, a, e in zip(was_finished, num_proposed, accepted, emitted, strict=True):
            if not idle:
                run.decoding.record(proposed, a, e)
    return accepted, emitted


def _accept(wanted: Tensor, drafted: Tensor, num_proposed: list[int]) -> list[int]:
    """Count, per row, the proposals before the first one that differs from the target's own token."""
    accepted = []
    for row, proposed in enumerate(num_proposed):
        count = 0
        while count < proposed and drafted[row, count] == wanted[row, count]:
            count += 1
        accepted.append(count)
    return accepted
