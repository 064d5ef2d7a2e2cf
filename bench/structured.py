"""What drafting forced tokens saves on JSON, and what masks cost.

Records that follow a schema are decoded plainly, with prompt lookup and with the draft model, with forced tokens
drafted and without. Every output must be that of plain decoding, and JSON. The cost of masks is the time of texts that
follow a grammar of any text, relative to texts without one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

from bench.common import report
from bench.common.timing import median_ratio
from specdec_fast import Engine, GenerationOutput, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table
from specdec_fast.models.loading import load_model

_ANY_TEXT = {"regex": r"[\s\S]*"}


def _schema() -> dict[str, Any]:
    limits = {"type": "integer", "minimum": 0, "maximum": 9999}
    properties = {
        "title": {"type": "string", "maxLength": 24},
        "publication_year": limits,
        "number_of_pages": limits,
        "is_available": {"type": "boolean"},
        "condition": {"enum": ["as new", "very good", "good", "acceptable"]},
        "shelf": {
            "type": "object",
            "properties": {"room": {"enum": ["north", "south"]}, "position": limits},
            "required": ["room", "position"],
        },
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def timed(engine: Engine, prompts: list[str], params: list[SamplingParams]) -> tuple[list[GenerationOutput], float]:
    """Decode prompts; return the outputs and the seconds."""
    started = perf_counter()
    outputs = engine.generate(prompts, params, progress=False)
    return outputs, perf_counter() - started


def forced_rows(target: Any, args: argparse.Namespace, prompts: list[str]) -> list[dict[str, Any]]:
    """Measure every drafter with and without forced tokens; end the program if an output is wrong."""
    asked = {"json": _schema(), "disable_any_whitespace": True}
    base = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=1.0, structured_outputs=asked)
    params = [replace(base, seed=number) for number in range(len(prompts))]
    options: dict[str, Any] = {"max_batch_size": args.batch_size, "num_draft_tokens": args.num_draft_tokens}
    plain = Engine(target, None, max_batch_size=args.batch_size)
    expected, _ = timed(plain, prompts, params)
    for output in expected:
        if output.finish_reason == "stop":
            json.loads(output.text or "")
    engines = {"none": plain, "ngram": Engine(target, "ngram", **options)}
    engines["draft model"] = Engine(target, args.draft, **options)
    cases = [(name, forced) for name in engines for forced in ((False,) if name == "none" else (False, True))]
    seconds: dict[tuple[str, bool], list[float]] = {case: [] for case in cases}
    steps: dict[tuple[str, bool], float] = {}
    for _ in range(args.repeats):
        for name, forced in cases:
            engines[name].core.drafting.drafts_forced = forced
            outputs, spent = timed(engines[name], prompts, params)
            if [output.token_ids for output in outputs] != [output.token_ids for output in expected]:
                sys.exit(f"{name}, forced={forced}: the outputs are not those of plain decoding")
            seconds[name, forced].append(spent)
            num_steps = sum(output.stats.num_steps for output in outputs)
            steps[name, forced] = num_steps / sum(len(output.token_ids) for output in outputs)
    num_tokens = sum(len(output.token_ids) for output in expected)
    return [
        {
            "drafter": name,
            "forced": forced,
            "steps_per_token": steps[name, forced],
            "tokens_per_second": num_tokens / median(seconds[name, forced]),
            "speedup": median_ratio(seconds["none", False], seconds[name, forced]),
        }
        for name, forced in cases
    ]


def mask_cost(target: Any, args: argparse.Namespace, prompts: list[str]) -> float:
    """Return the time with a mask that allows any text, relative to that without masks."""
    engine = Engine(target, None, max_batch_size=args.batch_size)
    free = SamplingParams(max_new_tokens=args.max_new_tokens, logit_bias={0: -100.0})  # both edit logits
    masked = replace(free, structured_outputs=_ANY_TEXT)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.repeats + 1):
        for is_masked, params in ((False, free), (True, masked)):
            outputs, spent = timed(engine, prompts, [params] * len(prompts))
            seconds[is_masked].append(spent / sum(len(output.token_ids) for output in outputs))
    return median_ratio(seconds[True][1:], seconds[False][1:])  # the first run compiles the grammar


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default=str(demo_pair() / "target"), help="folder of a model (default: bundled)")
    parser.add_argument("--draft", default=str(demo_pair() / "draft"), help="the same for its draft")
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument("--num-prompts", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K", help="default: %(default)s")
    report.add_report_options(parser)
    args = parser.parse_args(argv)
    report.prepare(args)
    target = load_model(args.target, report.DTYPES[args.dtype], None)
    prompts = [f"Book number {number}:" for number in range(args.num_prompts)]
    rows = forced_rows(target, args, prompts)
    cost = mask_cost(target, args, prompts)
    head = ("drafter", "forced tokens", "steps per token", "tokens/s", "to plain decoding")
    lines = [
        (
            row["drafter"],
            "drafted" if row["forced"] else "not drafted",
            f"{row['steps_per_token']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
        )
        for row in rows
    ]
    print(format_table(head, lines))
    print(f"\ntime per token with a mask that allows any text, relative to none: {cost:.3f}")
    names = ("dtype", "num_prompts", "max_new_tokens", "batch_size", "num_draft_tokens", "repeats")
    settings = {name: getattr(args, name) for name in names}
    described = {"benchmark": "structured", "machine": report.machine(target.device), "settings": settings}
    report.write_json({**described, "rows": rows, "mask_cost": cost}, args.json)


if __name__ == "__main__":
    main()
