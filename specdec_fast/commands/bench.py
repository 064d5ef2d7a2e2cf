"""Measure which drafter and K decode your prompts fastest, and say what to run."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdec_fast.commands.common import (
    add_backend_options,
    add_drafter_options,
    add_quantization_options,
    add_target_options,
    backend_settings,
    draft_tokenizer,
    drafter_names,
    drawing,
    expect_writable,
    format_table,
    num_draft_tokens,
    quantization_settings,
)
from specdec_fast.commands.prompt_files import PromptLine, read_prompts
from specdec_fast.commands.request_options import add_chat_options, add_sampling_options, chat_options, sampling_params
from specdec_fast.commands.speed import PLAIN, Job, Speed, measure, recommended
from specdec_fast.config import EngineConfig, expect_at_least
from specdec_fast.drafters import NO_DRAFT, checked_draft, configs_for, draft_tokenizers_for, is_draft_model
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ConfigError
from specdec_fast.models.loading import load_model
from specdec_fast.ops import AUTO
from specdec_fast.schedulers import SCHEDULERS
from specdec_fast.speculation_length import LENGTH_POLICIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_target_options(parser)
    drafts = f"drafts to compare with plain decoding: names or folders of models, or {drafter_names()}; repeatable"
    parser.add_argument("--draft", required=True, action="extend", nargs="+", metavar="D", help=drafts)
    add_drafter_options(parser)
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE.jsonl", help="one JSON object per line")
    add_chat_options(parser)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8], metavar="N", help="default: 1 8")
    parser.add_argument(
        "--num-draft-tokens",
        nargs="+",
        type=num_draft_tokens,
        default=[5],
        metavar="K",
        help=f"integers, or {', '.join(LENGTH_POLICIES)} (default: 5)",
    )
    parser.add_argument("--method", choices=list(SCHEDULERS), default="exspec", help="scheduler (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after EOS, so that all texts have one length")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="measured runs of everything (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures (needs matplotlib)")
    add_sampling_options(parser, "line")
    add_backend_options(parser)
    add_quantization_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the command to run. Exit status 1 if an output differs from plain decoding."""
    for name in ("batch_sizes", "num_draft_tokens"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    expect_at_least("--repeats", args.repeats, 1)
    job = _job(args)
    pair = _Pair(args)
    draw = drawing(args.plot, "draw_speeds") if args.plot else None
    for path in filter(None, (args.json, args.plot)):
        expect_writable(path)
    settings = [PLAIN, *((draft, k) for draft in pair.drafts for k in args.num_draft_tokens if k != 0)]
    speeds: list[Speed] = []
    for batch_size in args.batch_sizes:
        rounds = measure(settings, batch_size, args.repeats, pair.engines_of(batch_size), job)
        total = len(settings) * (args.repeats + 1)
        for measured in tqdm(rounds, f"batch {batch_size}", total, disable=None, unit="run"):
            current = measured
        speeds += current
    return _report(args, pair, speeds, draw)


class _Pair:
    """The models, each loaded once, and the engines made of them.

    Raises:
        ConfigError: a drafter cannot be made, or a setting is out of range or has no effect on any drafter.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.drafts = [draft for draft in dict.fromkeys(args.draft) if draft != NO_DRAFT]
        if not self.drafts:
            raise ConfigError(f"--draft {NO_DRAFT} is plain decoding, which is always measured; name a drafter too.")
        self._config = EngineConfig(
            method=args.method,
            dtype=args.dtype,
            tap_layers=args.tap_layers,
            draft_tree=args.draft_tree,
            **backend_settings(args),
            **quantization_settings(args),
        )
        for name, values in (("max_batch_size", args.batch_sizes), ("num_draft_tokens", args.num_draft_tokens)):
            for value in values:
                replace(self._config, **{name: value})
        self._configs = dict(zip(self.drafts, configs_for(self.drafts, self._config), strict=True))
        tokenizers = draft_tokenizers_for(self.drafts, draft_tokenizer(args))
        self._draft_tokenizers = dict(zip(self.drafts, tokenizers, strict=True))
        for draft, config in self._configs.items():
            checked_draft(draft, config, self._draft_tokenizers[draft])
        self._target: Any = args.target
        self._models: dict[str, Any] = {}

    def config_of(self, draft: str) -> EngineConfig:
        """Return the settings for a drafter, without those that it does not read."""
        plain = replace(self._config, tap_layers=None, draft_tree=None, draft_quantization=None)
        return self._configs.get(draft, plain)

    def engines_of(self, batch_size: int) -> Callable[[str, int | str], Engine]:
        """Return what makes an engine of this batch size from a drafter and a K."""

        def make(draft: str, k: int | str) -> Engine:
            config = replace(self.config_of(draft), max_batch_size=batch_size, num_draft_tokens=k)
            if isinstance(self._target, str):  # the first engine loads it
                engine = Engine(self._target, None, config)
                self._target = engine.target.model
                self._tokenizer = engine.tokenizer
                return engine
            config = replace(config, quantization=None, draft_quantization=None)  # the models have it
            tokenizers = {"tokenizer": self._tokenizer, "draft_tokenizer": self._draft_tokenizers.get(draft)}
            return Engine(self._target, self._draft(draft), config, **tokenizers)

        return make

    def _draft(self, draft: str) -> Any:
        if draft == NO_DRAFT or not is_draft_model(draft):
            return draft
        if draft not in self._models:
            dtype = next(self._target.parameters()).dtype if self._config.dtype is None else self._config.dtype
            device = self._target.device
            quantization = self._configs[draft].draft_quantization
            self._models[draft] = load_model(draft, dtype, device, "draft", quantization)  # type: ignore[arg-type]
        return self._models[draft]


def _job(args: argparse.Namespace) -> Job:
    """Read the prompts. An invalid line ends the command, because its figures would be those of other prompts."""
    lines = read_prompts(args.prompts)
    for line in lines:
        if line.problem is not None:
            raise ConfigError(f"{args.prompts.name}, line {line.number}: {line.problem}")
    if len(lines) < max(args.batch_sizes):
        raise ConfigError(
            f"{args.prompts.name} has {len(lines)} prompts; --batch-sizes {max(args.batch_sizes)} needs at least as "
            "many. Add prompts, or lower it."
        )
    if args.seed is None:
        args.seed = 0  # every run must draw the same tokens
    return Job([line.prompt for line in lines], [_params(args, line) for line in lines], chat_options(args))


def _params(args: argparse.Namespace, line: PromptLine) -> Any:
    return sampling_params(args, line.number, ignore_eos=args.ignore_eos)


def _report(args: argparse.Namespace, pair: _Pair, speeds: list[Speed], draw: Any) -> int:
    """Print the table, the problems and the command; write the files. Return the exit status."""
    plain = {speed.batch_size: speed for speed in speeds if speed.setting == PLAIN}
    rows = [speed.as_dict(plain[speed.batch_size]) for speed in speeds]
    header = ("drafter", "K", "batch", "tokens/s", "x plain", "tokens/step", "accepted", "ms/token", "p95", "equal")
    print(format_table(header, [_cells(row) for row in rows if "problem" not in row]))
    print("\nMedians of interleaved runs, x plain of the ratios within a repeat; ms/token and p95 are over requests.")
    best, gains = recommended(speeds)
    command = shlex.join(_command(args, pair.config_of(best[0]), *best))
    gained = ", ".join(f"{gain:.2f} times at batch {size}" for size, gain in gains.items())
    print(f"Fastest over these batch sizes (plain decoding: {gained}):\n{command}")
    if args.json:
        values = {"target": args.target, "max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
        args.json.write_text(json.dumps({**values, "rows": rows, "command": command}, indent=1) + "\n")
    if draw:
        draw(speeds, args.plot)
    return 1 if sum(_complaint(row) for row in rows) else 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    is_plain = row["draft"] == NO_DRAFT
    times = (row["token_milliseconds"], row["token_milliseconds_p95"])
    return (
        row["draft"],
        "-" if is_plain else str(row["num_draft_tokens"]),
        str(row["batch_size"]),
        f"{row['tokens_per_second']:.4g}",
        f"{row['speedup']:.2f}",
        f"{row['mean_acceptance_length']:.2f}",
        "-" if is_plain else f"{row['acceptance_rate']:.0%}",
        *("-" if time is None else f"{time:.3g}" for time in times),
        "no" if row["different_lines"] else "yes",
    )


def _complaint(row: dict[str, Any]) -> bool:
    """Say on stderr why a setting has no figures, or which lines it decoded to other tokens; return whether it did."""
    problem = row.get("problem")
    if problem is None and row["different_lines"]:
        problem = f"other tokens than plain decoding for lines {row['different_lines']}"
    if problem is not None:
        print(f"{row['draft']}, K {row['num_draft_tokens']}, batch {row['batch_size']}: {problem}", file=sys.stderr)
    return problem is not None


def _command(args: argparse.Namespace, config: EngineConfig, draft: str, k: int | str) -> list[str]:
    """Return the words of the command that serves the target with this drafter."""
    options = {
        "target": args.target,
        "draft": draft,
        "draft-tokenizer": args.draft_tokenizer if is_draft_model(draft) else None,
        "num-draft-tokens": k or None,
        "batch-size": max(args.batch_sizes),
        "method": config.method,
        "dtype": args.dtype,
        "device": args.device,
        "backend": None if config.backend == AUTO else config.backend,
        "quantization": config.quantization,
        "draft-quantization": config.draft_quantization,
        "tap-layers": config.tap_layers and ",".join(map(str, config.tap_layers)),
        "draft-tree": config.draft_tree
        if config.draft_tree == "chain"
        else config.draft_tree and json.dumps(config.draft_tree),
    }
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return ["specdec-fast", "serve", *words, *(["--enforce-eager"] if config.enforce_eager else [])]
