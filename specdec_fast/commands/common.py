"""Code that several commands share: engine options, tables."""

from __future__ import annotations

import argparse
import json
import reprlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import AUTO_DRAFT, CHECKPOINT_DRAFTERS, DRAFTERS
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ConfigError
from specdec_fast.ops import AUTO, BACKENDS
from specdec_fast.quantization.rounding import QUANTIZATIONS
from specdec_fast.request.detokenizer import load_tokenizer
from specdec_fast.schedulers import SCHEDULERS
from specdec_fast.speculation_length import LENGTH_POLICIES


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that make an EngineConfig, and --max-new-tokens."""
    add_batch_options(parser)
    add_decoding_options(parser)


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add --method and --batch-size."""
    parser.add_argument("--method", choices=list(SCHEDULERS), default="exspec", help="scheduler (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences per step (default: 8)")


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``add_engine_options`` that matter for one sequence as well."""
    parser.add_argument(
        "--num-draft-tokens",
        type=num_draft_tokens,
        default=5,
        metavar="K",
        help=f"per sequence and step; or a policy that chooses it: {', '.join(LENGTH_POLICIES)} (default: 5)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="keep KV entries for later prompts that begin alike (default: in batch, chat and serve)",
    )
    add_deterministic_option(parser)
    add_tp_size(parser)
    add_device_map(parser)
    add_backend_options(parser)
    add_quantization_options(parser)


def add_tp_size(parser: argparse._ActionsContainer) -> None:
    """Add --tp-size."""
    parser.add_argument(
        "--tp-size", type=int, default=1, metavar="N", help="processes over which the target is sharded (default: 1)"
    )


def add_device_map(parser: argparse._ActionsContainer) -> None:
    """Add --device-map."""
    maps = "auto, balanced, balanced_low_0, sequential, or JSON from modules to devices"
    help = f"devices of the target's layers: {maps} (default: one)"
    parser.add_argument("--device-map", type=_device_map, default=None, metavar="MAP", help=help)


def add_deterministic_option(parser: argparse.ArgumentParser) -> None:
    """Add --no-deterministic."""
    parser.add_argument("--no-deterministic", action="store_true", help="do not make bits independent of the batch")


def num_draft_tokens(text: str) -> int | str:
    """Parse K: an integer, or the name of a policy that chooses it."""
    if text in LENGTH_POLICIES:
        return text
    try:
        return int(text)
    except ValueError:
        names = ", ".join(map(repr, LENGTH_POLICIES))
        raise argparse.ArgumentTypeError(f"{text!r} is neither an integer nor {names}") from None


def backend_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of ``EngineConfig`` that say where and how forwards run."""
    return {"device": args.device, "backend": args.backend, "enforce_eager": args.enforce_eager}


def engine_config(args: argparse.Namespace, dtype: str | None) -> EngineConfig:
    """Make the EngineConfig from the options of ``add_engine_options``."""
    return EngineConfig(
        method=args.method,
        max_batch_size=args.batch_size,
        num_draft_tokens=args.num_draft_tokens,
        prefix_cache=args.prefix_cache,
        dtype=dtype,
        tp_size=args.tp_size,
        device_map=args.device_map,
        deterministic=not args.no_deterministic,
        **backend_settings(args),
        **quantization_settings(args),
        tap_layers=getattr(args, "tap_layers", None),  # the bundled pair of `demo` has none
        draft_tree=getattr(args, "draft_tree", None),
    )


