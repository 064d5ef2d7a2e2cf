"""Plan batch size, K and KV pages for a memory budget, and say what fits and how fast it is."""

from __future__ import annotations

import argparse
import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from specdec_fast.commands.common import (
    add_backend_options,
    add_drafter_options,
    add_quantization_options,
    add_tp_size,
    backend_settings,
    draft_tokenizer,
    drafter_names,
    quantization_settings,
)
from specdec_fast.commands.plan_fits import add_fit_options, expect_no_fit_options, print_fits
from specdec_fast.commands.plan_report import PlanReport, print_plan
from specdec_fast.config import EngineConfig, expect_at_least
from specdec_fast.drafters import checked_draft, copied_quantization, has_weights, is_draft_model
from specdec_fast.drafters.draft_model.translating_drafter import MOST_TOKENS
from specdec_fast.drafters.draft_model.vocabularies import tokenizer_beside
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.memory import affordable_draft
from specdec_fast.errors import ConfigError
from specdec_fast.planner.budget import EngineMemory, budget_error, shown
from specdec_fast.planner.checkpoint import (
    checkpoint_sizes,
    copy_sizes,
    estimated_memory,
    least_memory,
    with_joint_vocabulary,
    without_pages,
)
from specdec_fast.planner.choice import (
    DEFAULT_ACCEPTANCE,
    MOST_DRAFT_TOKENS,
    Traffic,
    choose,
    least_setting,
    read_acceptance,
)
from specdec_fast.planner.costs import ComputedTimes, Device, Link, MeasuredTimes, StepTimes
from specdec_fast.planner.loaded import loaded_memory
from specdec_fast.request.detokenizer import load_tokenizer, same_vocabulary
from specdec_fast.runner.ragged_model import MAX_PREFILL_ROWS
from specdec_fast.speculation_length.step_costs import StepCosts

