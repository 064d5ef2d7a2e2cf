"""Plain decoding with quantised weights, and ``draft="self"``, beside the weights as loaded: interleaved, one process.

Shapes are those of published models with random weights (``--pair``). Their drafts would agree less than those of a
trained model, so ``self`` replays a chosen acceptance: of every draft token, the probability that it is the target's
own. Every setting's tokens must be those of plain decoding with its own weights at batch 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.common import report
from bench.common.pairs import PAIRS, SEED, random_model, random_prompts
from bench.common.replay import ReplayDrafter
from bench.common.timing import median_ratio
from specdec_fast import Engine, SamplingParams
from specdec_fast.commands.common import format_table
from specdec_fast.quantization.rounding import ROUNDINGS

WHOLE = "as loaded"
SELF = "self"


@dataclass(frozen=True)
class Setting:
    """One engine: how weights are kept, and what drafts."""

    quantization: str | None
    draft: str | None
    batch_size: int
    num_draft_tokens: int = 0

    @property
    def name(self) -> str:
        """Its name in the table."""
        kept = self.quantization or WHOLE
        return kept if self.draft is None else f"{kept}, {self.draft}, K {self.num_draft_tokens}"


@dataclass
class Run:
    """An engine, and what was measured of it."""

    engine: Engine
    prompts: list[list[int]]
    params: SamplingParams
    rates: list[float]  # tokens per second after the prompts, one for each repeat
    prompt_seconds: list[float]

    def measure(self) -> list[list[int]]:
        """Decode once; return the tokens."""
        outputs = self.engine.generate(self.prompts, self.params, progress=False)
        tokens = [output.raise_for_error().token_ids for output in outputs]
        seconds = self.engine.last_run.timer.seconds
        decoding = sum(spent for stage, spent in seconds.items() if stage != "prefill")
        # the prefill emits the first token of each text
        self.rates.append((sum(map(len, tokens)) - len(tokens)) / decoding)
        self.prompt_seconds.append(seconds["prefill"])
        return tokens


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantized", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pair", choices=list(PAIRS), default="qwen3-0.6b", help="its target (default: qwen3-0.6b)")
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--quantizations", type=report.names, default=list(ROUNDINGS), help="default: all")
    parser.add_argument("--batch-sizes", type=report.integers, default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=33)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--self-draft-tokens", type=report.integers, default=[4], metavar="K", help="of draft='self'")
    parser.add_argument("--acceptance", type=float, default=0.94, help="of draft='self' (default: 0.94)")
    report.add_report_options(parser)
    parser.set_defaults(repeats=5)
    args = parser.parse_args(argv)
    if unknown := set(args.quantizations) - set(ROUNDINGS):
        parser.error(f"--quantizations: {', '.join(sorted(unknown))}; expected some of {', '.join(ROUNDINGS)}")
    return args


def settings_of(args: argparse.Namespace) -> Iterator[Setting]:
    """Yield every setting; those of plain decoding first."""
    for batch_size in args.batch_sizes:
        for quantization in (None, *args.quantizations):
            yield Setting(quantization, None, batch_size)
        for count in args.self_draft_tokens:
            yield Setting(None, SELF, batch_size, count)


def runs_of(args: argparse.Namespace) -> dict[Setting, Run]:
    """Make the engines, and decode once with each; exits if one emits other tokens than plain decoding."""
    pair = PAIRS[args.pair]
    model = random_model(pair.target, pair.vocab_size, report.DTYPES[args.dtype], torch.device("cpu"), SEED)
    prompts = random_prompts(max(args.batch_sizes), args.prompt_tokens, pair.vocab_size)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    expected: dict[str | None, list[list[int]]] = {}
    runs = {}
    for setting in settings_of(args):
        own = prompts[: setting.batch_size]
        options: dict[str, Any] = {"quantization": setting.quantization, "num_draft_tokens": setting.num_draft_tokens}
        engine = Engine(model, setting.draft, max_batch_size=setting.batch_size, method="eqspec", **options)
        if setting.quantization not in expected:
            outputs = Engine(model, None, max_batch_size=1, quantization=setting.quantization).generate(prompts, params)
            expected[setting.quantization] = [output.token_ids for output in outputs]
        wanted = expected[setting.quantization][: setting.batch_size]
        if setting.draft is not None:
            layout = engine.target.layout
            drafter = engine.core.drafter
            engine.core.drafter = ReplayDrafter(drafter, wanted, args.acceptance, pair.vocab_size, layout.device)
        runs[setting] = Run(engine, own, params, [], [])
        if runs[setting].measure() != wanted:
            sys.exit(f"{setting.name}, batch {setting.batch_size}: other tokens than plain decoding with these weights")
        runs[setting].rates.clear()
        runs[setting].prompt_seconds.clear()
    return runs


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    args = parse_args(argv)
    report.prepare(args)
    runs = runs_of(args)
    for _ in range(args.repeats):
        for run in runs.values():
            run.measure()
    rows = [row_of(setting, run, runs[Setting(None, None, setting.batch_size)]) for setting, run in runs.items()]
    header = ("batch", "weights", "tokens/s", "x as loaded", "prompts, ms", "x as loaded", "linears, MB")
    print(format_table(header, [tuple(row.values()) for row in map(report.rounded, rows)]))
    machine = report.machine(torch.device("cpu"))
    options = {name: getattr(args, name) for name in ("pair", "dtype", "prompt_tokens", "max_new_tokens", "acceptance")}
    report.write_json({"machine": machine, **options, "repeats": args.repeats, "rows": rows}, args.json)


def row_of(setting: Setting, run: Run, whole: Run) -> dict[str, Any]:
    """Summarise one setting; ratios above 1 say that it is faster than the weights as they are."""
    held = sum(run.engine.describe()["linear_bytes"].values())
    return {
        "batch_size": setting.batch_size,
        "name": setting.name,
        "tokens_per_second": median(run.rates),
        "speedup": median_ratio(run.rates, whole.rates),
        "prompt_ms": 1e3 * median(run.prompt_seconds),
        "prompt_speedup": median_ratio(whole.prompt_seconds, run.prompt_seconds),
        "linear_megabytes": held / 1e6,
    }


if __name__ == "__main__":
    main()
