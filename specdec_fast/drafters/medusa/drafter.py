"""The ``"medusa"`` drafter: heads that predict several tokens from one hidden state (Cai et al., arXiv 2401.10774).

Head i reads the input of the target's output layer at the row that chose a sequence's newest token, and predicts the
token i + 1 positions behind the newest one. All heads read the same row, so the drafter keeps one hidden state per
sequence and no KV entries. The likeliest tokens of every head are the nodes of a static tree (``trees/static.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from specdec_fast.batch.sampling_batch import sampling_of
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import DrafterContext, StepResult
from specdec_fast.drafters.medusa.checkpoint import Head, MedusaWeights, read_heads
from specdec_fast.drafters.shared.checkpoint.settings import Settings
from specdec_fast.drafters.shared.heads import HeadsDrafter, ranked_tokens
from specdec_fast.drafters.shared.ranked import masked_logits
from specdec_fast.errors import VocabularyMismatchError
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.token_masks import UNREAD
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.trees.static import checked_choices, fit_tree

_DEFAULT_NODES = 16
# Hit rates by depth and rank of three heads for the bundled target (docs/performance.md, "Trees of Medusa").
_RECORDED: tuple[tuple[float, ...], ...] = (
    (0.565, 0.079, 0.043, 0.031, 0.024, 0.02, 0.017, 0.013, 0.01, 0.011),
    (0.593, 0.085, 0.047, 0.032, 0.026, 0.021, 0.017, 0.016, 0.015, 0.013),
    (0.617, 0.087, 0.051, 0.036, 0.027, 0.02, 0.02, 0.016, 0.012, 0.012),
)


class MedusaDrafter(HeadsDrafter):
    """Proposes a tree of what heads predict that all read the same hidden state, or a chain.

    Raises:
        ConfigError, VocabularyMismatchError: the checkpoint cannot be read, or was made for another target.
    """

    knows_prefixes = True

    def __init__(self, context: DrafterContext, folder: str) -> None:
        self._folder = folder
        target = context.target
        weights = read_heads(Path(folder), target.hf.config.hidden_size)
        self._target_ids = _checked_ids(weights, target, folder)
        self._heads = tuple(_placed(head, target) for head in weights.heads)
        self._ops = target.ops
        self._unchecked = target.ops.without_checks
        self._vocab_size = target.vocab_size
        self._hidden_size = target.hf.config.hidden_size
        self._device = context.device
        self._itemsize = target.layout.dtype.itemsize
        wanted = context.config.draft_tree
        choices = self._choices(wanted if isinstance(wanted, int) else _DEFAULT_NODES)
        self._set_tree(context, choices, len(self._heads), len(weights.heads[0].output))
        self._places = [sum(self.tree.num_ranks[:depth]) for depth in range(len(self.tree.num_ranks))]
        self._hidden: dict[Sequence, Tensor] = {}  # the one that chose the newest token, [H]

    @property
    def name(self) -> str:
        return f"medusa:{self._folder}"

    @property
    def num_kept_rows(self) -> int:
        """The number of hidden states in memory, one per sequence."""
        return len(self._hidden)

    def weights(self) -> Iterable[Tensor]:
        for head in self._heads:
            yield head.output
            yield from (part for block in head.blocks for part in block if part is not None)

    @property
    def estimates_memory(self) -> bool:  # PyTorch runs its heads
        return True

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        # Its hidden states, and the logits of one head, in several copies where tokens are ranked by noise.
        return num_sequences * (4 * self._hidden_size + 3 * self._vocab_size) * self._itemsize

    def prepare(self, num_tokens: int, page_size: int) -> None:
        self._hidden.clear()

    def known_positions(self, sequence: Sequence) -> int:
        return sequence.length  # a proposal reads the hidden state of one position, the last before the newest

    def observe(self, sequences: list[Sequence], positions: list[range], features: Tensor) -> None:
        end = 0
        for sequence, computed in zip(sequences, positions, strict=True):
            end += len(computed)
            self._hidden[sequence] = features[end - 1, 0].clone()

    def commit(self, sequences: list[Sequence], result: StepResult) -> None:
        if sequences and result.hidden_states is not None:
            rows = to_device([accepted[-1] for accepted in result.accepted_rows], self._device)
            newest = result.hidden_states[rows, 0]  # a copy
            self._hidden |= zip(sequences, newest, strict=True)

    def release(self, sequence: Sequence) -> None:
        self._hidden.pop(sequence, None)

    def _ranked(self, sequences: list[Sequence], depth: int) -> Tensor:
        hidden = torch.stack([self._hidden[sequence] for sequence in sequences]).to(self._heads[0].output.dtype)
        sampling = sampling_of(sequences, self._device)
        newest = None if sampling is None else to_device([s.token_ids[-1] for s in sequences], self._device)
        columns = []
        for ahead, head in enumerate(self._heads[:depth]):
            later = sampling and replace(sampling, positions=sampling.positions + ahead)
            logits = self._logits(head, hidden)
            logits = masked_logits(logits, sequences, [[UNREAD] * ahead] * len(sequences), self._target_ids)
            num_ranks = self.tree.num_ranks[ahead]
            ids = self._target_ids
            columns.append(ranked_tokens(self._ops, logits, num_ranks, later, newest, ids, self._vocab_size))
        return torch.cat(columns, dim=1)

    def _picked(self, depth: int, num_nodes: int) -> tuple[list[int], list[int]]:
        shape = self.tree.within(depth, num_nodes)
        return [self._places[d] + rank for d, rank in zip(shape.depths, shape.ranks, strict=True)], shape.parents

    def _logits(self, head: Head, rows: Tensor) -> Tensor:
        """Return ``[N, draft_vocab_size]`` for hidden states ``[N, H]``."""
        linear = self._unchecked.linear
        for weight, bias in head.blocks:
            rows = rows + silu(linear(rows, weight, bias))
        logits: Tensor = linear(rows, head.output, None)
        return logits

    def _choices(self, num_nodes: int) -> tuple[tuple[int, ...], ...]:
        """Return the tree of the checkpoint, or else one for the recorded hit rates."""
        named = Settings.read_if_any(Path(self._folder)).get("medusa_choices")
        if named is not None:
            return checked_choices(named, f"medusa_choices of {self._folder!r}")
        rates = [_RECORDED[min(depth, len(_RECORDED) - 1)] for depth in range(len(self._heads))]
        return tuple(fit_tree(rates, num_nodes))


def _placed(head: Head, target: RaggedModel) -> Head:
    device = target.layout.device
    dtype = target.layout.dtype

    def placed(weight: Tensor) -> Tensor:
        return weight.to(device, dtype).contiguous()

    blocks = tuple((placed(weight), None if bias is None else placed(bias)) for weight, bias in head.blocks)
    return Head(blocks, placed(head.output))


def _checked_ids(weights: MedusaWeights, target: RaggedModel, folder: str) -> Tensor | None:
    """Return the target's id of each draft id, on its device; None if they are the same.

    Raises:
        VocabularyMismatchError: the heads were trained for another number of ids.
    """
    ids = weights.target_ids
    size = len(weights.heads[0].output)
    if ids is None and size != target.vocab_size:
        raise VocabularyMismatchError(
            f"the heads in {folder!r} know {size} ids, target {target.name} has {target.vocab_size}; pass heads that "
            "were trained for this target."
        )
    if ids is not None and (int(ids.max()) >= target.vocab_size or int(ids.min()) < 0 or len(ids.unique()) < len(ids)):
        raise VocabularyMismatchError(
            f"token_map in {folder!r} names {len(ids.unique())} different ids up to {int(ids.max())} for {len(ids)} "
            f"rows; expected different ids below the {target.vocab_size} of {target.name}."
        )
    return None if ids is None else ids.to(target.layout.device)
