"""Code that several commands share: engine options, prompt files, tables."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DRAFTERS
from specdec_fast.errors import ConfigError
from specdec_fast.ops import AUTO, BACKENDS
from specdec_fast.sampling_params import SamplingParams
from specdec_fast.schedulers import SCHEDULERS
from specdec_fast.speculation_length import LENGTH_POLICIES

_REQUEST_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that make an EngineConfig."""
    parser.add_argument("--method", choices=list(SCHEDULERS), default="exspec", help="scheduler (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences per step (default: 8)")
    parser.add_argument(
        "--num-draft-tokens",
        type=num_draft_tokens,
        default=5,
        metavar="K",
        help=f"per sequence and step; or a policy that chooses it: {', '.join(LENGTH_POLICIES)} (default: 5)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    parser.add_argument("--no-deterministic", action="store_true", help="do not make bits independent of the batch")
    add_backend_options(parser)


def num_draft_tokens(text: str) -> int | str:
    """Parse K: an integer, or the name of a policy that chooses it."""
    if text in LENGTH_POLICIES:
        return text
    try:
        return int(text)
    except ValueError:
        names = ", ".join(map(repr, LENGTH_POLICIES))
        raise argparse.ArgumentTypeError(f"{text!r} is neither an integer nor {names}") from None


def engine_config(args: argparse.Namespace, dtype: str | None) -> EngineConfig:
    """Make the EngineConfig from the options of ``add_engine_options``."""
    return EngineConfig(
        method=args.method,
        max_batch_size=args.batch_size,
        num_draft_tokens=args.num_draft_tokens,
        dtype=dtype,
        device=args.device,
        backend=args.backend,
        deterministic=not args.no_deterministic,
        enforce_eager=args.enforce_eager,
    )


def add_backend_options(parser: argparse.ArgumentParser) -> None:
    """Add --device, --backend and --enforce-eager."""
    parser.add_argument("--device", default=None, help="cpu, cuda, ... (default: CUDA if there is a device)")
    parser.add_argument("--backend", choices=[AUTO, *BACKENDS], default=AUTO, help="implementation of the ops")
    parser.add_argument(
        "--enforce-eager", action="store_true", help="let PyTorch run every forward: no programs, no CUDA graphs"
    )


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Add --target, --draft and --prompts."""
    parser.add_argument("--target", required=True, help="name or folder of a Hugging Face causal model")
    parser.add_argument("--draft", required=True, help=f"the same for the draft; or {drafter_names()}")
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE.jsonl", help="one JSON object per line")


def drafter_names() -> str:
    """Name the drafters that need no draft model, for the help of --draft."""
    return ", ".join(DRAFTERS)


def expect_writable(path: Path) -> None:
    """Check before hours of decoding that a result can be written. A file made by the check is removed.

    Raises:
        ConfigError: the folder does not exist, or the file cannot be written.

    """
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}.") from None
    if not existed:
        path.unlink()


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file: a prompt, or the reason why it has none."""

    number: int
    prompt: str | list[int] | None
    problem: str | None = None


def read_prompts(path: Path) -> list[PromptLine]:
    """Read ``{"prompt": TEXT}`` or ``{"prompt_ids": [IDS]}`` per line; blank lines at the end do not count.

    A line without either must be one of Spec-Bench's question file: ``{"turns": [TEXT, ...]}``. Its first turn is the
    prompt, without a chat template. Other fields are ignored, except those of SamplingParams, which are errors: without
    them the output would be that of another request.

    Raises:
        ConfigError: the file is empty, or is not text.

    """
    try:
        lines = path.read_text(encoding="utf-8").rstrip().split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is not UTF-8 text: {error}") from None
    if lines == [""]:
        raise ConfigError(f"{path.name} has no prompts; expected one JSON object per line.")
    return [_parse_line(number, line) for number, line in enumerate(lines, start=1)]


def _parse_line(number: int, line: str) -> PromptLine:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return PromptLine(number, None, f"not JSON ({error.msg} at column {error.colno})")
    fields = set(record) if isinstance(record, dict) else set()
    if misplaced := fields & _REQUEST_FIELDS:
        return PromptLine(number, None, f"{', '.join(sorted(misplaced))} cannot be set per line; use the options")
    known = [name for name in ("prompt", "prompt_ids") if name in fields] or ["turns"]
    if len(known) != 1 or known[0] not in fields:
        return PromptLine(number, None, 'expected an object with either "prompt" or "prompt_ids", or with "turns"')
    prompt, problem = _PARSERS[known[0]](record[known[0]])
    return PromptLine(number, prompt, problem)


def _parse_prompt(value: Any) -> tuple[str | None, str | None]:
    """Return the prompt, or what is wrong with it."""
    if isinstance(value, str):
        return value, None
    return None, f'"prompt" is a {type(value).__name__}; expected a string'


def _parse_prompt_ids(value: Any) -> tuple[list[int] | None, str | None]:
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value, None
    return None, '"prompt_ids" is not a list of integers'


def _parse_turns(value: Any) -> tuple[str | None, str | None]:
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0], None
    return None, '"turns" is not a list that begins with a string'


_PARSERS: dict[str, Callable[[Any], tuple[Any, str | None]]] = {
    "prompt": _parse_prompt,
    "prompt_ids": _parse_prompt_ids,
    "turns": _parse_turns,
}


def format_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Lay out a table in plain text: the first column is left-aligned, the others right-aligned."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *aligned[1:]]).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])
