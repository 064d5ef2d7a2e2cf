"""The command line: ``specdec-fast demo | generate | verify | doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from specdec_fast import __version__
from specdec_fast.commands import demo, doctor, generate, verify
from specdec_fast.errors import SpecDecError

_COMMANDS = {"demo": demo, "generate": generate, "verify": verify, "doctor": doctor}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; each declares its own arguments beside its code."""
    parser = argparse.ArgumentParser(
        prog="specdec-fast", description="Exact, fast, batched speculative decoding of Hugging Face language models."
    )
    parser.add_argument("--version", action="version", version=f"specdec-fast {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").split("\n")[0]
        module.add_arguments(subparsers.add_parser(name, help=summary, description=summary))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1 if the command found a difference or an invalid line; 2 if the arguments are invalid.

    """
    args = build_parser().parse_args(argv)
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return _COMMANDS[args.command].run(args)
    except (SpecDecError, OSError) as error:
        print(f"specdec-fast {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
