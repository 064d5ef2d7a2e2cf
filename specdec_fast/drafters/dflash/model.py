"""The forward of a DFlash drafter over flat rows and pages of its own (arXiv 2602.06036, section 4).

Every layer makes the keys and values of the context directly from the target's features, one per position. The rows of
a block are the newest token and masks. They attend to the whole context and to each other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm
from transformers.activations import ACT2FN

from specdec_fast.batch.ragged_batch import PagedBatch, RaggedBatch
from specdec_fast.drafters.dflash.checkpoint import DFlashConfig, check_weights, read_config
from specdec_fast.drafters.dflash.confidence_head import ConfidenceHead
from specdec_fast.drafters.dflash.markov_head import MarkovHead
from specdec_fast.drafters.shared.checkpoint.target import check_target, taps_of
from specdec_fast.drafters.shared.checkpoint.weights import placed, read_weights, target_ids
from specdec_fast.drafters.shared.layers import LayerWeights, RotaryTable, rotated
from specdec_fast.errors import ConfigError
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops.checks import stored
from specdec_fast.runner.ragged_model import RaggedModel


def load_dflash(folder: Path, target: RaggedModel, tap_layers: tuple[int, ...] | None = None) -> DFlashModel:
    """Load a checkpoint for one target, onto its device and in its dtype.

    Args:
        folder: in the format of z-lab, SGLang or DeepSpec, or in that of ``speculators``.
        target: the model whose hidden states it reads; it must not have been made a part of several processes.
        tap_layers: its taps; None: those that the checkpoint names.

    Raises:
        ConfigError: the folder cannot be read, or was made for another target; the message names the setting or weight.
        VocabularyMismatchError: it was made for another vocabulary.

    """
    config = read_config(folder)
    check_target(config, target)
    if tap_layers is None and config.tap_layers is None:
        raise ConfigError(f"{str(folder)!r} names no tap layers (target_layer_ids); pass tap_layers.")
    taps = taps_of(config, target, tap_layers)
    weights = read_weights(folder)
    check_weights(config, len(taps), weights)
    return DFlashModel(config, taps, weights, target)


class DFlashModel:
    """A DFlash or DSpark drafter for one target.

    Args:
        config: of the checkpoint.
        taps: the taps that ``fc`` takes, in order.
        weights: from ``check_weights``.
        target: gives dtype, device, ops, and embedding and output layer if the checkpoint has none of its own.

    Attributes:
        layout: shapes of its KV entries.
        target_ids: ``[draft_vocab_size]`` int64, the target's id of each draft id; None if they are the same.
        markov: DSpark's Markov head, or None.
        confidence: DSpark's confidence head, or None.

    """

    def __init__(
        self, config: DFlashConfig, taps: tuple[int, ...], weights: dict[str, Tensor], target: RaggedModel
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
        self._fc, self._hidden_norm, self._norm = (own[f"{name}.weight"] for name in ("fc", "hidden_norm", "norm"))
        self._embedding = own.get("embed_tokens.weight")
        if self._embedding is None:
            self._embedding = _shared(config, target.model.get_input_embeddings(), "embed_tokens")
        self._head: tuple[Tensor, Tensor | None] = (own.get("lm_head.weight"), None)  # type: ignore[assignment]
        if self._head[0] is None:
            layer_of_target = target.model.get_output_embeddings()
            bias = getattr(layer_of_target, "bias", None)
            self._head = _shared(config, layer_of_target, "lm_head"), None if bias is None else stored(bias.detach())
        self.markov = MarkovHead(config.markov_head_type, own, self._ops) if config.markov_rank else None
        with_markov = config.confidence_with_markov
        self.confidence = None if with_markov is None else ConfidenceHead(own, with_markov)
        windows = enumerate(config.sliding_windows)
        self._layers = [LayerWeights(own, i, window, layer.head_dim) for i, window in windows]
        self._epsilon = layer.rms_norm_eps
        self._act = ACT2FN[layer.hidden_act]
        kv_heads = layer.num_key_value_heads
        self._head_dim = layer.head_dim
        self.hidden_size = layer.hidden_size
        self._query_size = layer.num_attention_heads * self._head_dim
        self.layout = KVLayout.uniform(layer.num_hidden_layers, kv_heads, layer.head_dim, dtype, device)
        self._rotary = RotaryTable(layer, dtype, device)

    def weights(self) -> list[Tensor]:
        """Return all tensors that it keeps; embedding and output layer may be the target's."""
        found = [self._embedding, *self._head, self._fc, self._hidden_norm, self._norm, self.target_ids]
        found += [tensor for layer in self._layers for tensor in layer.tensors()]
        found.append(self._rotary.factors)
        found += [tensor for head in (self.markov, self.confidence) if head is not None for tensor in head.weights()]
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
        rows = features.to(self.layout.dtype).flatten(1)
        return self._normed(self._linear(rows, (self._fc, None)), self._hidden_norm)

    def write_context(self, batch: RaggedBatch, pool: PagePool, features: Tensor) -> None:
        """Write the KV entries of positions of the context.

        Args:
            batch: ``T`` rows; their tokens are not read.
            pool: this drafter's pages.
            features: ``[T, H]`` from ``project``.

        """
        cos, sin = self._rotary.at(batch.positions, batch.max_seqlen_k)
        for layer, pages in zip(self._layers, pool.layers, strict=True):
            weight, bias = layer.qkv
            rows = self._linear(
                features, (weight[self._query_size :], bias if bias is None else bias[self._query_size :])
            )
            key, value = rows.unflatten(1, (2, -1, self._head_dim)).unbind(1)
            key = rotated(self._normed(key, layer.k_norm), cos, sin)
            self._ops.append_kv_(*pages, key, value, batch.slot_mapping)

    def forward(self, batch: RaggedBatch, pool: PagePool) -> Tensor:
        """Compute blocks; their KV entries stand behind those of the context, until the context grows over them.

        Args:
            batch: ``T`` rows: of each sequence its newest token, at its position, and masks behind it.
            pool: this drafter's pages, with the entries of all earlier positions.

        Returns:
            ``[T, H]``, the hidden state of each row after the last norm.

        """
        factors = self._rotary.at(batch.positions, batch.max_seqlen_k)
        blocks = batch.seeing_all_rows()
        hidden = embedding(batch.token_ids, self._embedding)  # type: ignore[arg-type]
        if self.config.embedding_scale != 1:
            hidden = hidden * self.config.embedding_scale
        for layer, pages, is_causal in zip(self._layers, pool.layers, self.config.causal, strict=True):
            rows = self._normed(hidden, layer.input_norm)
            query = self._appended(layer, rows, factors, pages, batch.slot_mapping)
            seen: PagedBatch = batch if is_causal else blocks
            attended = self._ops.paged_attention(query, pages, seen, layer.attention)
            hidden = hidden + self._linear(attended.flatten(1), layer.output)
            gate, up = self._linear(self._normed(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + self._linear(self._act(gate) * up, layer.down)
        return self._normed(hidden, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[N, draft_vocab_size]`` for results ``[N, H]`` of ``forward``, without the Markov head."""
        logits = self._linear(hidden, self._head)
        config = self.config
        if config.output_scale != 1:
            logits = logits * config.output_scale
        return logits if config.softcap is None else config.softcap * torch.tanh(logits / config.softcap)

    def _appended(
        self,
        layer: LayerWeights,
        rows: Tensor,
        factors: tuple[Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        """Write keys and values of rows; return their queries ``[T, heads, head_dim]``."""
        states = self._linear(rows, layer.qkv).unflatten(1, (-1, self._head_dim))
        num_queries = self._query_size // self._head_dim
        kv_heads = self.config.layer.num_key_value_heads
        query, key, value = states.split([num_queries, kv_heads, kv_heads], dim=1)
        query = self._normed(query, layer.q_norm)
        key = self._normed(key, layer.k_norm)
        self._ops.append_kv_(*pages, rotated(key, *factors), value, slots)
        return rotated(query, *factors)

    def _linear(self, rows: Tensor, weights: tuple[Tensor, Tensor | None]) -> Tensor:
        result: Tensor = self._ops.linear(rows, *weights)
        return result

    def _normed(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return rms_norm(rows, weight.shape, weight, self._epsilon)


def _shared(config: DFlashConfig, layer: nn.Module | None, name: str) -> Tensor:
    """Return the target's weight ``[vocab_size, H]`` of a layer that the checkpoint lacks."""
    weight = getattr(layer, "weight", None)
    expected = (config.layer.vocab_size, config.layer.hidden_size)
    if not isinstance(weight, Tensor) or tuple(weight.shape) != expected or not weight.is_floating_point():
        kind = list(weight.shape) if isinstance(weight, Tensor) else type(layer).__name__
        raise ConfigError(
            f"{str(config.folder)!r} has no {name}, and the target's is {kind}; expected {list(expected)}. Take a "
            "complete checkpoint, or one that was trained for this target."
        )
    return stored(weight.detach()).contiguous()