_FIGURES = 1e-6, 1e9  # of a device: GB/s, TFLOP/s and microseconds are within these
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--target", help="name or folder of a Hugging Face causal model")
    parser.add_argument("--draft", help=f"the same for the draft; or {drafter_names()}")
    add_drafter_options(parser)
    parser.add_argument("--dtype", default=None, help="of the weights (default: the checkpoint's)")
    parser.add_argument("--memory", type=parse_bytes, metavar="SIZE", help="the budget, such as 24GiB, 8GB or bytes")
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="of a request (default: 1024)")
    parser.add_argument("--new-tokens", type=int, default=512, metavar="N", help="of a request (default: 512)")
    parser.add_argument(
        "--batch-sizes", type=_integers, default=[1, 2, 4, 8], metavar="B,B", help="to compare (default: 1,2,4,8)"
    )
    parser.add_argument(
        "--acceptance",
        default=str(DEFAULT_ACCEPTANCE),
        metavar="P|FILE",
        help="probability that a draft token is accepted, or a JSON report that has it (default: %(default)s)",
    )
    parser.add_argument(
        "--no-measure", action="store_true", help="load nothing; compute times from --bandwidth and --peak"
    )
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the device's memory, for --no-measure")
    parser.add_argument("--peak", type=float, metavar="TFLOP/s", help="of the device, for --no-measure")
    parser.add_argument(
        "--link-bandwidth", type=float, metavar="GB/s", help="that a rank of --tp-size receives, for --no-measure"
    )
    parser.add_argument(
        "--link-latency", type=float, metavar="US", help="microseconds of an exchange of ranks, for --no-measure"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_fit_options(parser)
    add_tp_size(parser)
    add_backend_options(parser)
    add_quantization_options(parser)


def parse_bytes(text: str) -> int:
    """Parse a size: bytes, or a number with kB, MB, GB, KiB, MiB or GiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected bytes, or a number with MB, GB, MiB or GiB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size >= 2**63:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is too much; expected less than 2**63 bytes")
    return int(size)


def _integers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers, such as 1,2,4,8") from None


def run(args: argparse.Namespace) -> int:
    """Print the plan, or the fits of ``--fit``."""
    if args.fit is not None:
        return print_fits(args)
    expect_no_fit_options(args)
    plan = make_plan(args)
    if args.json:
        print(json.dumps(plan.as_dict()))
    else:
        print_plan(plan)
    return 0


def make_plan(args: argparse.Namespace) -> PlanReport:
    """Plan for the arguments of the command line.

    Raises ConfigError if one is missing or out of range, or a request is longer than the target's positions;
    MemoryBudgetError if one request of the traffic does not fit.
    """
    for name in ("target", "draft", "memory"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing.")
    for name in ("prompt_tokens", "new_tokens", "memory"):
        expect_at_least(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    traffic = Traffic(args.prompt_tokens, args.new_tokens)
    acceptance = read_acceptance(args.acceptance)
    make = _computed if args.no_measure else _measured
    memory, times, most_prefill_rows = make(args, _config(args), traffic, acceptance)
    choices = choose(memory, args.memory, args.batch_sizes, traffic, acceptance, times, most_prefill_rows)
    if not any(choices):
        raise ConfigError(f"--batch-sizes {args.batch_sizes}: none fits into {shown(args.memory)}; add 1.")
    return PlanReport(
        memory_bytes=args.memory,
        traffic=traffic,
        acceptance=acceptance,
        is_measured=not args.no_measure,
        memory=memory,
        times=times,
        batch_sizes=args.batch_sizes,
        choices=choices,
        given=_given(args),
    )


def _config(args: argparse.Namespace) -> EngineConfig:
    for size in args.batch_sizes:
        expect_at_least("--batch-sizes", size, 1)
    return EngineConfig(max_batch_size=max(args.batch_sizes), num_draft_tokens=MOST_DRAFT_TOKENS, **_given(args))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of an EngineConfig that the command line sets."""
    settings = {
        "dtype": args.dtype,
        **backend_settings(args),
        **quantization_settings(args),
        "tp_size": args.tp_size,
        "tap_layers": args.tap_layers,
        "draft_tree": args.draft_tree,
    }
    unset = {field.name: field.default for field in fields(EngineConfig)}
    return {name: value for name, value in settings.items() if value != unset[name]}


def _computed(
    args: argparse.Namespace, config: EngineConfig, traffic: Traffic, acceptance: Sequence[float]
) -> tuple[EngineMemory, StepTimes, int]:
    _expect_figures(args, {"bandwidth": "GB/s", "peak": "TFLOP/s"}, "of the device")
    if config.tp_size > 1:
        _expect_figures(args, {"link_bandwidth": "GB/s", "link_latency": "microseconds"}, "of exchanges (--tp-size)")
    dtype: Any = config.dtype
    tokenizer = draft_tokenizer(args)
    draft = checked_draft(args.draft, config, tokenizer)
    target = checkpoint_sizes(args.target, dtype, config.quantization, config.tp_size)
    of_draft = held = None
    quantization = copied_quantization(draft)
    if is_draft_model(draft):
        of_draft = held = checkpoint_sizes(draft, dtype, config.draft_quantization)
        other = tokenizer_beside(draft) if tokenizer is None else tokenizer
        if same_vocabulary(load_tokenizer(args.target), other) is False:
            held = with_joint_vocabulary(of_draft, target, MOST_TOKENS)
    elif quantization is not None:
        of_draft = copy_sizes(args.target, dtype, quantization)
        held = without_pages(of_draft)
    elif has_weights(draft):
        raise ConfigError(f"--draft {args.draft}: its sizes are known only when it is loaded; leave --no-measure out.")
    _expect_positions(target.max_positions, traffic)
    memory = estimated_memory(target, held, draft is not None, config.page_size)
    _expect_one(memory, args.memory, traffic)
    device = Device(args.bandwidth * 1e9, args.peak * 1e12)
    link = None
    if config.tp_size > 1:
        link = Link(config.tp_size, args.link_bandwidth * 1e9, args.link_latency * 1e-6)
    context = traffic.prompt_tokens + traffic.new_tokens / 2
    return memory, ComputedTimes(target, of_draft, device, context, link), MAX_PREFILL_ROWS


def _expect_figures(args: argparse.Namespace, units: dict[str, str], owner: str) -> None:
    least, most = _FIGURES
    flags = {name: f"--{name.replace('_', '-')}" for name in units}
    needed = " and ".join(f"{flags[name]} ({unit})" for name, unit in units.items())
    for name, flag in flags.items():
        if not least <= (getattr(args, name) or 0) <= most:  # NaN is not either
            raise ConfigError(
                f"--no-measure needs {needed} {owner}; {flag} is {getattr(args, name)}, expected a number from "
                f"{least:g} to {most:g}."
            )


def _measured(
    args: argparse.Namespace, config: EngineConfig, traffic: Traffic, acceptance: Sequence[float]
) -> tuple[EngineMemory, StepTimes, int]:
    """Load the models if they can fit, and time their forwards at the batch sizes that do."""
    tokenizer = draft_tokenizer(args)
    checked = checked_draft(args.draft, config, tokenizer)
    if (known := _known_memory(args.target, config)) is not None:
        _expect_one(known, args.memory, traffic)
    within = replace(config, memory_bytes=args.memory, kv_cache_tokens=traffic.positions())
    draft = affordable_draft(args.target, checked, within)
    if draft is None:  # no draft model is left that reads these
        config = replace(config, draft_quantization=None)
        tokenizer = None
    engine = Engine(args.target, draft, config, draft_tokenizer=tokenizer)
    _expect_positions(engine.target.max_positions, traffic)
    drafts = engine.drafter if engine.core.drafting.length_policy.max_draft_tokens else None
    memory = loaded_memory(engine.target, drafts, config.page_size)
    _expect_one(memory, args.memory, traffic)
    least = least_setting(memory, traffic)
    sizes = [
        size
        for size in args.batch_sizes
        if memory.total(least._replace(batch_size=size, num_positions=size * least.num_positions)) <= args.memory
    ]
    largest = max(sizes, default=1)
    costs = StepCosts.measured(engine.profiler._replace(max_batch_size=largest), len(acceptance))
    return memory, MeasuredTimes(costs, largest * (1 + len(acceptance))), engine.target.row_padding.largest


def _expect_positions(most: int | None, traffic: Traffic) -> None:
    total = traffic.prompt_tokens + traffic.new_tokens
    if most is not None and total > most:
        raise ConfigError(
            f"--prompt-tokens {traffic.prompt_tokens} and --new-tokens {traffic.new_tokens} are {total}, but the "
            f"target has {most} positions."
        )


def _known_memory(target: str, config: EngineConfig) -> EngineMemory | None:
    try:
        return least_memory(target, None, config)
    except ConfigError:  # loading says what is wrong, or the config does not give the sizes
        return None


def _expect_one(memory: EngineMemory, budget: int, traffic: Traffic) -> None:
    least = least_setting(memory, traffic)
    if memory.total(least) > budget:
        raise budget_error(memory, budget, least, traffic.new_tokens)