def quantization_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of ``EngineConfig`` that say how weights are kept."""
    return {"quantization": args.quantization, "draft_quantization": args.draft_quantization}


def add_quantization_options(parser: argparse._ActionsContainer, has_draft: bool = True) -> None:
    """Add --quantization, and --draft-quantization if there may be a draft model."""
    owners = {"--quantization": "target"} | ({"--draft-quantization": "draft model"} if has_draft else {})
    for name, owner in owners.items():
        help = (
            f"round the weights of the {owner} when it is loaded; -a8: its activations too; a8: those alone, where a "
            "checkpoint has codes (default: as loaded)"
        )
        parser.add_argument(name, choices=QUANTIZATIONS, default=None, help=help)


def add_backend_options(parser: argparse._ActionsContainer) -> None:
    """Add --device, --backend and --enforce-eager."""
    parser.add_argument("--device", default=None, help="cpu, cuda, ... (default: CUDA if there is a device)")
    parser.add_argument("--backend", choices=[AUTO, *BACKENDS], default=AUTO, help="implementation of the ops")
    parser.add_argument(
        "--enforce-eager", action="store_true", help="let PyTorch run every forward: no programs, no CUDA graphs"
    )


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Add --target, --draft and --dtype."""
    add_target_options(parser)
    parser.add_argument("--draft", required=True, help=f"the same for the draft; or {drafter_names()}")
    add_drafter_options(parser)


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add --target and --dtype."""
    parser.add_argument("--target", required=True, help="name or folder of a Hugging Face causal model, or a GGUF file")
    parser.add_argument("--dtype", default=None, help="of the weights (default: the checkpoint's)")


def add_drafter_options(parser: argparse.ArgumentParser, several_trees: bool = False) -> None:
    """Add --draft-tokenizer, --tap-layers and --draft-tree, which with ``several_trees`` takes several: a list."""
    parser.add_argument(
        "--draft-tokenizer",
        metavar="TOKENIZER",
        help="name or folder of a draft model's tokenizer, which may be another one than the target's (default: the "
        "one in its folder)",
    )
    add_tap_layers(parser)
    meaning = (
        "what a drafter of trees drafts: 'chain', a number of nodes, or rank paths as JSON, such as "
        "[[0],[0,0],[1]] (default: the drafter's own)"
    )
    parser.add_argument("--draft-tree", type=_tree, nargs="+" if several_trees else None, metavar="TREE", help=meaning)


def draft_tokenizer(args: argparse.Namespace) -> Any | None:
    """Load the tokenizer of --draft-tokenizer, before any model is loaded; None without it.

    Raises ConfigError if there is none.
    """
    if args.draft_tokenizer is None:
        return None
    tokenizer = load_tokenizer(args.draft_tokenizer)
    if tokenizer is None:
        raise ConfigError(
            f"--draft-tokenizer {args.draft_tokenizer}: no tokenizer can be read there; pass the name or folder of one."
        )
    return tokenizer


def add_tap_layers(parser: argparse._ActionsContainer, default: str = "its checkpoint's") -> None:
    """Add --tap-layers; ``default`` describes what None means."""
    meaning = f"target layers whose hidden states the drafter reads (default: {default})"
    parser.add_argument("--tap-layers", type=_layers, metavar="L,L,...", help=meaning)


def _device_map(text: str) -> Any:
    try:
        return json.loads(text) if text.lstrip().startswith("{") else text
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(
            f'{reprlib.repr(text)} is no JSON such as {{"model.embed_tokens": 0, "model.layers.0": "cpu"}}'
        ) from None


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as 2,16,29") from None


def _tree(text: str) -> Any:
    try:
        return text if text == "chain" else json.loads(text)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(
            f"{reprlib.repr(text)} is neither 'chain', a number, nor JSON such as [[0],[0,0],[1]]"
        ) from None


def drafter_names() -> str:
    """Name the drafters that need no draft model, for the help of --draft."""
    return ", ".join([AUTO_DRAFT, *DRAFTERS, *(f"{kind}:FOLDER" for kind in CHECKPOINT_DRAFTERS)])


def report_choice(engine: Engine) -> None:
    """Say on stderr which drafter ``--draft auto`` stands for, and why."""
    if engine.draft_choice is not None:
        print(f"--draft auto: {engine.draft_choice.name}, because {engine.draft_choice.why}", file=sys.stderr)


def expect_writable(path: Path) -> None:
    """Raise ConfigError if no result can be written, before hours of decoding; no file is left behind."""
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}.") from None
    if not existed:
        path.resolve().unlink()  # a link stays, whose file did not exist


def drawing(path: Path, name: str) -> Callable[..., None]:
    """Return the function of ``plots.py`` of this name; called before hours of decoding, so that errors come first.

    Raises ConfigError if matplotlib is missing, or cannot write a file of this kind.
    """
    try:
        from specdec_fast.commands import plots
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}); pip install '.[bench]'.") from None
    if path.suffix.removeprefix(".") not in plots.formats():
        raise ConfigError(f"--plot {path.name}: expected a name that ends in one of .{', .'.join(plots.formats())}.")
    function: Callable[..., None] = getattr(plots, name)
    return function


def format_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Lay out a table in plain text: the first column is left-aligned, the others right-aligned."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *aligned[1:]]).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])
