"""What the host does in a step of an engine on a GPU, timed without one: graphs that compute nothing take its place.

The device then finds the same results in every step, so tokens mean nothing, and its own time counts nothing. What
remains is the scheduler, the layout of both models' rows, the launches and the bookkeeping of accepted tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from bench.common import report
from specdec_fast import Engine, EngineConfig, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table
from specdec_fast.program import executors
from specdec_fast.runner.graphs import capture
from specdec_fast.runner.graphs.capture import Captured, Run
from specdec_fast.runner.verification import Outcome, Verification

PARAMS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 1}}
_NEW_TOKENS = 200  # the bundled pair has 512 positions


class Clock:
    """When steps began, graphs were launched and results were read.

    Attributes:
        steps: seconds of each step that launched a graph.
        gaps: seconds from the results of a step to the first launch of the next one, in which the device would wait.

    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.gaps: list[float] = []
        self._read = 0.0

    def record(self, run: Run) -> Captured:
        """Stand in for ``CudaCapture``: compute once, then compute nothing."""
        output = tuple(part.clone() for part in run())
        return Captured(self._launched, output)

    def _launched(self) -> None:
        if self._read:
            self.gaps.append(perf_counter() - self._read)
        self._read = 0.0

    @contextmanager
    def watched(self, engine: Engine) -> Iterator[None]:
        """Note the steps of an engine."""
        outcome, step = Verification.outcome, engine.core.step

        def timed_outcome(verification: Verification) -> Outcome:
            found = outcome(verification)
            self._read = perf_counter()
            return found

        def timed_step() -> Any:
            started = perf_counter()
            outputs = step()
            self.steps.append(perf_counter() - started)
            return outputs

        with (
            mock.patch.object(Verification, "outcome", timed_outcome),
            mock.patch.object(engine.core, "step", timed_step),
        ):
            yield
        self._read = 0.0


@contextmanager
def graphs_of(clock: Clock) -> Iterator[None]:
    """Let engines on the CPU work as on a GPU: no programs, but graphs."""
    with (
        mock.patch.object(executors, "EXECUTORS", {}),
        mock.patch.dict(capture.CAPTURES, {"cpu": lambda device: clock.record}),
    ):
        yield


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per batch size and way to choose tokens."""
    folder, rows = demo_pair(), []
    for batch_size in args.batch_sizes:
        config = EngineConfig(max_batch_size=batch_size, num_draft_tokens=args.num_draft_tokens)
        for name, params in PARAMS.items():
            clock = Clock()
            with graphs_of(clock):
                engine = Engine(str(folder / "target"), str(folder / "draft"), config)
                prompts = [[5, 9, 2 + i] for i in range(batch_size)]
                wanted = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True, **params)
                for _ in range(2):  # records the graphs
                    engine.generate(prompts, wanted, progress=False)
                clock.gaps.clear()
                with clock.watched(engine):
                    for _ in range(args.repeats):
                        engine.generate(prompts, wanted, progress=False)
            row = {"batch_size": batch_size, "choice": name, "num_steps": len(clock.steps)}
            times = {"step_milliseconds": median(clock.steps) * 1e3, "gap_milliseconds": median(clock.gaps) * 1e3}
            rows.append(row | times)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print medians in milliseconds."""
    lines = [
        (row["batch_size"], row["choice"], f"{row['step_milliseconds']:.3f}", f"{row['gap_milliseconds']:.3f}")
        for row in rows
    ]
    print(format_table(("batch", "choice", "host, ms/step", "of it from results to the next launch"), lines))


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch-sizes", type=report.integers, default=[1, 8, 32])
    parser.add_argument("--num-draft-tokens", type=int, default=3, metavar="K")
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    report.prepare(args)
    rows = measured(args)
    print_table(rows)
    report.write_json({"machine": report.machine(torch.device("cpu")), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
