"""Talk with a model in the terminal: its answers appear as they are decoded."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from io import TextIOWrapper
from threading import Event
from types import FrameType
from typing import Any

from specdec_fast.commands.common import (
    add_decoding_options,
    add_pair_options,
    draft_tokenizer,
    engine_config,
    report_choice,
)
from specdec_fast.commands.request_options import (
    add_chat_options,
    add_sampling_options,
    chat_options,
    sampling_params,
)
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ChatTemplateError, ConfigError, RequestError
from specdec_fast.sampling_params import CHAT_ANSWER_TOKENS

_RESET = "/reset"
_PROMPT = ">>> "
_ENDINGS = {"interrupt": "[stopped]", "length": "[no more tokens; see --max-new-tokens]"}
_WELCOME = f"{_RESET} begins a new chat, Ctrl-C stops an answer, Ctrl-D leaves."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_pair_options(parser)
    parser.add_argument("--system", default=None, metavar="TEXT", help="first message of every chat, of role system")
    add_chat_options(parser)
    add_sampling_options(parser, "message")
    add_decoding_options(parser)
    # One sequence at a time, so a scheduler has nothing to choose.
    parser.set_defaults(method="exspec", batch_size=1, max_new_tokens=CHAT_ANSWER_TOKENS)


def run(args: argparse.Namespace) -> int:
    """Answer the messages of a terminal, or the lines of stdin. Exit status 1 if one could not be answered."""
    if sys.stdin is None or sys.stdout is None:
        raise ConfigError("chat reads messages from stdin and prints answers to stdout; one of them is closed.")
    options = chat_options(args)
    sampling_params(args)  # wrong values are refused before the models are loaded
    config = engine_config(args, args.dtype).for_service()
    engine = Engine(args.target, args.draft, config, draft_tokenizer=draft_tokenizer(args))
    report_choice(engine)
    chat = Chat(engine, args, options)
    chat.expect_template()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character ends no chat
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    for message in _typed() if is_interactive else _lines():
        if message == _RESET:
            chat.reset()
        elif message:
            chat.answer(message, is_interactive)
    return 1 if chat.num_failed else 0


class Chat:
    """The messages of one chat, and the engine that answers them; ``options`` are those of the chat template."""

    def __init__(self, engine: Engine, args: argparse.Namespace, options: dict[str, Any]) -> None:
        self._engine = engine
        self._args = args
        self._options = options
        self._num_messages = 0
        self.num_failed = 0  # messages that could not be answered
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self._messages = [] if self._args.system is None else [{"role": "system", "content": self._args.system}]

    def expect_template(self) -> None:
        """Write a chat out, so that a missing or failing template is noticed before anything is typed.

        Raises RequestError if the tokenizer or its template cannot; ConfigError where ``--chat-template`` may help.
        """
        try:
            self._engine.encode([*self._messages, {"role": "user", "content": "Hello"}], **self._options)
        except ChatTemplateError as error:
            if "chat_template" in self._options:
                raise
            raise ConfigError(f"{error} On the command line: --chat-template FILE.") from error

    def answer(self, message: str, is_interactive: bool) -> None:
        """Print the answer to a message. A message that cannot be answered is no part of the chat."""
        messages = [*self._messages, {"role": "user", "content": message}]
        self._num_messages += 1
        params = sampling_params(self._args, self._num_messages)
        text = ""
        reason = "interrupt"
        with _stop_event() as stop, closing(self._engine.stream(messages, params, **self._options)) as chunks:
            for chunk in chunks:
                print(chunk.text or "", end="", flush=True)
                text = text + (chunk.text or "")
                reason = chunk.finish_reason or "interrupt"
                if chunk.error is not None:
                    self._report(chunk.error)
                    return
                if stop.is_set():
                    break
        print(flush=True)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        if is_interactive and reason in _ENDINGS:
            print(_ENDINGS[reason], file=sys.stderr)

    def _report(self, error: RequestError) -> None:
        self.num_failed += 1
        print(f"specdec-fast chat: {error} ({_RESET} begins a new chat.)", file=sys.stderr)


@contextmanager
def _stop_event() -> Iterator[Event]:
    """Let the first Ctrl-C set an event, so that a step ends whole; the second one ends the block at once."""
    stop = Event()

    def interrupted(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        with suppress(KeyboardInterrupt):
            yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _typed() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and recalls the earlier ones)
    print(_WELCOME)
    while True:
        try:
            yield input(_PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _lines() -> Iterator[str]:
    """Yield the lines of stdin; raises ConfigError if stdin is not text."""
    try:
        for line in sys.stdin:
            yield line.strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not {error.encoding} text: {error.reason}.") from None
