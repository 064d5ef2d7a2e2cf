"""Chats of several turns, plainly and with a draft model, without a memory budget and within smaller and smaller ones.

All chats wait for their turns, in an order that is new in every turn: people do not answer in the order of the
answers. Each turn's prompt is the text so far and what the user says next, so a prefix cache finds the turns before
it, as far as their pages have not been given up.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from bench.common import report
from bench.common.peak_memory import PeakMemory
from bench.common.subprocesses import in_subprocess
from bench.common.timing import median_ratio
from specdec_fast import Engine, SamplingParams
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table
from specdec_fast.models.loading import load_model
from specdec_fast.planner.budget import EngineSetting
from specdec_fast.planner.loaded import loaded_memory
from specdec_fast.request.detokenizer import load_tokenizer

Chat = list[list[int]]  # what the user says in each turn, as token ids
_ALONE, _CACHE, _LEAST = "no cache", "cache", "least"
_NO_CACHE: dict[str, Any] = {"prefix_cache": False}
_WITH_CACHE: dict[str, Any] = {"prefix_cache": True}


@dataclass
class Held:
    """What an engine made of all chats.

    Attributes:
        answers: ``[turns][chats]`` lists of token ids.
        seconds: of all calls.
        num_prompt_tokens, num_cached_tokens: of all turns' prompts, and those that were found.
        num_preemptions, num_evicted_pages: how often pages were taken from requests, and from idle chats.
    """

    answers: list[list[list[int]]] = field(default_factory=list)
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_evicted_pages: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of the answers; the time of prefills counts."""
        return sum(len(answer) for answers in self.answers for answer in answers) / self.seconds


