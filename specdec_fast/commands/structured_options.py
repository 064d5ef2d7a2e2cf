"""Options of commands for what texts must follow, and for how models write calls of tools and reasoning."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec_fast.errors import ConfigError
from specdec_fast.structured_outputs.parameters import StructuredOutputs
from specdec_fast.structured_outputs.reasoning import REASONING_FORMATS, Reasoning


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    """Add --json-schema, --json-object, --regex, --choice and --grammar, of which one may be given, and --reasoning."""
    group = parser.add_argument_group("what every text must follow (needs the extra grammar); one of")
    group.add_argument("--json-schema", type=Path, default=None, metavar="FILE", help="a JSON schema")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", default=None, metavar="REGEX", help="a regular expression of the whole text")
    group.add_argument("--choice", action="append", default=None, metavar="TEXT", help="one of these texts; repeatable")
    group.add_argument("--grammar", type=Path, default=None, metavar="FILE", help="a grammar in EBNF, with a rule root")
    reasoning = parser.add_argument_group("reasoning before the answer, which alone follows these")
    reasoning.add_argument(
        "--reasoning", default=None, metavar="NAME", help=f"how the model marks it: {', '.join(REASONING_FORMATS)}"
    )
    reasoning.add_argument(
        "--reasoning-tokens", type=int, default=None, metavar="N", help="its tokens at most; with --reasoning"
    )


def structured_outputs(args: argparse.Namespace) -> StructuredOutputs | None:
    """Return what the options of ``add_structured_options`` ask for; None without one.

    Raises:
        GrammarError: what an option asks for is wrong, or there are several.
        ConfigError: a file is no text.
        OSError: a file cannot be read.
    """
    given: dict[str, Any] = {
        "json": None if args.json_schema is None else _read("--json-schema", args.json_schema),
        "json_object": args.json_object or None,
        "regex": args.regex,
        "choice": args.choice,
        "grammar": None if args.grammar is None else _read("--grammar", args.grammar),
    }
    given = {name: value for name, value in given.items() if value is not None}
    return StructuredOutputs.of(given) if given else None


def reasoning(args: argparse.Namespace) -> Reasoning | None:
    """Return what ``--reasoning`` and ``--reasoning-tokens`` say; None without them.

    Raises:
        ConfigError: a limit is given without a format.
        InvalidParamsError: the format is unknown, or the limit is wrong.
    """
    if args.reasoning is None:
        if args.reasoning_tokens is not None:
            raise ConfigError("--reasoning-tokens: pass --reasoning NAME, too: how the model marks its reasoning.")
        return None
    return replace(Reasoning.of(args.reasoning), max_tokens=args.reasoning_tokens)


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path}: not UTF-8 text: {error}") from None


def add_answer_format_options(parser: argparse.ArgumentParser) -> None:
    """Add --tool-call-parser and --reasoning-parser."""
    parser.add_argument(
        "--tool-call-parser",
        default=None,
        metavar="NAME",
        help="how the model writes calls of tools, by vLLM's names: hermes, qwen3_coder, glm45, deepseek_v31, kimi_k2 "
        "and others of docs/structured_outputs.md (default: as the chat template shows)",
    )
    parser.add_argument(
        "--reasoning-parser",
        default=None,
        metavar="NAME",
        help=f"how the model marks what it reasons: {', '.join(REASONING_FORMATS)}; none leaves it in the content "
        "(default: as the chat template shows)",
    )
