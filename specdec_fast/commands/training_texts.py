"""The texts of ``train-drafter``: written by the target, or found in the folder of an earlier call."""

from __future__ import annotations

import argparse
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec_fast.commands.prompt_files import PromptLine, read_prompts
from specdec_fast.config import EngineConfig
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.errors import ConfigError
from specdec_fast.models.model_checks import max_positions
from specdec_fast.sampling_params import SamplingParams
from specdec_fast.training.texts import Texts, write_texts
from specdec_fast.whole_files import replaced

TEXTS = "texts.safetensors"
_TEXT_SETTINGS = "texts.json"


def training_texts(args: argparse.Namespace, target: PreTrainedModel, config: EngineConfig) -> Texts:
    """Return the texts in --output with --resume; otherwise let the target write them, and keep them there.

    Raises ConfigError if they are those of other options or of another target, or if a prompt cannot be continued;
    OutputError if they cannot be written.
    """
    path = args.output / TEXTS
    settings = _text_settings(args, target)
    if args.resume and path.exists():
        _expect_settings(args.output / _TEXT_SETTINGS, settings)
        texts = Texts.load(path)
        sizes = target.config.get_text_config(decoder=True)
        texts.expect_fit(sizes.vocab_size, max_positions(sizes))
        return texts
    lines = [] if args.prompts is None else read_prompts(args.prompts)
    if wrong := next((line for line in lines if line.problem is not None), None):
        raise ConfigError(f"{args.prompts.name}, line {wrong.number}: {wrong.problem}")
    engine = Engine(target, None, config)
    _expect_prompts(args.prompts, lines, engine)
    prompts = [line.prompt for line in lines]
    texts = write_texts(engine, prompts, args.text_tokens, args.max_new_tokens, args.seed)
    with replaced(args.output / _TEXT_SETTINGS) as unfinished:
        unfinished.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    texts.save(path)
    return texts


def _expect_prompts(path: Path | None, lines: list[PromptLine], engine: Engine) -> None:
    """Refuse a prompt that the target cannot continue now, not when its turn comes, which would lose all texts."""
    builder = RequestBuilder(engine.target, engine.tokenizer)
    params = SamplingParams()
    for line in lines:
        if (error := builder.build(line.number, line.prompt, params).error) is not None:
            raise ConfigError(f"{path and path.name}, line {line.number}: {error}") from error


def _text_settings(args: argparse.Namespace, target: Any) -> dict[str, Any]:
    """Return the options on which the texts depend; of the prompts, a digest: the file may be moved."""
    try:
        digest = None if args.prompts is None else sha256(args.prompts.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {str(args.prompts)!r}: {error.strerror}.") from None
    return {
        "target": args.target,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": digest,
        "text_tokens": args.text_tokens,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
    }


def _expect_settings(path: Path, settings: dict[str, Any]) -> None:
    """Check that the texts are those of this command. Texts without settings came from elsewhere."""
    if not path.exists():
        return
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        written = None
    if not isinstance(written, dict):
        raise ConfigError(f"{str(path)!r} is damaged; delete it and the texts beside it.")
    for name, value in settings.items():
        if (before := written.get(name)) != value:
            way = "other prompts" if name == "prompts" else f"{before}, not {value}"
            raise ConfigError(
                f"--{name.replace('_', '-')}: the texts in {str(path.parent)!r} were written with {way}; pass the same "
                "options, or another folder."
            )
