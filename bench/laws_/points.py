"""Drafters of one grid: trained on nested parts of the same texts, evaluated on the same prompts."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_fast import Engine, EngineConfig, SamplingParams
from specdec_fast.drafters.eagle3.module import Eagle3Module
from specdec_fast.drafters.eagle3.training import new_module, save_drafter
from specdec_fast.drafters.shared.new_drafter import DrafterSize
from specdec_fast.models.loading import load_model
from specdec_fast.training.drafter_loss import Teacher
from specdec_fast.training.texts import Texts, write_texts
from specdec_fast.training.trainer import Trainer, TrainingSettings

_CPU = torch.device("cpu")
_TEXT_SEED = 1
_BATCH = 32  # sequences of an evaluation; what is accepted does not depend on it
_SHORTEST_REST = 8  # tokens of a text that is cut at the end of a budget
_CHECKPOINT_SECONDS = 60.0
_TIMINGS = 3


@dataclass(frozen=True)
class GridSettings:
    """What all drafters of a grid share; a grid that goes on needs the same."""

    target: str  # name or folder
    text_tokens: int  # of all texts, the held-out ones included
    hidden_size: int = 64  # of the drafters
    tap_layers: tuple[int, ...] = (1, 2, 3)  # see Drafter.taps
    batch_tokens: int = 256  # positions of a training batch
    learning_rate: float = 4e-3  # AdamW's
    matrix_learning_rate: float = 2e-2  # Muon's
    num_steps: int = 5  # drafted tokens in a row that are trained
    early_share: float = 0.5  # of the batches, that train two of them
    num_draft_tokens: int = 7  # K of the evaluation
    held_out: int = 640  # texts whose beginnings are prompts of the evaluation
    prompt_tokens: int = 24  # of such a beginning
    max_new_tokens: int = 64  # per prompt of the evaluation, greedy


class Grid:
    """Texts, prompts and target of a grid; what takes long to make is kept in ``folder``."""

    def __init__(self, settings: GridSettings, folder: Path) -> None:
        self.settings = settings
        self._folder = folder
        self._target = load_model(settings.target, torch.float32, _CPU)
        # A module of its own: transformers hooks the layers of a model that has returned hidden states, and an engine
        # makes no forward program of a model with hooks.
        self._teacher = Teacher(load_model(settings.target, torch.float32, _CPU), settings.tap_layers, None)
        texts = self._texts(folder / f"texts-{settings.text_tokens}.safetensors")
        self._learnt, held_out = texts.split(settings.held_out)
        self.prompts = beginnings(self._learnt, held_out, settings.prompt_tokens)

    def _texts(self, path: Path) -> Texts:
        if not path.exists():
            engine = Engine(self._target, None, EngineConfig(dtype=torch.float32, max_batch_size=64))
            write_texts(engine, [], self.settings.text_tokens, 200, _TEXT_SEED).save(path)
        return Texts.load(path)

    @property
    def most_tokens(self) -> int:
        """The tokens of all texts to train on."""
        return sum(map(len, self._learnt))

    def point(self, layers: int, training_tokens: int, seed: int) -> dict[str, Any]:
        """Train one drafter, decode with it, and return what came out.

        Raises AssertionError if an output is not that of plain decoding. An interrupted training goes on from its last
        checkpoint.
        """
        folder = self._folder / f"layers-{layers}-tokens-{training_tokens}-seed-{seed}"
        folder.mkdir(exist_ok=True)
        settings = self.settings
        module = self._module(layers, seed)
        training = TrainingSettings(
            1,
            settings.batch_tokens,
            settings.learning_rate,
            settings.matrix_learning_rate,
            settings.num_steps,
            settings.early_share,
            seed=seed,
        )
        trainer = Trainer(module, self._teacher, first_tokens(self._learnt, training_tokens), training, folder)
        trainer.resume()
        trainer.run(_CHECKPOINT_SECONDS)
        save_drafter(module, folder, self._target, settings.tap_layers, None)
        measured = self._evaluated(folder)
        shutil.rmtree(folder)
        return {
            "layers": layers,
            "training_tokens": training_tokens,
            "seed": seed,
            "parameters": sum(weight.numel() for weight in module.parameters() if weight.requires_grad),
            "steps": trainer.step,
            "seconds": trainer.seconds,
            **measured,
        }

    def forward_seconds(self, layers: int, batch_sizes: list[int]) -> dict[str, Any]:
        """Time the forwards of the target, by rows, and of a drafter, by sequences; its weights do not matter."""
        folder = self._folder / f"layers-{layers}-untrained"
        folder.mkdir(exist_ok=True)
        save_drafter(self._module(layers, 0), folder, self._target, self.settings.tap_layers, None)
        engine = self._engine(folder, max(batch_sizes))
        most = max(batch_sizes) * (1 + self.settings.num_draft_tokens)
        rows = sorted({1, 2, 3, 4, 5, 6, 7, most} | {n for i in range(3, 20) for n in (2**i, 3 * 2 ** (i - 1))})
        counts = [n for n in rows if n <= most]
        verify = _least(engine.profiler.verify_seconds(counts) for _ in range(_TIMINGS))
        draft = _least(engine.profiler.draft_seconds(sorted(batch_sizes)) or {} for _ in range(_TIMINGS))
        shutil.rmtree(folder)
        return {"layers": layers, "verify": sorted(verify.items()), "draft": sorted(draft.items())}

    def _module(self, layers: int, seed: int) -> Eagle3Module:
        size = DrafterSize(self.settings.hidden_size, tap_layers=self.settings.tap_layers, num_layers=layers)
        torch.manual_seed(seed)
        vocab_size = self._target.config.get_text_config(decoder=True).vocab_size
        return new_module(self._target, size, vocab_size, None)

    def _engine(self, folder: Path | None, batch_size: int = _BATCH) -> Engine:
        draft = None if folder is None else f"eagle3:{folder}"
        config = EngineConfig(
            dtype=torch.float32, max_batch_size=batch_size, num_draft_tokens=self.settings.num_draft_tokens
        )
        return Engine(self._target, draft, config)

    def _evaluated(self, folder: Path) -> dict[str, Any]:
        engine = self._engine(folder)
        assert self._decoded(engine) == self._plain, "an output is not that of plain decoding"
        decoding = engine.last_run.decoding
        return {
            "accepted_tokens": decoding.num_accepted_tokens / decoding.num_steps,
            "num_drafts": decoding.num_drafts,
            "accepted_per_position": decoding.accepted_per_position,
        }

    @cached_property
    def _plain(self) -> list[list[int]]:
        return self._decoded(self._engine(None))

    def _decoded(self, engine: Engine) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=self.settings.max_new_tokens)
        outputs = engine.generate(self.prompts, params, progress=False)
        return [output.raise_for_error().token_ids for output in outputs]


def _least(timings: Iterable[dict[int, float]]) -> dict[int, float]:
    """Return the least seconds of each count: the first forwards are slower, and a disturbance only adds."""
    first, *others = timings
    return {count: min(seconds, *(other[count] for other in others)) for count, seconds in first.items()}


def beginnings(learnt: list[Tensor], held_out: list[Tensor], length: int) -> list[list[int]]:
    """Return the different beginnings of held-out texts, without those with which a text to train on begins."""
    known = {tuple(text[:length].tolist()) for text in learnt}
    found = {tuple(text[:length].tolist()): None for text in held_out if len(text) > length}
    return [list(beginning) for beginning in found if beginning not in known]


def first_tokens(texts: list[Tensor], num_tokens: int) -> list[Tensor]:
    """Return the first ``num_tokens`` tokens of texts, of which the last may be cut; a short rest is left out."""
    chosen = []
    for text in texts:
        if num_tokens < min(len(text), _SHORTEST_REST):
            break
        chosen.append(text[:num_tokens])
        num_tokens -= len(chosen[-1])
    return chosen
