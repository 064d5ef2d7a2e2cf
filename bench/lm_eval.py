"""How much faster lm-eval is with the model ``specdec_fast`` than with its ``hf``, on the bundled pair in fp32."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.common import report
from bench.common.timing import Clock, median_ratio
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table

_ENDINGS = (" the", " a little dog", " named Tim", " went to the park with his mom")
_MOST_DIFFERENCE = 1e-3  # of two sums of log-probabilities in fp32


def models(batch_size: int) -> dict[str, Any]:
    """Return lm-eval's model ``hf`` and the engine's, of the bundled target."""
    from lm_eval.models.huggingface import HFLM

    from specdec_fast.integrations.lm_eval import EngineLM

    pair = demo_pair()
    target, draft = (
        AutoModelForCausalLM.from_pretrained(pair / name, dtype=torch.float32).eval() for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    return {
        "hf": HFLM(pretrained=target, tokenizer=tokenizer, device="cpu", batch_size=batch_size),
        "specdec_fast": EngineLM(target, draft, batch_size=batch_size),
    }


def requests() -> dict[str, list[Any]]:
    """Return requests of each kind: choices behind long common contexts, whole texts, continuations of 64 tokens."""
    from lm_eval.api.instance import Instance

    lines = (demo_pair() / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    shots = "\n".join(prompts[:6]) + "\n"
    arguments: dict[str, list[tuple[Any, ...]]] = {
        "loglikelihood": [(shots + prompt[:200], ending) for prompt in prompts for ending in _ENDINGS],
        "loglikelihood_rolling": [(prompt,) for prompt in prompts],
        "generate_until": [(prompt, {"until": ["\n\n"], "max_gen_toks": 64}) for prompt in prompts],
    }
    return {kind: [Instance(kind, {}, each, i) for i, each in enumerate(own)] for kind, own in arguments.items()}


def are_same(found: Any, expected: Any) -> bool:
    """Compare results of two models: texts and greedy marks exactly, sums of log-probabilities in fp32."""
    if isinstance(expected, tuple):
        return found[1] == expected[1] and are_same(found[0], expected[0])
    if isinstance(expected, str):
        return found == expected
    return abs(found - expected) <= _MOST_DIFFERENCE * max(1.0, abs(expected))


def seconds_of(lms: dict[str, Any], kind: str, own: list[Any], repeats: int) -> dict[str, list[float]]:
    """Time requests of one kind, interleaved, after one warm-up; exit if any result differs."""
    clock = Clock(torch.device("cpu"))
    seconds: dict[str, list[float]] = {name: [] for name in lms}
    for repeat in range(repeats + 1):
        results: dict[str, list[Any]] = {}
        for name in list(lms) if repeat % 2 else list(lms)[::-1]:
            if name == "specdec_fast":
                lms[name].engine.reset_prefix_cache()  # what one evaluation shares, it computes once
            took = clock.seconds(_noting(results, name, getattr(lms[name], kind), own))
            if repeat:
                seconds[name].append(took)
        if not all(map(are_same, results["specdec_fast"], results["hf"])):
            raise SystemExit(f"{kind}: the results differ from those of hf; no times are reported")
    return seconds


def _noting(results: dict[str, list[Any]], name: str, method: Callable[..., Any], own: list[Any]) -> Callable[[], None]:
    def call() -> None:
        results[name] = method(own, disable_tqdm=True)

    return call


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.lm_eval", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch-size", type=int, default=8, metavar="B")
    report.add_report_options(parser)
    parser.set_defaults(repeats=5)
    args = parser.parse_args(argv)
    report.prepare(args)
    lms = models(args.batch_size)
    kinds: dict[str, Any] = {}
    rows = []
    for kind, own in requests().items():
        seconds = seconds_of(lms, kind, own, args.repeats)
        faster = median_ratio(seconds["hf"], seconds["specdec_fast"])
        kinds[kind] = {"requests": len(own), "seconds": {n: median(t) for n, t in seconds.items()}, "faster": faster}
        times = [f"{median(times):.3f}" for times in seconds.values()]
        rows.append((f"{kind} ({len(own)})", *times, f"{faster:.1f}x"))
    print(format_table(("requests", *lms, "faster"), rows))
    machine = report.machine(torch.device("cpu"))
    report.write_json({"machine": machine, "batch_size": args.batch_size, "kinds": kinds}, args.json)


if __name__ == "__main__":
    main()
