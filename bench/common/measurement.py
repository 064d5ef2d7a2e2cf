"""Whole decoding runs, interleaved and compared with a reference, and the figures of each run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from specdec_fast import DecodingStats

Tokens = list[list[int]]
DraftTree = str | int | tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Measurement:
    """One run of one setting over all prompts; None for figures that the setting does not have.

    Attributes:
        outputs: emitted ids, in the order of the prompts.
        seconds: seconds from the call to its last token.
        stage_seconds: wall-clock time of the host per stage; empty for transformers.
        moved_bytes: bytes of KV moved to realign rows; the engine moves none.
        num_steps: number of steps of the whole run (for transformers: tokens).
        decoding: acceptance counts.
        latencies: seconds from the call to each request's last token. All requests arrive with the call. In a fixed
            batch (transformers, oracle-eqspec), the caller gets tokens when the batch has ended.
        outside_forwards: share of the engine's time in steps outside of all model forwards; the forwards of prefill
            are left out.
        kv_bytes: bytes of the engine's page pools, the target's and the draft's.
        grouping_rate: share of the engine's sequence-steps whose batch held another sequence of equal length before
            the step.
        equal_length_steps: share of steps before which all sequences of the batch had one length; the oracle's exspec
            need not realign these.
        equal_share: share of outputs whose tokens all equal the reference's.

    """

    outputs: Tokens
    seconds: float
    stage_seconds: dict[str, float]
    moved_bytes: int
    num_steps: int
    decoding: DecodingStats | None = None
    latencies: list[float] | None = None
    outside_forwards: float | None = None
    kv_bytes: int | None = None
    grouping_rate: float | None = None
    equal_length_steps: float | None = None
    equal_share: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """The emitted tokens of all requests, divided by the whole time, prefill included."""
        return sum(map(len, self.outputs)) / self.seconds


@dataclass(frozen=True)
class MethodSetting:
    """A method with its settings, which decodes all prompts.

    Attributes:
        name: name of the method.
        batch_size: largest number of sequences decoded together.
        run: decodes all prompts.
        num_draft_tokens: K or ``"auto"``; None if the method drafts nothing, or if all settings have the same K.
        acceptance: probability that a replayed draft token is the target's own; None if the draft is not replayed.
        gated: whether an output that differs from the reference's ends the benchmark.
        draft_tree: ``EngineConfig.draft_tree``; None if it is not set.

    """

    name: str
    batch_size: int
    run: Callable[[], Measurement]
    num_draft_tokens: int | str | None = None
    acceptance: float | None = None
    gated: bool = True
    draft_tree: DraftTree | None = None

    @property
    def label(self) -> str:
        """What messages and plots call it."""
        k = "" if self.num_draft_tokens is None else f", K {self.num_draft_tokens}"
        tree = "" if self.draft_tree is None else f", tree {self.draft_tree}"
        return self.name + k + tree + ("" if self.acceptance is None else f", acceptance {self.acceptance:g}")


Runs = dict[MethodSetting, list[Measurement]]


def measure(settings: list[MethodSetting], repeats: int, reference: MethodSetting | None = None) -> Runs:
    """Run every setting once unmeasured, then ``repeats`` times in turns; exit if a gated output differs.

    Args:
        settings: settings in the order of every other turn; the turns between go backwards.
        repeats: number of measured runs of each setting.
        reference: the setting whose outputs are correct, which runs once, first; None: the first setting.

    """
    reference = reference or settings[0]
    warm_up = [reference, *(setting for setting in settings if setting is not reference)]
    runs: Runs = {setting: [] for setting in settings}
    expected: Tokens = []
    # Every other repeat backwards: no setting always runs after the same one, whose memory and heat it finds.
    turns = [*warm_up, *(setting for repeat in range(repeats) for setting in settings[:: (1, -1)[repeat % 2]])]
    for i, setting in enumerate(tqdm(turns, disable=not sys.stderr.isatty())):
        measurement = setting.run()
        expected = expected if i else measurement.outputs
        differing = sum(a != b for a, b in zip(measurement.outputs, expected, strict=True))
        if differing and setting.gated:
            sys.exit(
                f"{setting.label} at batch {setting.batch_size}: {differing} outputs differ from "
                f"{reference.label} at batch {reference.batch_size}; no speed is reported."
            )
        if i >= len(warm_up):
            runs[setting].append(replace(measurement, equal_share=1 - differing / max(1, len(expected))))
    return runs


def accepted_histogram(decoding: DecodingStats, num_draft_tokens: int) -> list[int]:
    """Return the number of sequence-steps that accepted a draft tokens, at index a (0 to K, or to the most drafted)."""
    at_least = np.zeros(max(num_draft_tokens, len(decoding.accepted_per_position)) + 2, np.int64)
    at_least[0] = decoding.num_steps
    at_least[1 : 1 + len(decoding.accepted_per_position)] = decoding.accepted_per_position
    return (-np.diff(at_least)).tolist()


def grouping_rate(steps: Collection[list[int]]) -> float:
    """Return the share of sequence-steps whose batch held another sequence of equal length.

    Args:
        steps: for each step, the lengths of its sequences before it.

    """
    together = sum(count for lengths in steps for count in Counter(lengths).values() if count > 1)
    return together / max(1, sum(map(len, steps)))


def equal_length_steps(steps: Collection[list[int]]) -> float:
    """Return the share of steps before which all sequences had one length; one sequence always has."""
    return sum(len(set(lengths)) == 1 for lengths in steps) / max(1, len(steps))
