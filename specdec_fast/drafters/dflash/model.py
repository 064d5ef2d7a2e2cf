"""The forward of a DFlash drafter over flat rows and pages of its own (arXiv 2602.06036, section 4).

Every layer makes the keys and values of the context directly from the target's features, one per position. The rows of
a block are the newest token and masks. They attend to the whole context and to each other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.dflash.checkpoint import DFlashConfig, read_config, weight_table
from specdec_fast.drafters.dflash.heads import ConfidenceHead, MarkovHead
from specdec_fast.drafters.shared.checkpoint.target import (
    embedding_weight,
    fitting_taps,
    output_layer_of,
    weight_or_targets,
)
from specdec_fast.drafters.shared.checkpoint.weights import placed
from specdec_fast.drafters.shared.layers import LayeredModel, LayerWeights, WeightAndBias, rotated
from specdec_fast.errors import ConfigError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops.checks import stored
from specdec_fast.runner.ragged_model import RaggedModel


def load_dflash(folder: Path, target: RaggedModel, tap_layers: tuple[int, ...] | None = None) -> DFlashModel:
    """Load a checkpoint (of z-lab, SGLang, DeepSpec or ``speculators``) onto a target's device and in its dtype.

    Raises ``ConfigError`` or ``VocabularyMismatchError`` where the folder cannot be read or does not fit the target.
    """
    config = read_config(folder)
    if tap_layers is None and config.tap_layers is None:
        raise ConfigError(f"{str(folder)!r} names no tap layers (target_layer_ids); pass tap_layers.")
    taps = fitting_taps(config, target, tap_layers)
    return DFlashModel(config, weight_table(config, len(taps)).read(folder), target, taps)


class DFlashModel(LayeredModel):
    """A DFlash or DSpark drafter for one target, which gives embedding and output layer if the checkpoint has none."""

    config: DFlashConfig

    def __init__(
        self, config: DFlashConfig, weights: dict[str, Tensor], target: RaggedModel, taps: tuple[int, ...]
    ) -> None:
        super().__init__(config, weights, target, taps)
        weights = placed(weights, self.layout.dtype, self.layout.device)
        self._fc = weights["fc.weight"]
        self._hidden_norm = weights["hidden_norm.weight"]
        self._norm = weights["norm.weight"]
        self._embedding = embedding_weight(config, weights, target)
        output = None if "lm_head.weight" in weights else output_layer_of(target)
        bias = getattr(output, "bias", None)
        head = weight_or_targets(config, weights, "lm_head", output)
        self._head: WeightAndBias = (head, None if bias is None else stored(bias.detach()))
        self.markov = MarkovHead(config.markov_head_type, weights, self._ops) if config.markov_rank else None
        with_markov = config.confidence_with_markov
        self.confidence = None if with_markov is None else ConfidenceHead(weights, with_markov)
        windows = enumerate(config.sliding_windows)
        self._layers = [LayerWeights(weights, i, window, self._head_dim) for i, window in windows]

    def project(self, features: Tensor) -> Tensor:
        """Reduce hidden states ``[T, taps, target's hidden size]`` to one feature per row, ``[T, H]``."""
        rows = features.to(self.layout.dtype).flatten(1)
        return self._normed(self._linear(rows, (self._fc, None)), self._hidden_norm)

    def write_context(self, batch: RaggedBatch, pool: PagePool, features: Tensor) -> None:
        """Write the KV entries of positions of the context for their ``features [T, H]``; tokens are not read."""
        factors = self._factors_at(batch)
        query_size = self._sizes[0]
        for layer, pages in zip(self._layers, pool.layers, strict=True):
            assert layer.k_norm is not None
            weight, bias = layer.qkv
            rows = self._linear(features, (weight[query_size:], None if bias is None else bias[query_size:]))
            key, value = rows.unflatten(1, (2, -1, self._head_dim)).unbind(1)
            key = rotated(self._normed(key, layer.k_norm), *factors)
            self._ops.append_kv_(*pages, key, value, batch.slot_mapping)

    def forward(self, batch: RaggedBatch, pool: PagePool) -> Tensor:
        """Compute blocks; their KV entries stand behind those of the context, until the context grows over them.

        The ``T`` rows are each sequence's newest token, at its position, and masks behind it; the pool has the entries
        of all earlier positions. The result is ``[T, H]``, the hidden state of each row after the last norm.
        """
        factors = self._factors_at(batch)
        blocks = batch.seeing_all_rows()
        hidden = embedding(batch.token_ids, self._embedding)
        if self.config.embedding_scale != 1:
            hidden = hidden * self.config.embedding_scale
        for layer, pages, is_causal in zip(self._layers, pool.layers, self.config.causal, strict=True):
            hidden = self._layer(layer, hidden, factors, pages, batch, None if is_causal else blocks)
        return self._normed(hidden, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[N, draft_vocab_size]`` for results ``[N, H]`` of ``forward``, without the Markov head."""
        logits = self._linear(hidden, self._head)
        config = self.config
        if config.output_scale != 1:
            logits = logits * config.output_scale
        return logits if config.softcap is None else config.softcap * torch.tanh(logits / config.softcap)
