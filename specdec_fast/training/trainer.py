"""The training loop: batches of similar lengths, AdamW, a schedule over all steps, and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from specdec_fast.drafters.shared.trainable import DrafterModule
from specdec_fast.errors import ConfigError, TrainingError
from specdec_fast.models.loading import cause_shown, why_unreadable
from specdec_fast.training.drafter_loss import Teacher, TeacherOutput, agreement, loss_of, padded
from specdec_fast.training.interrupts import deferred
from specdec_fast.whole_files import replaced

Loss = Callable[[Any, Tensor, TeacherOutput, int], Tensor]

_BETAS = (0.9, 0.95)
LARGEST_GRADIENT = 1.0
_MUON_DECAY = 0.01
_SORTED_TOGETHER = 64  # batches; texts are sorted by length among so many
_EARLY_STEPS = 2
_MOVING = 0.98  # of the loss that the bar shows


@dataclass(frozen=True)
class TrainingSettings:
    """How a drafter is trained."""

    epochs: int = 2  # number of passes over the texts
    batch_tokens: int = 2048  # largest number of positions of a batch, padding included, unless one text has more
    learning_rate: float = 5e-5  # AdamW's, at its height
    # the rate, at its height, with which Muon (Jordan et al., 2024) trains the matrices of the layers; AdamW trains the
    # rest. None: AdamW trains all
    matrix_learning_rate: float | None = None
    num_steps: int = 7  # number of drafted tokens in a row that are trained
    # share of all batches, the first ones, in which only _EARLY_STEPS of them are: these cost less, and most that is
    # learnt of one token holds for the next
    early_share: float = 0.0
    warmup: float = 0.02  # share of all steps in which the learning rate rises
    seed: int = 0  # of the order of the texts
    autocast: bool = False  # whether to compute in bf16 where PyTorch does so by itself


class Trainer:
    """Trains one drafter on one list of texts ``[length]`` int64; a checkpoint holds all it needs to go on.

    ``loss`` is that of the module on one batch, from token ids, the teacher's output and the number of steps.
    Checkpoints go into ``folder``.
    """

    def __init__(
        self,
        module: DrafterModule,
        teacher: Teacher,
        texts: list[Tensor],
        settings: TrainingSettings,
        folder: Path,
        loss: Loss = loss_of,
    ) -> None:
        self.module = module
        self.teacher = teacher
        self.texts = texts
        self.settings = settings
        self._loss_of = loss
        self.device = next(module.parameters()).device
        self._state_file = folder / "training_state.pt"
        self.optimizers = optimizers_of(module, settings)
        self.step = 0  # steps done
        self.seconds = 0.0  # spent in them
        self.loss = math.nan  # moving average
        self.num_steps = sum(1 for epoch in range(settings.epochs) for _ in self._batches(epoch))

    def run(self, checkpoint_seconds: float) -> None:
        """Train to the end, and write a checkpoint every so many seconds.

        SIGINT and SIGTERM are handled between two steps, so an exception of their handlers leaves no half step.

        Raises:
            TrainingError: the loss is not finite.
            OutputError: a checkpoint cannot be written.
        """
        saved = monotonic()
        with tqdm(total=self.num_steps, initial=self.step, desc="train", unit="step") as bar:
            for batch in self._remaining():
                with deferred():
                    started = perf_counter()
                    value = self._train_on(batch)
                    self.loss = value if math.isnan(self.loss) else _MOVING * self.loss + (1 - _MOVING) * value
                    self.step += 1
                    self.seconds += perf_counter() - started
                bar.set_postfix_str(f"loss {self.loss:.3f}", refresh=False)
                bar.update()
                if monotonic() - saved > checkpoint_seconds:
                    self.save()
                    saved = monotonic()

    def evaluate(self, texts: list[Tensor]) -> list[float]:
        """Return, for each drafted token in a row, how often it is the target's own choice on ``texts``."""
        total = torch.zeros(self.settings.num_steps, 2, dtype=torch.int64, device="cpu")
        for token_ids, _, output in self.teacher_outputs(texts):
            counts = agreement(self.module, token_ids, output, self._steps(token_ids))
            total[: len(counts)] += counts  # short texts have fewer steps
        return [agreed / max(1, count) for agreed, count in total.tolist()]

    def teacher_outputs(self, texts: list[Tensor]) -> Iterator[tuple[Tensor, Tensor, TeacherOutput]]:
        """Yield texts in batches: ids ``[B, L]``, lengths ``[B]``, and the teacher's output for them."""
        for batch in grouped(sorted(texts, key=len), self.settings.batch_tokens):
            token_ids, lengths = padded(batch, self.device)
            yield token_ids, lengths, self.teacher.output(token_ids, lengths)

    def save(self) -> None:
        """Write the checkpoint; an interrupt leaves the one before it.

        Raises:
            OutputError: it cannot be written.
        """
        state = {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "loss": self.loss,
            "recipe": self._identity(),
        }
        with replaced(self._state_file) as unfinished, unfinished.open("wb") as file:
            torch.save(state, file)

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one.

        Raises:
            ConfigError: it is damaged, or of other settings, other texts or another shape.
        """
        if not self._state_file.exists():
            return
        remedy = "delete it, or leave --resume out"
        try:
            state = torch.load(self._state_file, map_location=self.device, weights_only=True)
        except Exception as error:  # bytes that are damaged can raise nearly any
            reason = why_unreadable(error)
            raise ConfigError(f"{str(self._state_file)!r} cannot be read ({reason}); {remedy}.") from cause_shown(error)
        before = state.get("recipe") if isinstance(state, dict) else None
        if not isinstance(before, dict) or "optimizers" not in state:
            raise ConfigError(f"{str(self._state_file)!r} is no checkpoint of a training; {remedy}.")
        if others := [name for name, value in self._identity().items() if before.get(name) != value]:
            raise ConfigError(
                f"{str(self._state_file)!r} was written with other settings ({', '.join(others)}); {remedy}."
            )
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.loss = state["loss"]

    def _identity(self) -> dict[str, Any]:
        shapes = {name: list(parameter.shape) for name, parameter in self.module.named_parameters()}
        return {
            **asdict(self.settings),
            **self.teacher.identity(),
            "texts": sum(map(len, self.texts)),
            "shapes": shapes,
        }

    def _train_on(self, batch: list[Tensor]) -> float:
        token_ids, lengths = padded(batch, self.device)
        is_early = self.step < self.settings.early_share * self.num_steps
        num_steps = min(self._steps(token_ids), _EARLY_STEPS if is_early else self.settings.num_steps)
        rate = self._rate((self.step + 1) / self.num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * rate
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.autocast):
            loss = self._loss_of(self.module, token_ids, self.teacher.output(token_ids, lengths), num_steps)
        if not math.isfinite(value := loss.item()):
            raise TrainingError(f"the loss became {value} at step {self.step + 1}; lower the learning rate.")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), LARGEST_GRADIENT)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return value

    def _steps(self, token_ids: Tensor) -> int:
        return min(self.settings.num_steps, token_ids.shape[1] - 2)

    def _rate(self, progress: float) -> float:
        """Return the factor on the learning rate: it rises in a line, then falls as a cosine to 0."""
        return min(progress / self.settings.warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * progress))

    def _remaining(self) -> Iterator[list[Tensor]]:
        done = self.step
        for epoch in range(self.settings.epochs):
            for batch in self._batches(epoch):
                if done:
                    done -= 1
                else:
                    yield batch

    def _batches(self, epoch: int) -> Iterator[list[Tensor]]:
        """Yield the batches of one pass, in an order that the seed and the pass decide."""
        order = torch.Generator(device="cpu").manual_seed(self.settings.seed * 1_000_003 + epoch)
        texts = [self.texts[i] for i in torch.randperm(len(self.texts), generator=order, device="cpu").tolist()]
        together = max(1, _SORTED_TOGETHER * self.settings.batch_tokens * len(texts) // max(1, sum(map(len, texts))))
        for start in range(0, len(texts), together):
            batches = list(grouped(sorted(texts[start : start + together], key=len), self.settings.batch_tokens))
            yield from (batches[i] for i in torch.randperm(len(batches), generator=order, device="cpu").tolist())


def optimizers_of(module: DrafterModule, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """Return AdamW for all that is learnt, or for all but the matrices of layers, and Muon for these.

    Muon gives every update of a matrix the same scale in all directions. Rows of an embedding or an output layer belong
    to tokens, which occur more or less often, so AdamW trains them.
    """
    learnt = [weight for weight in module.parameters() if weight.requires_grad]
    ends = [layer for layer in module.modules() if isinstance(layer, nn.Embedding)] + module.output_layers()
    of_tokens = {id(weight) for layer in ends for weight in layer.parameters()}
    matrices = [weight for weight in learnt if weight.ndim == 2 and id(weight) not in of_tokens]
    if settings.matrix_learning_rate is None or not matrices:
        return [torch.optim.AdamW(learnt, lr=settings.learning_rate, betas=_BETAS)]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in learnt if id(weight) not in chosen]
    return [
        torch.optim.AdamW(others, lr=settings.learning_rate, betas=_BETAS),
        torch.optim.Muon(matrices, lr=settings.matrix_learning_rate, weight_decay=_MUON_DECAY),
    ]


def grouped(texts: list[Tensor], batch_tokens: int) -> Iterator[list[Tensor]]:
    """Split texts of rising length into batches of at most ``batch_tokens`` positions, but of one text at least."""
    batch: list[Tensor] = []
    for text in texts:
        if batch and (len(batch) + 1) * len(text) > batch_tokens:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch
