"""``plan --fit``: curves through measured points, and which drafter to train for a budget of tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec_fast.commands.common import format_table
from specdec_fast.config import expect_at_least
from specdec_fast.errors import ConfigError
from specdec_fast.planner.law_table import Curve, LawTable, read_laws
from specdec_fast.planner.laws import LAYERS, TRAINING, Forecast, Law, forecast
from specdec_fast.planner.scylla import Fit, fits_of

_FIT_OPTIONS = ("training_tokens", "from_tokens", "layers")
_CURVE = ["curve", "slope", "intercept", "R^2"]
_HELD_OUT = [*_CURVE, "last point", "predicted", "measured", "error"]


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Declare --fit and the options that are read with it."""
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit the curves of a JSON file, and do nothing else")
    parser.add_argument(
        "--training-tokens", type=int, metavar="N", help="with a --fit file of bench.laws: say which drafter to train"
    )
    parser.add_argument(
        "--from-tokens", type=int, metavar="N", help="leave out its drafters with fewer training tokens"
    )
    parser.add_argument(
        "--layers", type=_numbers, metavar="L,L", help="of the drafters to choose from (default: all of the file)"
    )


def expect_no_fit_options(args: argparse.Namespace) -> None:
    """Refuse options that are read with --fit alone.

    Raises:
        ConfigError: there is one.
    """
    for name in _FIT_OPTIONS:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is read with --fit; add it, or leave the option out.")


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers, such as 1,2,4") from None


def print_fits(args: argparse.Namespace) -> int:
    """Print the fits of the file; of a table of ``bench.laws`` also the drafter to train for --training-tokens.

    Raises:
        ConfigError: the file cannot be read, or is neither curves nor such a table; or an option does not fit it.
    """
    try:
        data = json.loads(args.fit.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--fit {args.fit}: cannot be read as JSON: {error}") from None
    if isinstance(data, dict) and "points" in data:
        table = _read(args.fit, data)
        return _print_laws(args, table if args.from_tokens is None else table.since(args.from_tokens))
    for name in _FIT_OPTIONS:
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} needs a --fit file that bench.laws has written, with points; {args.fit} "
                "has curves alone."
            )
    fits = fits_of(data)
    if args.json:
        print(json.dumps({name: fit._asdict() for name, fit in fits.items()}))
    else:
        print(format_table(_CURVE, [(name, *_cells(fit)) for name, fit in fits.items()]))
    return 0


def _read(path: Path, data: dict[str, Any]) -> LawTable:
    try:
        return read_laws(data)
    except ConfigError as error:
        raise ConfigError(f"--fit {path}: {error}") from None


class _Choice(NamedTuple):
    """The drafters to choose from at one batch size, and the best of them."""

    batch_size: int
    candidates: list[Forecast]

    @property
    def best(self) -> Forecast:
        """Of the most tokens per second, or, if no forwards were timed, of the most accepted tokens."""
        return max(self.candidates, key=lambda each: (each.tokens_per_second or 0.0, each.accepted_tokens))


def _print_laws(args: argparse.Namespace, table: LawTable) -> int:
    curves = curves_of(table)
    choices = _choices(args, table)
    if args.json:
        fits = {name: law.of(curve)._asdict() for name, (law, curve) in curves.items()}
        listed = [
            {
                "batch_size": choice.batch_size,
                "best": choice.best._asdict(),
                "candidates": [each._asdict() for each in choice.candidates],
            }
            for choice in choices
        ]
        deviation = table.seed_deviation()
        print(json.dumps({"fits": fits, "seed_deviation": deviation, "choices": listed}))
        return 0
    print_curves(curves, table.seed_deviation())
    if choices:
        _print_choices(args.training_tokens, table, choices)
    return 0


def curves_of(table: LawTable) -> dict[str, tuple[Law, Curve]]:
    """Return the curves of a table that can be fitted, by what is constant along them.

    Raises:
        ConfigError: there is none.
    """
    curves = {f"{layers} layers": (TRAINING, table.by_tokens(layers)) for layers in table.layers}
    curves |= {f"{tokens} tokens": (LAYERS, table.by_layers(tokens)) for tokens in table.training_tokens}
    found = {name: (law, curve) for name, (law, curve) in curves.items() if len(curve) > 1}
    if not found:
        raise ConfigError(
            f"a table of {len(table.drafters)} points, none of which differ in their training tokens or their layers "
            "alone; a curve needs two such points. Train more with bench.laws."
        )
    return found


def print_curves(curves: dict[str, tuple[Law, Curve]], seed_deviation: float | None) -> None:
    """Print the fits of curves, and how well all points but the last predict the last."""
    rows = []
    for name, (law, curve) in curves.items():
        held_out = law.held_out(curve)
        last = ["-"] * 4
        if held_out is not None:
            (x,) = held_out.xs
            (found,) = held_out.predicted
            (measured,) = held_out.measured
            last = [str(x), f"{found:.3f}", f"{measured:.3f}", f"{found - measured:+.3f}"]
        rows.append((name, *_cells(law.of(curve)), *last))
    print(format_table(_HELD_OUT, rows))
    if seed_deviation is not None:
        print(f"\nStandard deviation of accepted tokens over seeds: {seed_deviation:.3f}.")


def _choices(args: argparse.Namespace, table: LawTable) -> list[_Choice]:
    tokens = args.training_tokens
    if tokens is None:
        if args.layers is not None:
            raise ConfigError("--layers needs --training-tokens, the budget for which a drafter is chosen.")
        return []
    expect_at_least("--training-tokens", tokens, 1)
    for size in args.batch_sizes:
        expect_at_least("--batch-sizes", size, 1)
    layers = args.layers or [each for each in table.layers if len(table.by_tokens(each)) > 1]
    if not layers:
        raise ConfigError("no drafter of the table was trained on two different numbers of tokens; train more.")
    return [_Choice(size, [forecast(table, each, tokens, size) for each in layers]) for size in args.batch_sizes]


def _print_choices(tokens: int, table: LawTable, choices: Sequence[_Choice]) -> None:
    least = table.training_tokens[0]
    most = table.training_tokens[-1]
    beyond = "" if least <= tokens <= most else f"; extrapolated from drafters of {least:,} to {most:,}"
    print(f"\nExpected of drafters trained on {tokens:,} tokens{beyond}:\n")
    rows = []
    for choice in choices:
        for each in choice.candidates:
            mark = "*" if each is choice.best and each.num_draft_tokens != 0 else ""
            cells = [choice.batch_size, each.layers, f"{each.accepted_tokens:.2f}"]
            if each.tokens_per_second is None or each.plain_tokens_per_second is None:
                rows.append([*cells, "-", "-", "-", "-", mark])
                continue
            gain = each.tokens_per_second / each.plain_tokens_per_second
            speed = f"{each.tokens_per_second:.4g}"
            rows.append([*cells, each.num_draft_tokens, f"{each.tokens_per_step:.2f}", speed, f"{gain:.2f}x", mark])
    accepted = f"accepted of {table.num_draft_tokens}"
    print(format_table(["batch", "layers", accepted, "K", "tokens/step", "tokens/s", "over plain", "best"], rows))
    print()
    for choice in choices:
        best = choice.best
        layers = f"{best.layers} layer{'s' if best.layers > 1 else ''}"
        advice = "train no drafter: none pays" if best.num_draft_tokens == 0 else f"train the drafter of {layers}"
        print(f"Batch {choice.batch_size}: {advice}.")


def _cells(fit: Fit) -> tuple[str, str, str]:
    return f"{fit.slope:.6g}", f"{fit.intercept:.6g}", f"{fit.r_squared:.4f}"
