"""Options of the requests that a command decodes: sampling, and chat templates."""

from __future__ import annotations

import argparse
import json
import reprlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_fast.errors import ConfigError, InvalidParamsError
from specdec_fast.sampling_params import OPENAI_DEFAULTS, SamplingParams, recommended_sampling

if TYPE_CHECKING:
    from specdec_fast.engine.engine import Engine


def add_sampling_options(parser: argparse.ArgumentParser, seeded: str) -> None:
    """Add --stop and the options of sampling; ``seeded`` says what samples with seed N + i, for the help of --seed."""
    parser.add_argument(
        "--stop", action="append", default=[], metavar="STRING", help="end a text before this string; repeatable"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens (0: all)")
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens with this mass"
    )
    sampling.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below this share of the likeliest one"
    )
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="default: 1, none")
    sampling.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="P", help="subtract it from logits of emitted tokens"
    )
    sampling.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="P", help="subtract it as often as a token was emitted"
    )
    sampling.add_argument(
        "--logit-bias", default=None, metavar="JSON", help="numbers added to logits by token id, such as '{\"7\": -5}'"
    )
    sampling.add_argument(
        "--allowed-token-ids", type=_token_ids, default=None, metavar="IDS", help="emit only these, such as 5,6,7"
    )
    sampling.add_argument(
        "--bad-word", action="append", default=[], metavar="STRING", help="never emit this; repeatable"
    )
    sampling.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="do not end a text before it has so many tokens"
    )
    sampling.add_argument(
        "--seed",
        type=int,
        default=None,
        metavar="N",
        help=f"{seeded} i (from 1) samples with seed N + i (default: a random seed)",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add --n, --logprobs and --prompt-logprobs."""
    parser.add_argument("--n", type=int, default=1, metavar="N", help="texts of every prompt (default: 1)")
    parser.add_argument(
        "--logprobs",
        type=int,
        nargs="?",
        const=True,
        default=False,
        metavar="K",
        help="write the log-probability of every token, and the K most likely tokens beside it (default of K: 0)",
    )
    parser.add_argument(
        "--prompt-logprobs",
        type=int,
        default=None,
        metavar="K",
        help="write those of every prompt token, and the K most likely tokens beside it",
    )


def output_params(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that the options of ``add_output_options`` say."""
    return {"n": args.n, "logprobs": args.logprobs, "prompt_logprobs": args.prompt_logprobs}


def sampling_params(args: argparse.Namespace, number: int = 0, **fields: Any) -> SamplingParams:
    """Make the parameters of request ``number`` from the options of ``add_sampling_options``, and from other fields."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=_logit_bias(args),
        allowed_token_ids=args.allowed_token_ids,
        bad_words=args.bad_word,
        min_tokens=args.min_tokens,
        seed=args.seed,
        stop=args.stop,
        **fields,
    ).with_seed_offset(number)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80}: expected token ids, such as 5,6,7") from None


def _logit_bias(args: argparse.Namespace) -> Any:
    try:
        return {} if args.logit_bias is None else json.loads(args.logit_bias)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--logit-bias {reprlib.repr(args.logit_bias)}: not JSON: {error}.") from None


def add_generation_config_option(parser: argparse.ArgumentParser) -> None:
    """Add --generation-config."""
    parser.add_argument(
        "--generation-config",
        choices=("auto", "openai"),
        default="auto",
        help="where sampling parameters come from that a request leaves out: the target's generation_config.json, and "
        "else OpenAI's defaults (auto, the default); or OpenAI's defaults alone",
    )


def default_params(args: argparse.Namespace, engine: Engine) -> SamplingParams:
    """Return the values of the fields that a request of OpenAI's API leaves out; print those that the target sets.

    Raises ConfigError if the target's generation config has a value out of range.
    """
    params = replace(OPENAI_DEFAULTS, max_new_tokens=args.max_new_tokens)
    if args.generation_config == "openai":
        return params
    recommended = recommended_sampling(getattr(engine.target.model, "generation_config", None))
    try:
        params = replace(params, **recommended)
    except InvalidParamsError as error:
        raise ConfigError(f"the target's generation config: {error} Pass --generation-config openai.") from None
    if recommended:
        fields = ", ".join(f"{name}={value}" for name, value in recommended.items())
        print(f"default sampling parameters, from the target's generation config: {fields}", file=sys.stderr)
    return params


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add --chat-template and --chat-template-kwargs."""
    add_chat_template_option(parser)
    parser.add_argument(
        "--chat-template-kwargs",
        default=None,
        metavar="JSON",
        help="variables for the template, such as '{\"enable_thinking\": false}'",
    )


def add_chat_template_option(parser: argparse.ArgumentParser) -> None:
    """Add --chat-template."""
    parser.add_argument(
        "--chat-template",
        type=Path,
        default=None,
        metavar="FILE",
        help="a Jinja template for messages (default: the tokenizer's own)",
    )


def read_chat_template(args: argparse.Namespace) -> str | None:
    """Return the text of --chat-template; None without one. Raises ConfigError if it is no text, or OSError."""
    if args.chat_template is None:
        return None
    try:
        text: str = args.chat_template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {args.chat_template}: not UTF-8 text: {error}") from None
    return text


def chat_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``add_chat_options`` as keywords of ``Engine.generate``.

    Raises ConfigError if the file is not text, or the variables are no JSON object; OSError if it cannot be read.
    """
    template = read_chat_template(args)
    options: dict[str, Any] = {} if template is None else {"chat_template": template}
    if args.chat_template_kwargs is not None:
        try:
            options["chat_template_kwargs"] = json.loads(args.chat_template_kwargs)
        except (ValueError, RecursionError) as error:
            shown = reprlib.repr(args.chat_template_kwargs)
            raise ConfigError(f"--chat-template-kwargs {shown}: not JSON: {error}.") from None
    return options
