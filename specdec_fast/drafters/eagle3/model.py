"""The forward of an EAGLE-3 drafter over flat rows and pages of its own (Li et al., arXiv 2503.01840, section 3.1).

A row belongs to a position i. It is made of the feature of position i and the embedding of the token at i + 1, and
chooses the token at i + 2.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.eagle3.checkpoint import PREFIXES, Eagle3Config, read_config, weight_table
from specdec_fast.drafters.shared.checkpoint.target import embedding_weight, fitting_taps
from specdec_fast.drafters.shared.checkpoint.weights import placed
from specdec_fast.drafters.shared.layers import LayeredModel, LayerWeights
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.program import RowFunction
from specdec_fast.runner.ragged_model import RaggedModel


def load_eagle3(folder: Path, target: RaggedModel, tap_layers: tuple[int, ...] | None = None) -> Eagle3Model:
    """Load a checkpoint, raw (SafeAILab, SGLang) or of ``speculators``, onto a target's device and in its dtype.

    Raises ``ConfigError`` or ``VocabularyMismatchError`` where the folder cannot be read or does not fit the target.
    """
    config = read_config(folder)
    taps = fitting_taps(config, target, tap_layers)
    return Eagle3Model(config, weight_table(config, len(taps)).read(folder, PREFIXES), target, taps)


class Eagle3Model(LayeredModel):
    """An EAGLE-3 drafter for one target, which gives the embedding if the checkpoint has none."""

    config: Eagle3Config

    def __init__(
        self, config: Eagle3Config, weights: dict[str, Tensor], target: RaggedModel, taps: tuple[int, ...]
    ) -> None:
        super().__init__(config, weights, target, taps)
        weights = placed(weights, self.layout.dtype, self.layout.device)
        self._embedding = embedding_weight(config, weights, target)
        self._fc = weights["fc.weight"]
        self._norm = weights["norm.weight"]
        self._head = weights["lm_head.weight"]
        self._input_norm = weights.get("input_norm.weight")
        self._fc_norms = [weights[f"fc_norm.{i}.weight"] for i in range(len(taps))] if config.fc_norm else None
        self._hidden_norm = weights["layers.0.hidden_norm.weight"]
        windows = enumerate(config.sliding_windows)
        self._layers = [LayerWeights(weights, i, window, self._head_dim) for i, window in windows]

    def project(self, features: Tensor) -> Tensor:
        """Reduce hidden states ``[T, taps, target's hidden size]`` to one feature per row, ``[T, H]``."""
        features = features.to(self.layout.dtype)
        if self._fc_norms is not None:
            taps = zip(features.unbind(1), self._fc_norms, strict=True)
            features = torch.stack([self._normed(tap, norm) for tap, norm in taps], 1)
        rows = features.flatten(1)
        if self._input_norm is not None:
            rows = self._normed(rows, self._input_norm)
        return self._linear(rows, (self._fc, None))

    def forward(self, batch: RaggedBatch, pool: PagePool, hidden: Tensor) -> Tensor:
        """Compute rows, and write their KV entries.

        The token of a row at position i is that of position i + 1. ``hidden [T, H]`` has a feature from ``project`` or
        the result for the row before. The result is the hidden state of each row, ``[T, H]``, as the next row takes it.
        """
        factors = self._factors_at(batch)
        first = self._layers[0]
        embedded = embedding(batch.token_ids, self._embedding)
        normed = self._normed(hidden, self._hidden_norm)
        rows = torch.cat([self._normed(embedded, first.input_norm), normed], dim=-1)
        hidden = normed if self.config.norm_before_residual else hidden
        hidden = self._with_mlp(first, hidden + self._attended(first, rows, factors, pool.layers[0], batch))
        for layer, pages in zip(self._layers[1:], pool.layers[1:], strict=True):
            hidden = self._layer(layer, hidden, factors, pages, batch)
        return self._normed(hidden, self._norm) if self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[N, draft_vocab_size]`` for results ``[N, H]`` of ``forward``."""
        normed = hidden if self.config.norm_output else self._normed(hidden, self._norm)
        return self._linear(normed, (self._head, None))

    def layers_function(self) -> RowFunction:
        """Return ``forward`` and ``logits`` as one function, for programs: a row takes what ``forward`` does."""

        def run(
            ops: Ops, pool: PagePool, batch: RaggedBatch, hidden: Tensor, wanted: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            model = self.on(ops)
            hidden = model.forward(batch, pool, hidden)
            return model.logits(hidden if wanted is None else hidden[wanted]), hidden

        return RowFunction(run, self.layout, self.hidden_size, self.hidden_size)

    def projection_function(self) -> RowFunction:
        """Return ``project`` as a function: a row takes the target's hidden states, and its logits are the feature."""

        def run(
            ops: Ops, pool: PagePool, batch: RaggedBatch, taps: Tensor, wanted: Tensor | None
        ) -> tuple[Tensor, None]:
            chosen = taps if wanted is None else taps[wanted]
            return self.on(ops).project(chosen.unflatten(1, (len(self.taps), -1))), None

        nothing = KVLayout((), (), self.layout.dtype, self.layout.device)
        return RowFunction(run, nothing, len(self.taps) * self.config.target_hidden_size)
