"""Train a small pair for speculative decoding (tokenizer, target, distilled draft) from any UTF-8 text file.

    python tools/train_demo_pair.py --text book.txt --output out/

The pair has the shape of the one in `specdec_fast/assets/demo_pair`: `out/target` and `out/draft` load with
plain `from_pretrained`, `out/prompts.jsonl` holds prompts from text that was held out, `out/report.json` and
`out/README.md` say what the pair is worth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from pair_corpus import (
    CONTEXT,
    LONGEST_PROMPT,
    InputError,
    TokenStream,
    choose_prompts,
    encode_documents,
    hold_out,
    read_text,
    save_tokenizer,
    split_documents,
    token_stream,
    train_tokenizer,
)
from pair_report import Protocol, measure_pair, model_card, table
from pair_training import (
    DRAFT_SIZE,
    TARGET_SIZE,
    Budget,
    ModelSize,
    distillation_loss,
    new_model,
    next_token_loss,
    save_model,
    train,
)
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

MAX_WEIGHT_BYTES = 3_800_000  # 4 MB with the tokenizers: small enough for a repository and a wheel
MIN_VOCAB_SIZE = 3 + 256 + 1  # special tokens, bytes, and something learnt
OTHER_MINUTES = 0.5  # tokenizer and measurements; 15 to 40 s were seen with the default sizes


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line: the usage of fifteen options would bury the message."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text: str) -> float:
    """A finite number above zero."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def positive_int(text: str) -> int:
    """A whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def share(text: str) -> float:
    """A share of the text that leaves more to train on than it takes away."""
    value = float(text)
    if not 0 < value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 0.5")
    return value


def separator(text: str) -> str:
    r"""The separator with `\n` and `\t` spelt out, as a shell's double quotes leave them."""
    if not (value := text.replace("\\n", "\n").replace("\\t", "\t")):
        raise argparse.ArgumentTypeError("the separator is empty")
    return value


def build_parser() -> argparse.ArgumentParser:
    """All options; their defaults make a pair like the bundled one."""
    parser = OneLineParser(
        prog="train_demo_pair",
        description="Train a small target and a draft distilled from it, from any UTF-8 text file.",
        epilog="Takes the two budgets plus about half a minute for the tokenizer and the measurements: 14 "
        "minutes by default, on one CPU thread. Megabytes of text are best; a short one the target "
        "begins to recite. Files of the same names in FOLDER are overwritten.",
    )
    add = partial(parser.add_argument, metavar="N")
    size: dict[str, Any] = {"type": int, "nargs": 5, "metavar": ("HIDDEN", "LAYERS", "HEADS", "KV_HEADS", "FFN")}
    add("--text", type=Path, required=True, metavar="FILE", help="the text to learn, UTF-8")
    add("--output", type=Path, required=True, metavar="FOLDER", help="where the pair goes")
    add("--minutes-target", type=positive, default=9.0, help="training time of the target (%(default)g)")
    add("--minutes-draft", type=positive, default=4.0, help="training time of the draft (%(default)g)")
    add(
        "--separator",
        type=separator,
        metavar="TEXT",
        help=r"what stands between documents, \n and \t "
        "allowed (default: paragraphs are merged into documents of 700 characters or more)",
    )
    add(
        "--held-out",
        type=share,
        default=0.02,
        help="share of the documents that is never trained on, at least 8 of them (%(default)g)",
    )
    add("--seed", type=int, default=0, help="of everything random (%(default)s)")
    add("--threads", type=positive_int, default=1, help="CPU threads (%(default)s)")
    add("--vocab-size", type=int, default=1024, help="tokens of the tokenizer (%(default)s)")
    add("--target-size", default=astuple(TARGET_SIZE), help=f"{astuple(TARGET_SIZE)}", **size)
    add("--draft-size", default=astuple(DRAFT_SIZE), help=f"{astuple(DRAFT_SIZE)}", **size)
    add("--batch-size", type=positive_int, default=4, help=f"windows of {CONTEXT} tokens per step (%(default)s)")
    add("--prompts", type=positive_int, default=32, help="how many to write and measure (%(default)s)")
    add("--num-draft-tokens", type=positive_int, default=5, help="K of the measurements (%(default)s)")
    add("--max-new-tokens", type=positive_int, default=200, help="measured per prompt (%(default)s)")
    return parser