def chats_of(args: argparse.Namespace, tokenizer: Any, max_positions: int) -> list[Chat]:
    """Return the first ``--num-chats`` chats that fit: of the questions with enough turns, or bundled prompts, cut."""
    lines = [json.loads(line) for line in (args.prompts or demo_pair() / "prompts.jsonl").read_text().splitlines()]
    chats: list[Chat] = []
    for line in lines:
        if "turns" in line:
            texts = line["turns"][: args.turns]
            turns = [tokenizer(text, add_special_tokens=not i).input_ids for i, text in enumerate(texts)]
        else:
            ids = tokenizer(line["prompt"]).input_ids
            ends = [len(ids) * turn // args.turns for turn in range(args.turns + 1)]
            turns = [ids[start:end] for start, end in pairwise(ends)]
        num_tokens = sum(map(len, turns)) + args.turns * args.max_new_tokens
        if len(turns) == args.turns and all(turns) and num_tokens <= max_positions + 1:
            chats.append(turns)
    if len(chats) < args.num_chats:
        sys.exit(f"only {len(chats)} chats of {args.turns} turns fit into {max_positions} positions.")
    return chats[: args.num_chats]


def hold(engine: Engine, chats: list[Chat], num_new: int, seed: int) -> Held:
    """Hold all chats, turn by turn, without anything that was kept before."""
    order = random.Random(seed)
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    engine.reset_prefix_cache()
    evicted = engine.describe()["prefix_cache"]["num_evicted_pages"]
    texts: list[list[int]] = [[] for _ in chats]
    held = Held()
    for turn in range(len(chats[0])):
        who = order.sample(range(len(chats)), len(chats))
        prompts = [texts[i] + chats[i][turn] for i in who]
        started = perf_counter()
        outputs = engine.generate(prompts, params, progress=False)
        held.seconds += perf_counter() - started
        answers = {i: output.raise_for_error().token_ids for i, output in zip(who, outputs, strict=True)}
        held.answers.append([answers[i] for i in range(len(chats))])
        texts = [texts[i] + chats[i][turn] + answers[i] for i in range(len(chats))]
        held.num_prompt_tokens += sum(map(len, prompts))
        held.num_cached_tokens += sum(output.num_cached_tokens for output in outputs)
        held.num_preemptions += engine.last_run.num_preemptions
    held.num_evicted_pages = engine.describe()["prefix_cache"]["num_evicted_pages"] - evicted
    return held


def models_of(dtype: torch.dtype) -> tuple[Any, Any]:
    """Load the bundled pair."""
    target, draft = (load_model(str(demo_pair() / name), dtype, torch.device("cpu")) for name in ("target", "draft"))
    return target, draft


class Peak(NamedTuple):
    """By how many bytes a process grows at most; None if the system does not report it."""

    made: int | None  # while it loads the models and makes an engine
    held: int | None  # while it holds the chats


def memory_of(dtype: torch.dtype, drafts: bool, config: dict[str, Any], chats: list[Chat], num_new: int) -> Peak:
    """Measure this process, which has done nothing before."""
    target, draft = models_of(dtype)
    few = [chat[:1] for chat in chats[:2]]
    hold(Engine(target, draft if drafts else None, memory_bytes=10**8), few, 2, seed=0)  # loads libraries
    del target, draft
    peak = PeakMemory()
    target, draft = models_of(dtype) if drafts else (models_of(dtype)[0], None)
    engine = Engine(target, draft, **config)
    made = peak.bytes()
    peak.restart()
    hold(engine, chats, num_new, seed=0)
    return Peak(made, peak.bytes())


def least_bytes(engine: Engine, drafts: bool) -> int:
    """Return the smallest budget that the engine's models are admitted with: one sequence, K 1, prefills of one row."""
    target = engine.target
    memory = loaded_memory(target, engine.drafter, engine.config.page_size)
    positions = memory.rounded(min(1024, target.max_positions or 1024))  # that a plan wants for a sequence
    return memory.total(EngineSetting(1, int(drafts), 1, positions, 1))


class Mode:
    """The arms of plain decoding, or of speculation.

    Attributes:
        configs: of each arm's engine, by its name.
        peaks: of a process that is this arm.
        engines: of each arm, over the same models.
        runs: of each arm, its repeats.
    """

    def __init__(self, drafts: bool, models: tuple[Any, Any], chats: list[Chat], args: argparse.Namespace) -> None:
        self._drafts = drafts
        self._draft = models[1] if drafts else None
        self._target = models[0]
        self._dtype = report.DTYPES[args.dtype]
        self._chats = chats
        self._num_new = args.max_new_tokens
        self.configs: dict[str, dict[str, Any]] = {_ALONE: _NO_CACHE, _CACHE: _WITH_CACHE}
        self.engines = {name: self._engine(config) for name, config in self.configs.items()}
        self.runs: dict[str, list[Held]] = {}
        self.peaks = {name: self._peak(config) for name, config in self.configs.items()}
        whole = self.peaks[_CACHE].held
        budgets = {} if whole is None else {f"1/{part}": whole // part for part in args.parts}
        budgets[_LEAST] = least_bytes(self.engines[_CACHE], drafts)
        for name, budget in budgets.items():
            self.configs[name] = _WITH_CACHE | {"memory_bytes": budget}
            self.engines[name] = self._engine(self.configs[name])
            self.peaks[name] = self._peak(self.configs[name])

    def run(self, seed: int, keeps: bool) -> list[list[list[int]]]:
        """Hold all chats in every arm; return the answers, which must be the same."""
        found = {name: hold(engine, self._chats, self._num_new, seed) for name, engine in self.engines.items()}
        expected = found[_ALONE].answers
        if wrong := [name for name, held in found.items() if held.answers != expected]:
            raise SystemExit(f"the answers of {', '.join(wrong)} differ from those of {_ALONE}: no times are reported")
        for name, held in found.items() if keeps else ():
            self.runs.setdefault(name, []).append(held)
        return expected

    def _engine(self, config: dict[str, Any]) -> Engine:
        return Engine(self._target, self._draft, **config)

    def _peak(self, config: dict[str, Any]) -> Peak:
        found: Peak = in_subprocess(memory_of, self._dtype, self._drafts, config, self._chats, self._num_new)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return what is reported of each arm: medians of its repeats, and of ratios to the arm with a cache."""
        return [self._row(name, engine) for name, engine in self.engines.items()]

    def _row(self, name: str, engine: Engine) -> dict[str, Any]:
        runs = self.runs[name]
        seconds = {arm: [held.seconds for held in self.runs[arm]] for arm in (name, _ALONE, _CACHE)}
        pools = [pool for pool in (engine.core.pool, getattr(engine.drafter, "pool", None)) if pool is not None]
        plan = engine.memory_plan
        return {
            "arm": name,
            "drafts": engine.drafter.name != "none",
            "memory_bytes": engine.config.memory_bytes,
            "planned_bytes": None if plan is None else sum(plan.terms.values()),
            "peak_bytes": self.peaks[name].held,
            "peak_bytes_of_making": self.peaks[name].made,
            "kv_bytes": sum(tensor.nbytes for pool in pools for tensor in pool.tensors),
            "kv_positions": engine.core.pool.num_tokens if engine.core.pool else 0,
            "max_batch_size": engine.config.max_batch_size,
            "most_draft_tokens": engine.config.most_draft_tokens if engine.drafter.name != "none" else 0,
            "max_prefill_tokens": engine.config.max_prefill_tokens,
            "tokens_per_second": median(held.tokens_per_second for held in runs),
            "speed_to_cache": median_ratio(seconds[_CACHE], seconds[name]),
            "speed_to_no_cache": median_ratio(seconds[_ALONE], seconds[name]),
            "cached_share": median(held.num_cached_tokens / held.num_prompt_tokens for held in runs),
            "evicted_pages": median(held.num_evicted_pages for held in runs),
            "preemptions": median(held.num_preemptions for held in runs),
        }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a line for each arm."""
    columns = (
        "",
        "peak MB",
        "KV MB",
        "batch",
        "K",
        "positions",
        "tokens/s",
        "to cache",
        "found",
        "evicted",
        "preempted",
    )
    lines = []
    for row in rows:
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}"
        counts = (row["max_batch_size"], row["most_draft_tokens"], row["kv_positions"])
        speed = (f"{row['tokens_per_second']:.0f}", f"{row['speed_to_cache']:.2f}x", f"{row['cached_share']:.0%}")
        pages = (f"{row['evicted_pages']:.0f}", f"{row['preemptions']:.0f}")
        lines.append((row["arm"], peak, f"{row['kv_bytes'] / 1e6:.1f}", *counts, *speed, *pages))
    print(format_table(columns, lines))


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.chats", description=(__doc__ or "").split("\n")[0])
    prompts = "JSON lines; of Spec-Bench's question.jsonl those with enough turns (default: the bundled ones, cut)"
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help=prompts)
    parser.add_argument("--num-chats", type=int, default=24, metavar="N")
    parser.add_argument("--turns", type=int, default=2, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of every answer")
    parser.add_argument("--parts", type=report.integers, default=[2, 4], help="budgets: 1/N of the peak with a cache")
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="float32")
    report.add_report_options(parser)
    parser.set_defaults(repeats=5)
    args = parser.parse_args(argv)
    report.prepare(args)
    models = models_of(report.DTYPES[args.dtype])
    positions = models[0].config.max_position_embeddings
    chats = chats_of(args, load_tokenizer(str(demo_pair() / "target")), positions)
    modes = {name: Mode(drafts, models, chats, args) for name, drafts in (("plain", False), ("speculation", True))}
    for repeat in range(args.repeats + 1):  # the first one warms up
        answers = [mode.run(repeat, keeps=repeat > 0) for mode in modes.values()]
        if answers[0] != answers[1]:
            raise SystemExit("the answers with speculation differ from those of plain decoding: no times are reported")
    result: dict[str, Any] = {"machine": report.machine(torch.device("cpu")), "num_chats": len(chats)}
    result |= {"turns": args.turns, "max_new_tokens": args.max_new_tokens, "dtype": args.dtype}
    for name, mode in modes.items():
        result[name] = mode.rows()
        print(f"\n{name}: {len(chats)} chats of {args.turns} turns")
        print_table(result[name])
    seconds = {name: [held.seconds for held in mode.runs[_CACHE]] for name, mode in modes.items()}
    result["speculation_to_plain"] = median_ratio(seconds["plain"], seconds["speculation"])
    print(f"\nspeculation to plain decoding, both with a cache: {result['speculation_to_plain']:.2f}x")
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
