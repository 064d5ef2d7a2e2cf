"""Updates of a SpecBlock drafter between the calls of an engine (Shi et al., arXiv 2605.07243).

A drafter that was trained on other texts than those that it drafts is accepted less often. ``OnlineUpdates`` trains it
on what the engine has generated. Outputs stay the same, because the target verifies every draft token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_fast.drafters.shared.checkpoint.writing import trained_weights
from specdec_fast.drafters.specblock.drafter import SpecBlockDrafter
from specdec_fast.drafters.specblock.training import load_blocks, save_blocks
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ConfigError, EngineBusyError
from specdec_fast.results import GenerationOutput
from specdec_fast.training.drafter_loss import Teacher, padded
from specdec_fast.training.specblock_loss import block_loss
from specdec_fast.training.trainer import LARGEST_GRADIENT, TrainingSettings, grouped, optimizers_of
from specdec_fast.training.update_bandit import HEAD, SKIP, UpdateBandit

_SHORTEST = 8  # tokens of a text that is learnt from
_LONGEST = 2048  # tokens at the end of a text that are learnt from


@dataclass(frozen=True)
class OnlineSettings:
    """How a drafter is updated; a value that is not positive is a ``ConfigError``."""

    learning_rate: float = 5e-5  # of AdamW, constant; the default suits drafters of the size of published ones
    matrix_learning_rate: float | None = None  # as in TrainingSettings
    time_share: float = 0.05  # of the seconds of all calls, the most that updates may take
    kept_tokens: int = 65_536  # of the newest outputs, how many are kept to learn from
    update_tokens: int = 8_192  # how many of these an update learns from
    batch_tokens: int = 2_048  # as in TrainingSettings
    tokens_ahead: int | None = None  # tokens that the engine will emit in all its calls; None: twice as many as so far

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value!r}; expected a positive number.")


@dataclass(frozen=True)
class Update:
    """What followed a call."""

    arm: str  # "skip", "head" (the output layer and the rank head were updated) or "full"
    tokens_per_step: float  # that a sequence emitted in a step of the call before it
    seconds: float  # of the update
    num_tokens: int  # that it learnt from


class OnlineUpdates:
    """Updates the SpecBlock drafter of an engine when its gain is expected to pay for the time.

        updates = OnlineUpdates(engine)
        for prompts in traffic:
            outputs = engine.generate(prompts)
            updates.observe(outputs)

    Args:
        engine: its drafter is a SpecBlock drafter. Nothing else may change the drafter's weights.
        settings: see ``OnlineSettings``.

    Attributes:
        module: the drafter as it is trained.
        bandit: decides what is updated.

    Raises:
        ConfigError: the engine has another drafter, or its target is sharded over processes.
    """

    def __init__(self, engine: Engine, settings: OnlineSettings | None = None) -> None:
        if not isinstance(engine.drafter, SpecBlockDrafter):
            raise ConfigError(
                f"the engine drafts with {engine.drafter.name!r}; only SpecBlock drafters are updated: pass "
                "draft='specblock:FOLDER' to the engine."
            )
        if engine.target.is_sharded:
            raise ConfigError(
                "the target is sharded over processes, and updates need whole weights; leave tp_size out."
            )
        self._engine = engine
        self._drafter = engine.drafter
        self.settings = OnlineSettings() if settings is None else settings
        self._target = _twin(engine.target.model)
        config = self._drafter.model.config
        self.module, self._maps = load_blocks(config.folder, self._target)
        self._draft_ids = self._drafter.model.target_ids
        self._teacher = Teacher(self._target, self._taps(), self._draft_ids)
        rates = {name: getattr(self.settings, name) for name in ("learning_rate", "matrix_learning_rate")}
        training = TrainingSettings(**rates)
        self._optimizers = optimizers_of(self.module, training)
        self._trained = [weight for weight in self.module.parameters() if weight.requires_grad]
        heads = (self.module.lm_head, self.module.rank_head)
        self._heads = {id(weight) for head in heads for weight in head.parameters()}
        self.bandit = UpdateBandit(self.settings.time_share)
        self._texts: deque[Tensor] = deque()

    def observe(self, outputs: Many[GenerationOutput]) -> Update:
        """Learn from the outputs of the engine's latest call, and update the drafter if that pays.

        Raises:
            EngineBusyError: a call of the engine is open.
        """
        if self._engine.core.has_work:
            raise EngineBusyError("a call of the engine is open; update the drafter when all have ended.")
        self._keep(outputs)
        steps = sum(output.stats.num_steps for output in outputs)
        if not steps:
            return Update(SKIP, 0.0, 0.0, 0)
        accepted = sum(output.stats.num_accepted_tokens for output in outputs)
        num_tokens = sum(len(output.token_ids) for output in outputs)
        self.bandit.observe(1 + accepted / steps, num_tokens, self._engine.last_run.seconds)
        ahead = self.settings.tokens_ahead
        seen = self.bandit.num_tokens
        arm = self.bandit.choose(seen if ahead is None else max(0, ahead - seen))
        if arm == SKIP or not self._texts:
            return Update(SKIP, self.bandit.tokens_per_step, 0.0, 0)
        started = perf_counter()
        learnt = self._train(arm, started + self.bandit.seconds_left)
        self._drafter.replace_weights(self._maps | trained_weights(self.module))
        seconds = perf_counter() - started
        self.bandit.updated(seconds)
        return Update(arm, self.bandit.tokens_per_step, seconds, learnt)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the drafter as it is now, as a checkpoint, into a folder that exists.

        Raises OutputError if a file cannot be written.
        """
        nodes = self._drafter.model.config.tree_nodes
        save_blocks(self.module, Path(folder), self._target, self._taps(), self._draft_ids, nodes)

    @property
    def num_kept_tokens(self) -> int:
        """The number of tokens that are kept to learn from."""
        return sum(map(len, self._texts))

    def _taps(self) -> tuple[int, ...]:
        return self._drafter.model.taps

    def _keep(self, outputs: Many[GenerationOutput]) -> None:
        for output in outputs:
            text = [*output.prompt_ids, *output.token_ids][-_LONGEST:]
            if len(text) >= _SHORTEST and output.error is None:
                self._texts.append(torch.tensor(text, device="cpu"))
        while self.num_kept_tokens > self.settings.kept_tokens and len(self._texts) > 1:
            self._texts.popleft()

    def _train(self, arm: str, deadline: float) -> int:
        """Learn from the newest texts, until the deadline; return the number of tokens."""
        for weight in self._trained:
            weight.requires_grad_(arm != HEAD or id(weight) in self._heads)
        chosen: list[Tensor] = []
        for text in reversed(self._texts):
            if chosen and sum(map(len, chosen)) + len(text) > self.settings.update_tokens:
                break
            chosen.append(text)
        learnt = 0
        for batch in grouped(sorted(chosen, key=len), self.settings.batch_tokens):
            if learnt and perf_counter() > deadline:
                break
            token_ids, lengths = padded(batch, self._target.device)
            output = self._teacher.output(token_ids, lengths)
            loss = block_loss(self.module, token_ids, output, min(self.module.num_slots, token_ids.shape[1] - 2))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._trained, LARGEST_GRADIENT)
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()
            learnt += sum(map(len, batch))
        for weight in self._trained:
            weight.requires_grad_(True)
        return learnt


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its weights and buffers.

    To return hidden states, transformers adds hooks to a model for good, and an engine refuses a model that got hooks.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return deepcopy(model, shared)
