"""How much faster ``generate`` is with ``custom_generate``, on a padded batch of the bundled pair in fp32."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.common import report
from bench.common.timing import Clock, median_ratio
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table
from specdec_fast.integrations.transformers import custom_generate

_PLAIN = "generate"


class Calls:
    """The same ``generate`` call in several ways."""

    def __init__(self, args: argparse.Namespace) -> None:
        pair = demo_pair()
        drafters: dict[str, Any] = {"draft model": _loaded("draft"), "ngram": "ngram", "none": None}
        self._tokenizer = AutoTokenizer.from_pretrained(pair / "target", padding_side="left")
        lines = (pair / "prompts.jsonl").read_text().splitlines()
        self._prompts = [json.loads(line)["prompt"] for line in lines]
        self._options: dict[str, dict[str, Any]] = {_PLAIN: {}}
        for name, draft in drafters.items():
            self._options[f"custom_generate, {name}"] = {"custom_generate": custom_generate, "draft": draft}
        self._num_draft_tokens = args.num_draft_tokens
        self._models = {name: _loaded("target") for name in self._options}  # each keeps one engine

    @property
    def names(self) -> list[str]:
        """What the calls are named; the first is ``generate`` alone."""
        return list(self._options)

    def batches(self, batch_size: int) -> list[dict[str, Tensor]]:
        """Return the bundled prompts as padded batches."""
        starts = range(0, len(self._prompts), batch_size)
        return [
            dict(self._tokenizer(self._prompts[i : i + batch_size], return_tensors="pt", padding=True)) for i in starts
        ]

    def run(self, name: str, batches: list[dict[str, Tensor]], num_tokens: int) -> list[Tensor]:
        """Decode batches greedily, without EOS, so that every row has as many tokens."""
        options = dict(self._options[name])
        if options.get("draft") is not None:
            options["num_draft_tokens"] = self._num_draft_tokens
        asked = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
        return [self._models[name].generate(**batch, **asked, **options) for batch in batches]


def _loaded(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_pair() / name, dtype=torch.float32).eval()


def seconds_of(calls: Calls, batch_size: int, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Time all batches by each call, interleaved, after one warm-up; exit if any output differs from ``generate``."""
    clock = Clock(torch.device("cpu"))
    batches = calls.batches(batch_size)
    seconds: dict[str, list[float]] = {name: [] for name in calls.names}
    for repeat in range(repeats + 1):
        outputs: dict[str, list[Tensor]] = {}
        order = calls.names if repeat % 2 else calls.names[::-1]
        for name in order:
            found: list[list[Tensor]] = []
            took = clock.seconds(_noting(found, calls, name, batches, num_tokens))
            outputs[name] = found[-1]
            if repeat:
                seconds[name].append(took)
        for name, own in outputs.items():
            if not all(map(torch.equal, own, outputs[_PLAIN])):
                raise SystemExit(f"{name}: the tokens differ from those of generate; no times are reported")
    return seconds


def _noting(
    found: list[list[Tensor]], calls: Calls, name: str, batches: list[dict[str, Tensor]], num_tokens: int
) -> Callable[[], None]:
    return lambda: found.append(calls.run(name, batches, num_tokens))


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table per batch size, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.custom_generate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 16], metavar="B")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K")
    report.add_report_options(parser)
    parser.set_defaults(repeats=5)
    args = parser.parse_args(argv)
    report.prepare(args)
    calls = Calls(args)
    result: dict[str, Any] = {"machine": report.machine(torch.device("cpu")), "max_new_tokens": args.max_new_tokens}
    result["batches"] = {}
    for batch_size in args.batch_sizes:
        seconds = seconds_of(calls, batch_size, args.max_new_tokens, args.repeats)
        faster = {name: median_ratio(seconds[_PLAIN], times) for name, times in seconds.items()}
        result["batches"][str(batch_size)] = {
            "seconds": {name: median(times) for name, times in seconds.items()},
            "times_faster": faster,
        }
        rows = [(name, f"{median(times):.3f}", f"{faster[name]:.2f}x") for name, times in seconds.items()]
        print(format_table((f"batch {batch_size}", "seconds", "faster"), rows))
        print()
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
