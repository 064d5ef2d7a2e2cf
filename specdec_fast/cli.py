"""``specdec-fast demo | chat | generate | score | batch | serve | train-drafter | verify | bench | plan | doctor``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from specdec_fast import __version__
from specdec_fast.errors import SpecDecError

# The first lines of the modules' docstrings: for --help the modules need not be imported, nor torch.
_COMMANDS = {
    "demo": "Decode bundled prompts with the bundled pair, and prove every token against plain decoding.",
    "chat": "Talk with a model in the terminal: its answers appear as they are decoded.",
    "generate": "Decode the prompts of a JSON-lines file into another one.",
    "score": "Score the texts of a JSON-lines file: the log-probability of every token, without decoding.",
    "batch": "Answer a batch file of OpenAI's API: chat completions and completions, one request per line.",
    "serve": "Serve OpenAI's API over HTTP: completions, chat, streams and metrics.",
    "train-drafter": "Train a drafter for a target, on texts that the target writes itself.",
    "verify": "Report whether every token equals plain decoding, on your own models.",
    "bench": "Measure which drafter and K decode your prompts fastest, and say what to run.",
    "plan": "Plan batch size, K and KV pages for a memory budget, and say what fits and how fast it is.",
    "doctor": "Show versions, devices, and which backend can run which op here; or check the taps of a drafter.",
}


_READER_LEFT = 141  # what a shell shows for a program that a closed pipe has ended


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser; modules of commands that ``argv`` does not name are not imported. None: all commands."""
    parser = argparse.ArgumentParser(
        prog="specdec-fast", description="Exact, fast, batched speculative decoding of Hugging Face language models."
    )
    parser.add_argument("--version", action="version", version=f"specdec-fast {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if argv is None or name in argv:
            _module(name).add_arguments(subparser)
    return parser


def _module(command: str) -> ModuleType:
    return import_module(f"specdec_fast.commands.{command.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    It is 0; 1 if the command found a difference or an invalid line; 2 if the arguments are invalid; 141 if what reads
    the output has left, as ``head`` does.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(argv)
    if wrong := next((word for word in argv if word.startswith("--") and word.endswith("=--")), None):
        parser.error(f"argument {wrong.removesuffix('=--')}: expected a value, not --")  # argparse makes it a list
    args = parser.parse_args(argv)
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        status: int = _module(args.command).run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written is an error of the command, not of the interpreter's end
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes at its end
        return _READER_LEFT
    except (SpecDecError, OSError) as error:
        print(f"specdec-fast {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
