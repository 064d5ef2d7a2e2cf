"""The workload of a benchmark: a pair of models, and prompts as token ids."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.common import report
from bench.common.pairs import DEMO, PAIRS, random_pair, random_prompts
from specdec_fast.assets import demo_pair
from specdec_fast.commands.prompt_files import PromptLine, read_prompts
from specdec_fast.models.loading import load_model
from specdec_fast.request.detokenizer import load_tokenizer


@dataclass(frozen=True)
class Workload:
    """A pair, prompts, and how many tokens to decode.

    Attributes:
        name: name of the pair.
        target, draft: the models, which all methods share.
        prompts: token ids of each prompt.
        max_new_tokens: largest number of new tokens per prompt.
        num_left_out: number of prompts of the file that are too long for so many new tokens in the target's
            positions.

    """

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: list[list[int]]
    max_new_tokens: int
    num_left_out: int = 0


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``load`` reads: the pair, its prompts, and how many tokens to decode."""
    parser.add_argument("--pair", help=f"{DEMO} (default: the bundled one), or random weights: {', '.join(PAIRS)}")
    parser.add_argument("--target", help="instead of --pair: name or folder of a Hugging Face causal model")
    parser.add_argument("--draft", help="the same for its draft")
    prompts = "JSON lines; Spec-Bench's question.jsonl as it is (default: the bundled ones, or random ids)"
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help=prompts)
    parser.add_argument("--num-prompts", type=int, default=0, metavar="N", help="the first N; 0 (default) is all")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="of a random prompt (default: 128)")
    parser.add_argument(
        "--times", type=int, default=1, metavar="N", help="all prompts N times, in one queue (default: 1)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA if there is a device)")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="continue after EOS, so that all texts have one length"
    )


def check_workload(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options that contradict each other; set the default pair."""
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    if args.pair and args.target:
        parser.error("--pair and --target both name a model; give one of them")
    if not args.pair and not args.target:
        args.pair = DEMO
    if args.pair and args.pair not in (DEMO, *PAIRS):
        parser.error(f"--pair {args.pair}: expected one of {', '.join((DEMO, *PAIRS))}")
    args.ignore_eos |= args.pair in PAIRS  # these pairs have no EOS
    if args.target and not args.prompts:
        parser.error("--target needs --prompts")
    if args.times < 1:
        parser.error(f"--times {args.times}: expected 1 or more")


def load(args: argparse.Namespace, num_random: int) -> Workload:
    """Build or load the models, and read the prompts or make random ones.

    Args:
        args: checked options of ``add_workload_options``.
        num_random: number of random prompts if the options name neither a file nor a number.

    """
    dtype = report.DTYPES[args.dtype]
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = demo_pair()
    if args.pair in PAIRS:
        target, draft = random_pair(PAIRS[args.pair], dtype, device)
        tokenizer, file = None, args.prompts
    else:
        names = (str(folder / "target"), str(folder / "draft")) if args.pair else (args.target, args.draft)
        target, draft = (load_model(name, dtype, device) for name in names)
        tokenizer, file = load_tokenizer(names[0]), args.prompts or folder / "prompts.jsonl"
    if args.ignore_eos:
        for model in (target, draft):  # generate(), the oracle and the engine all read it there
            model.generation_config.eos_token_id = None
    if file is None:
        prompts = random_prompts(args.num_prompts or num_random, args.prompt_tokens, PAIRS[args.pair].vocab_size)
    else:
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        prompts = [_encode(line, tokenizer, vocab_size) for line in read_prompts(file)[: args.num_prompts or None]]
    fitting = [
        p for p in prompts if len(p) + args.max_new_tokens <= _positions(target) + 1
    ]  # the last new token needs no position
    if not fitting:
        sys.exit(f"no prompt leaves room for {args.max_new_tokens} new tokens in the target's {_positions(target)}.")
    name = args.pair or f"{args.target} + {args.draft}"
    return Workload(name, target, draft, fitting * args.times, args.max_new_tokens, len(prompts) - len(fitting))


def _positions(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize


def _encode(line: PromptLine, tokenizer: Any | None, vocab_size: int) -> list[int]:
    problem, prompt = line.problem, line.prompt
    if isinstance(prompt, str) and tokenizer is None:
        problem = "text, but the pair has no tokenizer; expected prompt_ids"
    if problem is None:
        prompt = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            problem = f"expected at least one token, of 0 to {vocab_size - 1}"
    if problem:
        sys.exit(f"--prompts, line {line.number}: {problem}")
    return prompt
