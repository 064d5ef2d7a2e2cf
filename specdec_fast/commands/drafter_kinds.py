"""The kinds of drafters that ``train-drafter`` trains: what each starts from, and what it writes."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_fast.drafters.clover.training import new_clover, save_clover
from specdec_fast.drafters.dflash.training import BlockSize, new_dflash, save_dflash
from specdec_fast.drafters.eagle3.training import new_module, save_drafter
from specdec_fast.drafters.medusa.training import new_heads, save_heads
from specdec_fast.drafters.shared.new_drafter import DrafterSize
from specdec_fast.drafters.shared.trainable import DrafterModule
from specdec_fast.drafters.specblock.checkpoint import NUM_FEATURES
from specdec_fast.drafters.specblock.training import NUM_SLOTS, new_blocks, save_blocks
from specdec_fast.errors import ConfigError
from specdec_fast.training.drafter_loss import Teacher, loss_of
from specdec_fast.training.dspark_loss import confidence_report, dspark_loss
from specdec_fast.training.hit_counts import hit_counts
from specdec_fast.training.specblock_loss import block_loss
from specdec_fast.training.texts import Texts, frequent_ids, rarest_id
from specdec_fast.training.trainer import Loss, Trainer, TrainingSettings
from specdec_fast.trees.static import MOST_NODES, fit_tree

_SIZES = ("hidden_size", "ffn_size", "tap_layers", "draft_vocab_size")
_NUM_HEADS = 3
_TREE_NODES = 16
_MOST_RANKS = 10


class DrafterKind(ABC):
    """One kind of drafter, from the options of one call; ConfigError if they do not fit the kind or the target."""

    options: tuple[str, ...] = ()
    loss: Loss = staticmethod(loss_of)

    def __init__(self, args: argparse.Namespace, target: PreTrainedModel) -> None:
        names = {name for kind in KINDS.values() for name in kind.options} - set(self.options)
        if foreign := sorted(name for name in names if getattr(args, name) is not None):
            raise ConfigError(f"--{foreign[0].replace('_', '-')} is no option of --kind {args.kind}; leave it out.")
        self._target = target
        self._config = target.config.get_text_config(decoder=True)

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """The number of tokens in a row that are trained."""

    @abstractmethod
    def start(self, texts: Texts) -> tuple[DrafterModule, Teacher]:
        """Return the module before its training, and what it learns from."""

    @abstractmethod
    def save(self, trainer: Trainer, held_out: list[Tensor], folder: Path) -> dict[str, Any]:
        """Write the checkpoint; return further entries of the report."""


class Eagle3Kind(DrafterKind):
    """EAGLE-3: one layer, or several, over three taps."""

    options: tuple[str, ...] = (*_SIZES, "num_layers")
    num_steps = TrainingSettings.num_steps
    begin: Callable[..., Any] = staticmethod(new_module)

    def __init__(self, args: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(args, target)
        self._size = DrafterSize(
            args.hidden_size, args.ffn_size, args.tap_layers, args.draft_vocab_size, args.num_layers or 1
        )
        self._taps = self._size.taps(self._config.num_hidden_layers)
        self._draft_ids: Tensor | None = None

    def start(self, texts: Texts) -> tuple[DrafterModule, Teacher]:
        size = self._size.draft_vocab_size
        vocab_size = self._config.vocab_size
        ids = frequent_ids(texts, vocab_size, size)
        self._draft_ids = None if ids is None else ids.to(self._target.device)
        self._module = self.begin(self._target, self._size, size or vocab_size, self._draft_ids)
        return self._module, Teacher(self._target, self._taps, self._draft_ids)

    def save(self, trainer: Trainer, held_out: list[Tensor], folder: Path) -> dict[str, Any]:
        save_drafter(self._module, folder, self._target, self._taps, self._draft_ids)
        return {}


class SpecBlockKind(Eagle3Kind):
    """SpecBlock: blocks of four slots over three taps, of the sizes of an EAGLE-3 drafter."""

    options = (*_SIZES, "tree_nodes")
    loss = staticmethod(block_loss)
    num_steps = NUM_SLOTS
    begin = staticmethod(new_blocks)

    def __init__(self, args: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(args, target)
        self._num_nodes = _tree_nodes(args)
        num_ids = self._size.draft_vocab_size or self._config.vocab_size
        if num_ids < NUM_FEATURES:
            raise ConfigError(
                f"a SpecBlock drafter of {num_ids} ids: its rank head reads the logits of {NUM_FEATURES}; pass a "
                f"--draft-vocab-size of {NUM_FEATURES} or more, for a target with at least as many ids."
            )

    def save(self, trainer: Trainer, held_out: list[Tensor], folder: Path) -> dict[str, Any]:
        """Write the weights, and the configuration that ``specblock/checkpoint.py`` reads."""
        save_blocks(self._module, folder, self._target, self._taps, self._draft_ids, self._num_nodes)
        return {}


class _HeadsKind(DrafterKind):
    """Heads over the input of the target's output layer, and a tree that is fitted to them."""

    options = ("num_heads", "tree_nodes")
    tree_nodes = _TREE_NODES  # by default

    def __init__(self, args: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(args, target)
        self._num_heads = args.num_heads or _NUM_HEADS
        self._num_nodes = _tree_nodes(args, self.tree_nodes)

    @property
    def num_steps(self) -> int:
        return self._num_heads

    def _teacher(self) -> Teacher:
        """Return the target with the last entry of its hidden states, which is what its output layer reads."""
        return Teacher(self._target, (self._config.num_hidden_layers,), None)

    def _fitted(self, trainer: Trainer, held_out: list[Tensor]) -> tuple[list[list[float]], list[list[int]]]:
        shape = [self._num_heads, min(_MOST_RANKS, self._config.vocab_size)]
        counts = torch.zeros(shape[0], 1 + shape[1], dtype=torch.int64, device="cpu")
        for token_ids, lengths, output in trainer.teacher_outputs(held_out):
            counts += hit_counts(trainer.module, output.features, token_ids, lengths, shape)
        rates = [[round(n / max(1, of_depth[0]), 4) for n in of_depth[1:]] for of_depth in counts.tolist()]
        return rates, [list(path) for path in fit_tree(rates, self._num_nodes)] or [[0]]


class MedusaKind(_HeadsKind):
    """Medusa: heads that all read the same hidden state."""

    def start(self, texts: Texts) -> tuple[DrafterModule, Teacher]:
        self._module = new_heads(self._target, self._num_heads)
        return self._module, self._teacher()

    def save(self, trainer: Trainer, held_out: list[Tensor], folder: Path) -> dict[str, Any]:
        rates, choices = self._fitted(trainer, held_out)
        save_heads(self._module, folder, choices)
        return {"hit_rates": rates, "choices": choices}


class CloverKind(_HeadsKind):
    """Clover: a layer like the target's, and heads in sequence."""

    tree_nodes = 4

    def start(self, texts: Texts) -> tuple[DrafterModule, Teacher]:
        self._module = new_clover(self._target, self._num_heads)
        return self._module, self._teacher()

    def save(self, trainer: Trainer, held_out: list[Tensor], folder: Path) -> dict[str, Any]:
        rates, choices = self._fitted(trainer, held_out)
        save_clover(self._module, folder, choices)
        return {"hit_rates": rates, "choices": choices}


class DFlashKind(DrafterKind):
    """DFlash: blocks over taps, as wide as the target; with a Markov head and a confidence head DSpark."""

    options = ("num_layers", "block_size", "markov_rank", "ffn_size", "tap_layers")

    def __init__(self, args: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(args, target)
        default = BlockSize()
        self._block = BlockSize(
            args.num_layers or default.num_layers, args.block_size or default.block_size, args.markov_rank or 0
        )
        if self._block.block_size < 2:
            raise ConfigError("--block-size 1: expected at least 2 rows, the newest token and a mask.")
        self._size = DrafterSize(ffn_size=args.ffn_size, tap_layers=args.tap_layers)
        self._taps = self._size.taps(self._config.num_hidden_layers)
        if self._block.markov_rank:
            self.loss = dspark_loss

    @property
    def num_steps(self) -> int:
        return self._block.block_size - (not self._block.markov_rank)

    def start(self, texts: Texts) -> tuple[DrafterModule, Teacher]:
        mask = rarest_id(texts, self._config.vocab_size)
        self._module = new_dflash(self._target, self._size, self._block, mask)
        return self._module, Teacher(self._target, self._taps, None)

    def save(self, trainer: Trainer, held_out: list[Tensor], folder: Path) -> dict[str, Any]:
        save_dflash(self._module, folder, self._target, self._taps)
        if not self._block.markov_rank:
            return {}
        total = torch.zeros(self.num_steps, 4, dtype=torch.float64, device="cpu")
        for token_ids, _, output in trainer.teacher_outputs(held_out):
            hits = confidence_report(self._module, token_ids, output, min(self.num_steps, token_ids.shape[1] - 2))
            total[: len(hits)] += hits
        names = ("estimated", "accepted", "squared_error")
        means = total[:, :3] / total[:, 3:].clamp(min=1)
        return {"confidence": [dict(zip(names, step, strict=True)) for step in means.tolist()]}


def _tree_nodes(args: argparse.Namespace, default: int = _TREE_NODES) -> int:
    num_nodes: int = args.tree_nodes or default
    if num_nodes > MOST_NODES:
        raise ConfigError(f"--tree-nodes {num_nodes}: expected at most {MOST_NODES}.")
    return num_nodes


KINDS: dict[str, type[DrafterKind]] = {
    "eagle3": Eagle3Kind,
    "medusa": MedusaKind,
    "clover": CloverKind,
    "specblock": SpecBlockKind,
    "dflash": DFlashKind,
}
