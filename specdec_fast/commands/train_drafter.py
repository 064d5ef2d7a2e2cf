"""Train a drafter for a target, on texts that the target writes itself."""

from __future__ import annotations

import argparse
import json
import math
import platform
import reprlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec_fast.commands.common import add_backend_options, add_tap_layers, backend_settings, expect_writable
from specdec_fast.commands.drafter_kinds import KINDS
from specdec_fast.commands.only_writer import only_writer
from specdec_fast.commands.training_texts import TEXTS, training_texts
from specdec_fast.config import EngineConfig
from specdec_fast.errors import ConfigError
from specdec_fast.models.loading import load_model
from specdec_fast.training.interrupts import Terminated, terminable
from specdec_fast.training.texts import Texts
from specdec_fast.training.trainer import Trainer, TrainingSettings
from specdec_fast.whole_files import replaced

_REPORT = "report.json"
_LOCK = ".lock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--kind", required=True, choices=list(KINDS), help="of drafter")
    parser.add_argument("--target", required=True, help="name or folder of a Hugging Face causal model")
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="where the drafter goes")
    parser.add_argument("--resume", action="store_true", help="go on with the texts and the training in --output")
    parser.add_argument("--dtype", default=None, help="of the target (default: the checkpoint's)")
    _add_text_options(parser)
    size = parser.add_argument_group("size of an EAGLE-3 or SpecBlock drafter, which has --tap-layers too")
    size.add_argument("--hidden-size", type=_positive, metavar="N", help="(default: the target's)")
    size.add_argument("--ffn-size", type=_positive, metavar="N", help="(default: in proportion to the hidden size)")
    size.add_argument("--draft-vocab-size", type=_positive, metavar="N", help="most frequent ids (default: all)")
    block = parser.add_argument_group("blocks of a DFlash drafter, which has --ffn-size and --tap-layers too")
    block.add_argument(
        "--num-layers", type=_positive, metavar="N", help="of the drafter (default: 2), or of EAGLE-3 (default: 1)"
    )
    block.add_argument("--block-size", type=_positive, metavar="N", help="rows, the newest token included (default: 8)")
    block.add_argument("--markov-rank", type=_positive, metavar="N", help="of DSpark's Markov head (default: DFlash)")
    heads = parser.add_argument_group("heads of Medusa or Clover")
    heads.add_argument("--num-heads", type=_positive, metavar="N", help="tokens to draft (default: 3)")
    heads.add_argument(
        "--tree-nodes", type=_positive, metavar="N", help="of their tree; also of SpecBlock (default: 16; Clover: 4)"
    )
    group = parser.add_argument_group("training")
    default = TrainingSettings()
    group.add_argument("--epochs", type=_positive, default=default.epochs, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--batch-tokens", type=_positive, default=default.batch_tokens, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument(
        "--learning-rate", type=_rate, default=default.learning_rate, metavar="X", help="(default: %(default)s)"
    )
    group.add_argument(
        "--matrix-learning-rate",
        type=_rate,
        metavar="X",
        help="train the matrices of layers with Muon, at this rate (default: AdamW trains all)",
    )
    group.add_argument(
        "--early-share",
        type=_share,
        default=default.early_share,
        metavar="X",
        help="of the batches, that train 2 draft tokens in a row instead of all: faster (default: %(default)s)",
    )
    group.add_argument("--seed", type=_seed, default=0, metavar="N", help="of everything random (default: 0)")
    group.add_argument(
        "--checkpoint-minutes", type=_minutes, default=5.0, metavar="X", help="between two (default: %(default)s)"
    )
    add_tap_layers(parser, "2, half of the layers, the last but 3")
    add_backend_options(parser)


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    texts = parser.add_argument_group("texts")
    texts.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="prompts to continue (default: none)")
    texts.add_argument(
        "--text-tokens", type=_positive, default=1_000_000, metavar="N", help="of all texts (default: %(default)s)"
    )
    texts.add_argument(
        "--max-new-tokens", type=_positive, default=256, metavar="N", help="per text (default: %(default)s)"
    )
    texts.add_argument(
        "--batch-size", type=_positive, default=64, metavar="N", help="of the engine (default: %(default)s)"
    )
    texts.add_argument(
        "--held-out", type=_positive, default=256, metavar="N", help="texts to measure on (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Write texts, train, and measure; return the exit status: 0, 130 if interrupted, 143 if SIGTERM ended it."""
    _make_folder(args.output)
    try:
        with only_writer(args.output / _LOCK, args.output), terminable():
            _expect_folder(args)
            return _train(args)
    except KeyboardInterrupt as interrupt:
        name, status = ("terminated", 143) if isinstance(interrupt, Terminated) else ("interrupted", 130)
        rest = "--resume goes on from here" if (args.output / TEXTS).exists() else "no texts were kept"
        print(f"specdec-fast train-drafter: {name}; {rest}.", file=sys.stderr)
        return status


def _train(args: argparse.Namespace) -> int:
    config = EngineConfig(
        max_batch_size=args.batch_size,
        dtype=args.dtype,
        **backend_settings(args),
    )
    target = load_model(args.target, config.dtype, config.device)  # type: ignore[arg-type]
    kind = KINDS[args.kind](args, target)
    torch.manual_seed(args.seed)
    texts = training_texts(args, target, config)
    if args.held_out + 1 >= len(texts.lengths):
        raise ConfigError(
            f"--held-out {args.held_out}, but there are {len(texts.lengths)} texts; lower it, or write more into "
            "another folder: raise --text-tokens."
        )
    learnt, held_out = texts.split(args.held_out)
    module, teacher = kind.start(texts)
    settings = TrainingSettings(
        args.epochs,
        args.batch_tokens,
        args.learning_rate,
        args.matrix_learning_rate,
        kind.num_steps,
        early_share=args.early_share,
        seed=args.seed,
        autocast=target.device.type != "cpu",  # on a CPU it was half as fast as fp32
    )
    trainer = Trainer(module, teacher, learnt, settings, args.output, kind.loss)
    if args.resume:
        trainer.resume()
    try:
        trainer.run(60 * args.checkpoint_minutes)
    except KeyboardInterrupt:
        trainer.save()
        raise
    trainer.save()
    report = _report(args, trainer, texts, trainer.evaluate(held_out)) | kind.save(trainer, held_out, args.output)
    with replaced(args.output / _REPORT) as unfinished:
        unfinished.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    shares = " ".join(f"{share:.3f}" for share in report["agreement"])
    print(f"agreement with the target on {args.held_out} texts held out, per draft token: {shares}")
    print(f"{report['parameters']:,} parameters in {args.output}; pass --draft {args.kind}:{args.output}")
    return 0


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {str(folder)!r}: {error.strerror}.") from None


def _expect_folder(args: argparse.Namespace) -> None:
    if not args.resume and any(path.name != _LOCK for path in args.output.iterdir()):
        raise ConfigError(f"--output {args.output} is not empty; pass --resume to go on with it, or another folder.")
    expect_writable(args.output / _REPORT)


def _report(args: argparse.Namespace, trainer: Trainer, texts: Texts, agreement: list[float]) -> dict[str, Any]:
    options = [
        part
        for name, value in vars(args).items()
        if value not in (None, False) and name not in ("command", "output", "resume")
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [_shown(value)]))
    ]
    return {
        "command": " ".join(["specdec-fast", "train-drafter", *options]),
        "agreement": [round(share, 4) for share in agreement],
        "parameters": sum(p.numel() for p in trainer.module.parameters() if p.requires_grad),
        "texts": {"number": len(texts.lengths), "tokens": len(texts.token_ids), "held_out": args.held_out},
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "loss": round(trainer.loss, 4),
        "machine": {
            "device": str(trainer.device),
            "processor": _processor(),
            "threads": torch.get_num_threads(),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _positive(text: str) -> int:
    with suppress(ValueError):
        if 1 <= (value := int(text)) < 2**31:
            return value
    raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a positive integer below 2**31")


def _seed(text: str) -> int:
    with suppress(ValueError):
        if 0 <= (value := int(text)) < 2**62:  # each text has a seed of its own, from this one on
            return value
    raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not an integer from 0 to 2**62 - 1")


def _share(text: str) -> float:
    if 0 <= (value := _number(text)) <= 1:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")


def _rate(text: str) -> float:
    if 0 < (value := _number(text)) < 1:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")


def _minutes(text: str) -> float:
    if (value := _number(text)) >= 0:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes")


def _number(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    return math.nan  # which is in no range
