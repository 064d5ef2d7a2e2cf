"""The forward of an EAGLE-3 drafter over flat rows and pages of its own (Li et al., arXiv 2503.01840, section 3.1).

A row belongs to a position i. It is made of the feature of position i and the embedding of the token at i + 1, and
chooses the token at i + 2.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm
from transformers.activations import ACT2FN

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.eagle3.checkpoint import PREFIXES, Eagle3Config, check_weights, read_config
from specdec_fast.drafters.shared.checkpoint.target import check_target, taps_of, target_embedding
from specdec_fast.drafters.shared.checkpoint.weights import placed, read_weights, target_ids
from specdec_fast.drafters.shared.layers import LayerWeights, RotaryTable, rotated
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.runner.ragged_model import RaggedModel


def load_eagle3(folder: Path, target: RaggedModel, tap_layers: tuple[int, ...] | None = None) -> Eagle3Model:
    """Load a checkpoint for one target, onto its device and in its dtype.

    Args:
        folder: raw (SafeAILab, SGLang) or ``speculators`` format.
        target: the model whose hidden states it reads; it must not have been made a part of several processes.
        tap_layers: its taps; None: those that the checkpoint names, or else the default ones.

    Raises:
        ConfigError: the folder cannot be read, or was made for another target; the message names the setting or weight.
        VocabularyMismatchError: it was made for another vocabulary.

    """
    config = read_config(folder)
    check_target(config, target)
    taps = taps_of(config, target, tap_layers)
    weights = read_weights(folder, PREFIXES)
    check_weights(config, len(taps), weights)
    return Eagle3Model(config, taps, weights, target)


class _Layer(LayerWeights):
    """The weights of one layer; the first one normalises features too."""

    def __init__(self, weights: dict[str, Tensor], index: int, window: int | None, head_dim: int) -> None:
        super().__init__(weights, index, window, head_dim)
        self.hidden_norm = weights.get(f"layers.{index}.hidden_norm.weight")


class Eagle3Model:
    """An EAGLE-3 drafter for one target.

    Args:
        config: of the checkpoint.
        taps: the taps that ``fc`` takes, in order.
        weights: from ``check_weights``.
        target: gives dtype, device, ops, and the embedding if the checkpoint has none of its own.

    Attributes:
        layout: shapes of its KV entries.
        target_ids: ``[draft_vocab_size]`` int64, the target's id of each draft id; None if they are the same.

    """

    def __init__(
        self, config: Eagle3Config, taps: tuple[int, ...], weights: dict[str, Tensor], target: RaggedModel
    ) -> None:
        self.config = config
        self.taps = taps
        layer = config.layer
        device = target.layout.device
        dtype = target.layout.dtype
        self._ops = target.ops.unchecked or target.ops
        self.ops = target.ops
        self.vocab_size = target.vocab_size
        ids = target_ids(config, weights)
        self.target_ids = None if ids is None else ids.to(device)
        own = placed(weights, dtype, device)
        self._embedding = own.get("embed_tokens.weight")
        if self._embedding is None:
            self._embedding = target_embedding(config, target)
        self._fc = own["fc.weight"]
        self._norm = own["norm.weight"]
        self._head = own["lm_head.weight"]
        self._input_norm = own.get("input_norm.weight")
        self._fc_norms = [own[f"fc_norm.{i}.weight"] for i in range(len(taps))] if config.fc_norm else None
        windows = enumerate(config.sliding_windows)
        self._layers = [_Layer(own, i, window, layer.head_dim) for i, window in windows]
        self._epsilon = layer.rms_norm_eps
        self._act = ACT2FN[layer.hidden_act]
        self._head_dim = layer.head_dim
        self.hidden_size = layer.hidden_size
        kv_heads = layer.num_key_value_heads
        self._heads = (layer.num_attention_heads, kv_heads, kv_heads)
        self.layout = KVLayout.uniform(layer.num_hidden_layers, kv_heads, layer.head_dim, dtype, device)
        self._rotary = RotaryTable(layer, dtype, device)
        self._is_recorded = False

    def weights(self) -> list[Tensor]:
        """Return all tensors that it keeps; the embedding may be the target's."""
        found = [self._embedding, self._fc, self._norm, self._head, self._input_norm, self.target_ids]
        found += [
            self._rotary.factors,
            *(self._fc_norms or ()),
            *(x for layer in self._layers for x in layer.tensors()),
        ]
        return [tensor for tensor in found if tensor is not None]

    @property
    def row_bytes(self) -> int:
        """Estimate the bytes per row of a forward, which PyTorch runs: its widest operands and the residual stream."""
        return (4 * self.hidden_size + 3 * self.config.layer.intermediate_size) * self.layout.dtype.itemsize

    def project(self, features: Tensor) -> Tensor:
        """Reduce the target's hidden states to one feature per row.

        Args:
            features: ``[T, taps, target's hidden size]``.

        Returns:
            ``[T, H]``.

        """
        features = features.to(self.layout.dtype)
        if self._fc_norms is not None:
            features = torch.stack(
                [self._normed(tap, norm) for tap, norm in zip(features.unbind(1), self._fc_norms, strict=True)], 1
            )
        rows = features.flatten(1)
        if self._input_norm is not None:
            rows = self._normed(rows, self._input_norm)
        return self._linear(rows, (self._fc, None))

    def forward(self, batch: RaggedBatch, pool: PagePool, hidden: Tensor) -> Tensor:
        """Compute rows, and write their KV entries.

        Args:
            batch: ``T`` rows; the token of a row at position i is that of position i + 1.
            pool: this drafter's pages.
            hidden: ``[T, H]``, a feature from ``project``, or the result for the row before.

        Returns:
            ``[T, H]``, the hidden state of each row, as the next row takes it.

        """
        cos, sin = self._factors_at(batch)
        embedded = embedding(batch.token_ids, self._embedding)  # type: ignore[arg-type]
        for index, layer in enumerate(self._layers):
            if index == 0:
                assert layer.hidden_norm is not None
                normed = self._normed(hidden, layer.hidden_norm)
                rows = torch.cat([self._normed(embedded, layer.input_norm), normed], dim=-1)
                hidden = normed if self.config.norm_before_residual else hidden
            else:
                rows = self._normed(hidden, layer.input_norm)
            hidden = hidden + self._attend(layer, index, rows, (cos, sin), batch, pool)
            gate, up = self._linear(self._normed(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + self._linear(self._act(gate) * up, layer.down)
        return self._normed(hidden, self._norm) if self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[N, draft_vocab_size]`` for results ``[N, H]`` of ``forward``."""
        normed = hidden if self.config.norm_output else self._normed(hidden, self._norm)
        return self._linear(normed, (self._head, None))

    def recorded_with(self, ops: Ops) -> Eagle3Model:
        """Return this model on ops that record; rotary factors are computed in every forward, because a table grows."""
        model = copy(self)
        model._ops = ops
        model._is_recorded = True
        return model

    def _attend(
        self,
        layer: _Layer,
        index: int,
        rows: Tensor,
        factors: tuple[Tensor, Tensor],
        batch: RaggedBatch,
        pool: PagePool,
    ) -> Tensor:
        sizes = [heads * self._head_dim for heads in self._heads]
        query, key, value = (
            part.unflatten(1, (-1, self._head_dim)) for part in self._linear(rows, layer.qkv).split(sizes, dim=1)
        )
        if layer.q_norm is not None:
            query = self._normed(query, layer.q_norm)
        if layer.k_norm is not None:
            key = self._normed(key, layer.k_norm)
        query = rotated(query, *factors)
        key = rotated(key, *factors)
        pages = pool.layers[index]
        self._ops.append_kv_(*pages, key, value, batch.slot_mapping)
        attended = self._ops.paged_attention(query, pages, batch, layer.attention)
        return self._linear(attended.flatten(1), layer.output)

    def _linear(self, rows: Tensor, weights: tuple[Tensor, Tensor | None]) -> Tensor:
        result: Tensor = self._ops.linear(rows, *weights)
        return result

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self._epsilon)

    def _factors_at(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for every row, ``[T, 1, head_dim]`` each."""
        if self._is_recorded:
            return self._rotary.computed(batch.positions)
        return self._rotary.at(batch.positions, batch.max_seqlen_k)
