"""What the prefix cache saves where prompts begin alike, and what it costs where none does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch

from bench.common import report
from bench.common.pairs import DEMO, PAIRS, random_pair, random_prompts
from bench.common.timing import Clock, median_ratio
from specdec_fast import Engine, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table
from specdec_fast.engine.prefixes import PrefixCache

_TIMED = ("begin", "num_shared", "share", "keep", "refresh")
_NEW_TOKENS = 64
_OWN_TOKENS = 24
_ALONE_TOKENS = 100  # of a prompt that shares nothing


class OwnTime:
    """Seconds spent in the prefix cache's own methods."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._clock = Clock(torch.device("cpu"))

    def patches(self) -> list[Any]:
        """Return what counts the calls while it is entered."""
        return [mock.patch.object(PrefixCache, name, self._timed(getattr(PrefixCache, name))) for name in _TIMED]

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            found: list[Any] = []
            self.seconds += self._clock.seconds(lambda: found.append(method(*args, **keywords)))
            return found[0]

        return timed


def engines_of(pair: str, dtype: torch.dtype, batch_size: int) -> dict[str, Engine]:
    """Return an engine without a prefix cache and one with it, of the same models."""
    models: Any
    if pair == DEMO:
        models = [str(demo_pair() / name) for name in ("target", "draft")]
    else:
        models = random_pair(PAIRS[pair], dtype, torch.device("cpu"))
    # A window no larger than the batch, so that all prompts are prefilled in one step.
    config = {"max_batch_size": batch_size, "max_wait_steps": 0, "num_draft_tokens": 3, "dtype": dtype}
    return {name: Engine(*models, prefix_cache=name == "on", **config) for name in ("off", "on")}  # type: ignore[arg-type]


def outputs_of(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Decode prompts greedily to their limits."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return [output.raise_for_error().token_ids for output in engine.generate(prompts, params, progress=False)]


def shared_prefix(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Time prompts behind a prefix that is new in every repeat: without a cache, with one, and once more."""
    engines = engines_of(args.pair, dtype, args.num_prompts)
    vocab_size = engines["on"].target.vocab_size
    seconds: dict[str, list[float]] = {"off": [], "on": [], "again": []}
    cached = 0
    for repeat in range(args.repeats + 1):  # the first one warms up
        prefix = random_prompts(1, args.shared_tokens, vocab_size, seed=1 + repeat)[0]
        own = random_prompts(args.num_prompts, _OWN_TOKENS, vocab_size, seed=1000 + repeat)
        prompts = [prefix + each for each in own]
        outputs = []
        for name, times in seconds.items():
            engine = engines["off" if name == "off" else "on"]
            outputs.append(outputs_of(engine, prompts, 4))
            run = engine.last_run
            if repeat:
                times.append(run.timer.seconds["prefill"])
            if name == "on":
                cached = run.num_cached_tokens
        if outputs[0] != outputs[1] or outputs[0] != outputs[2]:
            raise SystemExit("the outputs with a prefix cache differ: no times are reported")
    return {
        "pair": args.pair,
        "num_prompts": args.num_prompts,
        "shared_tokens": args.shared_tokens,
        "own_tokens": _OWN_TOKENS,
        "cached_tokens": cached,
        "prefill_seconds": {name: median(times) for name, times in seconds.items()},
        "times_faster": {name: median_ratio(seconds["off"], seconds[name]) for name in ("on", "again")},
    }


def no_hit(args: argparse.Namespace) -> dict[str, Any]:
    """Time prompts that share nothing, with and without a cache; the bundled pair, whose steps are short."""
    engines = engines_of(DEMO, torch.bfloat16, 8)
    vocab_size = engines["on"].target.vocab_size
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    shares = []
    clock = Clock(torch.device("cpu"))
    for repeat in range(args.no_hit_repeats + 1):
        prompts = random_prompts(args.num_prompts, _ALONE_TOKENS, vocab_size, seed=repeat)
        order = list(engines) if repeat % 2 else list(reversed(engines))
        outputs = {}
        for name in order:
            engine = engines[name]
            found: list[list[list[int]]] = []
            # The default arguments are those of this turn.
            times = clock.seconds(lambda e=engine, p=prompts, f=found: f.append(outputs_of(e, p, _NEW_TOKENS)))  # type: ignore[misc]
            outputs[name] = found[0]
            if repeat:
                seconds[name].append(times)
        if outputs["on"] != outputs["off"]:
            raise SystemExit("the outputs with a prefix cache differ: no times are reported")
        assert not engines["on"].last_run.num_cached_tokens
    own = OwnTime()
    patches = own.patches()
    for patch in patches:
        patch.start()
    for repeat in range(3):
        own.seconds = 0.0
        prompts = random_prompts(args.num_prompts, _ALONE_TOKENS, vocab_size, seed=10_000 + repeat)
        whole = clock.seconds(lambda p=prompts: outputs_of(engines["on"], p, _NEW_TOKENS))  # type: ignore[misc]
        shares.append(own.seconds / whole)
    for patch in patches:
        patch.stop()
    return {
        "pair": DEMO,
        "num_prompts": args.num_prompts,
        "prompt_tokens": _ALONE_TOKENS,
        "seconds": {name: median(times) for name, times in seconds.items()},
        "times_longer": median_ratio(seconds["on"], seconds["off"]),
        "own_share": median(shares),
    }


def print_tables(shared: dict[str, Any], alone: dict[str, Any]) -> None:
    """Print both parts."""
    times = shared["prefill_seconds"]
    names = {"off": "no cache", "on": "the prompts of one step", "again": "the same prompts again"}
    faster = {"off": 1.0, **shared["times_faster"]}
    print(f"{shared['num_prompts']} prompts behind {shared['shared_tokens']} common tokens, pair {shared['pair']}")
    rows = [(text, f"{times[name] * 1e3:.1f}", f"{faster[name]:.1f}x") for name, text in names.items()]
    print(format_table(("", "prefill, ms", "faster"), rows))
    print(f"\n{alone['num_prompts']} prompts that share nothing, pair {alone['pair']}")
    rows = [
        ("no cache", f"{alone['seconds']['off'] * 1e3:.1f}", ""),
        ("cache", f"{alone['seconds']['on'] * 1e3:.1f}", f"{alone['times_longer'] - 1:+.2%}"),
        ("of it in the cache's methods", "", f"{alone['own_share']:.2%}"),
    ]
    print(format_table(("", "whole call, ms", "cost"), rows))


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pair", choices=list(PAIRS), default="10m", help="models of the shared prefix")
    parser.add_argument("--num-prompts", type=int, default=32, metavar="N")
    parser.add_argument("--shared-tokens", type=int, default=1000, metavar="N")
    parser.add_argument("--no-hit-repeats", type=int, default=21, metavar="N")
    report.add_report_options(parser)
    parser.set_defaults(repeats=3)
    args = parser.parse_args(argv)
    report.prepare(args)
    shared = shared_prefix(args, torch.bfloat16)
    alone = no_hit(args)
    print_tables(shared, alone)
    result = {"machine": report.machine(torch.device("cpu")), "shared": shared, "no_hit": alone}
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
