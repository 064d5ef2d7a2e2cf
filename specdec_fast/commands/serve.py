"""Serve OpenAI's API over HTTP: completions, chat, streams and metrics."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_fast.commands.common import (
    add_drafter_options,
    add_engine_options,
    draft_tokenizer,
    drafter_names,
    engine_config,
    report_choice,
)
from specdec_fast.commands.request_options import (
    add_chat_template_option,
    add_generation_config_option,
    default_params,
    read_chat_template,
)
from specdec_fast.commands.structured_options import add_answer_format_options
from specdec_fast.errors import ConfigError
from specdec_fast.sampling_params import CHAT_ANSWER_TOKENS

if TYPE_CHECKING:
    from fastapi import FastAPI

    from specdec_fast.service import AsyncEngine

_KEY_VARIABLE = "SPECDEC_API_KEY"
_LARGEST_PORT = 65535
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NO_CHATS = (
    "warning: the tokenizer has no chat template, so requests to /v1/chat/completions will be refused; pass "
    "--chat-template FILE."
)
_FLUSH_SECONDS = 2  # for clients that have not read the end of their answers when all requests have ended
_LAST_SECONDS = 10.0  # after a second signal, when the process ends whatever its threads do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--target", required=True, help="name or folder of a Hugging Face causal model")
    parser.add_argument("--draft", required=True, help=f"the same for the draft; or {drafter_names()}")
    add_drafter_options(parser)
    parser.add_argument("--dtype", default=None, help="of the weights (default: the checkpoint's)")
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    http.add_argument("--port", type=int, default=8000, help="0 for any (default: %(default)s)")
    http.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="names of the model (default: --target)"
    )
    http.add_argument(
        "--api-key", default=None, metavar="KEY", help=f"that requests must have (default: ${_KEY_VARIABLE}, or none)"
    )
    http.add_argument("--max-request-bytes", type=int, default=4 << 20, metavar="N", help="default: 4 MiB")
    http.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for which requests may go on after SIGTERM or SIGINT (default: 30)",
    )
    http.add_argument(
        "--stream-interval", type=int, default=1, metavar="N", help="tokens of a stream's event at least (default: 1)"
    )
    http.add_argument("--no-access-log", action="store_true", help="do not print a line for every request")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-waiting", type=int, default=256, metavar="N", help="requests in the queue (default: 256)"
    )
    limits.add_argument("--timeout", type=float, default=None, metavar="S", help="seconds per request (default: none)")
    limits.add_argument("--kv-token-budget", type=int, default=None, metavar="N", help="KV positions of all requests")
    limits.add_argument("--kv-cache-tokens", type=int, default=None, metavar="N", help="KV positions of the pool")
    limits.add_argument(
        "--max-prefill-tokens", type=int, default=512, metavar="N", help="prompt tokens per step (default: 512)"
    )
    add_chat_template_option(parser)
    add_answer_format_options(parser)
    add_generation_config_option(parser)
    add_engine_options(parser)
    parser.set_defaults(max_new_tokens=CHAT_ANSWER_TOKENS)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Exit status 0; 1 if a second signal had to end the process during a step."""
    if args.shutdown_timeout < 0:
        raise ConfigError(f"--shutdown-timeout {args.shutdown_timeout}: expected seconds >= 0.")
    try:
        import specdec_fast.server.connections  # noqa: F401 - used by _serve
        from specdec_fast.server.app import create_app
    except ImportError as error:
        raise ConfigError(
            f"serve needs FastAPI, uvicorn, httptools and prometheus-client ({error}); pip install '.[serve]'."
        ) from None
    from specdec_fast.request.chat import lacks_chat_template
    from specdec_fast.service import AsyncEngine

    chat_template = read_chat_template(args)
    config = replace(
        engine_config(args, args.dtype),
        kv_cache_tokens=args.kv_cache_tokens,
        max_prefill_tokens=args.max_prefill_tokens,
    )
    with _exits_at_signals(), _bound(args.host, args.port) as listener:
        limits = {"max_waiting": args.max_waiting, "kv_token_budget": args.kv_token_budget}
        engine = AsyncEngine(args.target, args.draft, config, draft_tokenizer=draft_tokenizer(args), **limits)
        report_choice(engine.engine)
        if chat_template is not None and engine.engine.tokenizer is not None:
            engine.engine.tokenizer.chat_template = chat_template
        if lacks_chat_template(engine.engine.tokenizer):
            print(_NO_CHATS, file=sys.stderr)
        app = create_app(
            engine,
            model_names=args.served_model_name or [args.target],
            api_key=os.environ.get(_KEY_VARIABLE) or None if args.api_key is None else args.api_key,
            timeout=args.timeout,
            default_params=default_params(args, engine.engine),
            stream_interval=args.stream_interval,
            max_request_bytes=args.max_request_bytes,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
        )
        with _not_collected():
            asyncio.run(_serve(app, engine, listener, args))
        if engine.is_encoding:  # every request has been answered, and the interpreter would wait for the tokenizer
            sys.stdout.flush()
            sys.stderr.flush()
            _leave(0)
    return 0


def _leave(status: int) -> None:
    """End the process without waiting for its threads: a tokenizer or a step cannot be interrupted."""
    os._exit(status)


@contextmanager
def _not_collected() -> Iterator[None]:
    """Let the garbage collector pass over what lives as long as the server: some 400,000 objects, most of them torch's.

    A full collection of them stops the event loop and the steps for a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _exits_at_signals() -> Iterator[None]:
    def leave(number: int, frame: Any) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket with the address, before models are loaded, or raise ConfigError; it does not listen yet."""
    if not 0 <= port <= _LARGEST_PORT:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"cannot listen at --port {port}: expected 0 to {_LARGEST_PORT}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen at --host {host} --port {port}: {error}.") from None
    return listener


async def _serve(app: FastAPI, engine: AsyncEngine, listener: socket.socket, args: argparse.Namespace) -> None:
    """Serve until a signal; then refuse requests with 503, finish the others for a while, and close the engine.

    A second signal cancels the requests; and if a step does not end soon, it ends the process with status 1.
    """
    import uvicorn

    from specdec_fast.server.connections import BoundedConnection

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Leave the signals to the handlers below: uvicorn's would cancel requests and end with a signal."""
            yield

    config = uvicorn.Config(
        app,
        lifespan="on",
        http=BoundedConnection,
        ws="none",
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        access_log=not args.no_access_log,
    )
    # Beside the warm-up; a daemon, so that signals need not wait for it.
    threading.Thread(target=engine.engine.prepare_structured_outputs, daemon=True).start()
    server = Server(config)
    loop = asyncio.get_running_loop()
    closing = [args.shutdown_timeout, 0.0]
    tasks: list[asyncio.Task[None]] = []
    last_resort = threading.Timer(_LAST_SECONDS, _leave, (1,))
    last_resort.daemon = True

    async def close(finish_within: float) -> None:
        await engine.close(finish_within)
        server.should_exit = True

    def on_signal() -> None:
        if closing:  # the second signal cancels what the first one lets finish
            tasks.append(asyncio.create_task(close(closing.pop(0))))
            if not closing:
                last_resort.start()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    listener.listen(config.backlog)  # a client may connect when the next line is printed; uvicorn accepts it later
    host, port = listener.getsockname()[:2]
    print(f"specdec-fast serve: http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
    try:
        await server.serve([listener])
        for task in tasks:
            await task
        await engine.close()
    finally:
        last_resort.cancel()