def check_sizes(args: argparse.Namespace) -> None:
    """Refuse before training what would only fail, or prove too large, after it."""
    if args.vocab_size < MIN_VOCAB_SIZE:
        raise InputError(f"--vocab-size must be at least {MIN_VOCAB_SIZE}, not {args.vocab_size}")
    longest = CONTEXT - LONGEST_PROMPT - 1
    if args.max_new_tokens > longest:
        raise InputError(f"--max-new-tokens must be at most {longest}, not {args.max_new_tokens}")
    with torch.device("meta"):
        parameters = sum(
            new_model(size, args.vocab_size, args.seed).num_parameters()
            for size in (ModelSize(*args.target_size), ModelSize(*args.draft_size))
        )
    if 2 * parameters > MAX_WEIGHT_BYTES:  # bf16: two bytes each
        raise InputError(
            f"the models would take {2 * parameters / 1e6:.1f} MB, at most "
            f"{MAX_WEIGHT_BYTES / 1e6:.1f} MB allowed; choose smaller sizes"
        )


def train_pair(args: argparse.Namespace, tokenizer: Tokenizer, stream: TokenStream) -> dict[str, dict]:
    """Train and save the target, then the draft; returns what the report says of each."""
    records: dict[str, dict] = {}
    loss_function = next_token_loss
    for name, minutes, numbers in (
        ("target", args.minutes_target, args.target_size),
        ("draft", args.minutes_draft, args.draft_size),
    ):
        size, folder = ModelSize(*numbers), args.output / name
        model = new_model(size, args.vocab_size, args.seed)
        print(f"{name}: {model.num_parameters():,} parameters, {minutes:g} min", flush=True)
        record = train(model, loss_function, stream, Budget(minutes, args.batch_size, args.seed))
        save_model(model, folder)
        save_tokenizer(tokenizer, folder)
        records[name] = {
            "parameters": model.num_parameters(),
            **asdict(size),
            **record,
            "passes": record["tokens"] / stream.num_tokens,
        }
        if name == "target":
            # The draft learns from the target that is shipped, already rounded to bf16.
            target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            loss_function = partial(distillation_loss, target=target.eval())
    return records


def run(args: argparse.Namespace) -> None:
    """Text to tokenizer to models to report."""
    began = time.perf_counter()
    check_sizes(args)
    text = read_text(args.text)
    training, held_out = hold_out(split_documents(text, args.separator), args.held_out, args.seed)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {args.output}: {error.strerror}") from error
    print(
        f"This takes about {args.minutes_target + args.minutes_draft + OTHER_MINUTES:.1f} minutes: "
        f"target {args.minutes_target:g}, draft {args.minutes_draft:g}, the rest about {OTHER_MINUTES:g}."
    )
    tokenizer = train_tokenizer(training, args.vocab_size)
    stream = token_stream(tokenizer, training)
    rows = choose_prompts(tokenizer, held_out, args.prompts, args.text.stem, args.seed)
    (args.output / "prompts.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    print(
        f"text: {len(text):,} characters, {len(training):,} training documents, {stream.num_tokens:,} "
        f"tokens; {len(held_out):,} documents held out; {len(rows)} prompts",
        flush=True,
    )

    records = train_pair(args, tokenizer, stream)
    protocol = Protocol(args.num_draft_tokens, args.max_new_tokens, args.seed)
    measured = measure_pair(args.output, encode_documents(tokenizer, held_out), protocol)
    megabytes = sum(f.stat().st_size for name in records for f in (args.output / name).iterdir()) / 1e6
    report = {
        "source": {
            "file": args.text.name,
            "characters": len(text),
            "training_documents": len(training),
            "training_tokens": stream.num_tokens,
            "held_out_documents": len(held_out),
        },
        "vocab_size": args.vocab_size,
        "megabytes": megabytes,
        **records,
        "measured": measured,
        "optimizer": "Muon and AdamW" if hasattr(torch.optim, "Muon") else "AdamW",
        "threads": args.threads,
        "seed": args.seed,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seconds": time.perf_counter() - began,
    }
    (args.output / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (args.output / "README.md").write_text(model_card(report), encoding="utf-8")
    print(f"\nMeasured on {measured['prompts']} held-out prompts, fp32:\n{table(measured)}")
    print(
        f"Seconds: target {records['target']['seconds']:.0f}, draft {records['draft']['seconds']:.0f}, "
        f"measurements {measured['seconds']:.0f}, in all {report['seconds']:.0f}. "
        f"{megabytes:.2f} MB in {args.output}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; anything wrong with the input is one line on stderr and exit status 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    os.environ.setdefault("RAYON_NUM_THREADS", str(args.threads))  # the tokenizer's own threads
    transformers.utils.logging.disable_progress_bar()
    try:
        run(args)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
