"""The parts of a drafter's transformer layers, as Llama and Qwen3 have them, on flat rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch, RaggedBatch
from specdec_fast.drafters.shared.checkpoint.settings import LayerConfig
from specdec_fast.drafters.shared.checkpoint.weights import target_ids
from specdec_fast.errors import ConfigError
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.ops import Ops
from specdec_fast.runner.ragged_model import RaggedModel

WeightAndBias = tuple[Tensor, Tensor | None]  # ``[out, in]`` and ``[out]``
Factors = tuple[Tensor, Tensor]  # cosine and sine
LayerPages = tuple[Tensor, Tensor]  # keys and values
_Model = TypeVar("_Model", bound="LayeredModel")
_FIRST_POSITIONS = 512  # of the table of rotary factors; it is doubled as needed


class Weights:
    """An object that keeps weights: as attributes, in lists and tuples, and in further objects that do."""

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        return list(_tensors_in(vars(self).values()))


class LayerWeights(Weights):
    """The weights of one layer, those with the same input joined to one matrix.

    ``window`` is the number of positions that a row sees; None: all.
    """

    def __init__(self, weights: dict[str, Tensor], index: int, window: int | None, head_dim: int) -> None:
        of_layer = without_prefix(weights, f"layers.{index}.")
        self.input_norm = of_layer["input_layernorm.weight"]
        self.mlp_norm = of_layer["post_attention_layernorm.weight"]
        self.q_norm = of_layer.get("self_attn.q_norm.weight")
        self.k_norm = of_layer.get("self_attn.k_norm.weight")
        self.qkv = joined(of_layer, [f"self_attn.{name}_proj" for name in "qkv"])
        self.output = joined(of_layer, ["self_attn.o_proj"])
        self.gate_up = joined(of_layer, ["mlp.gate_proj", "mlp.up_proj"])
        self.down = joined(of_layer, ["mlp.down_proj"])
        self.attention = AttentionParams(head_dim**-0.5, sliding_window=window)


class LayeredModel(Weights):
    """What the models of drafters share that are made of transformer layers, on flat rows and pages.

    Args:
        config: of the checkpoint.
        weights: of the checkpoint, checked.
        target: gives dtype, device and ops, and what the checkpoint shares with it.
        taps: those that the checkpoint takes, in order; none if it reads the input of the target's output layer.

    Attributes:
        layout: shapes of its KV entries.
        target_ids: ``[draft_vocab_size]`` int64, the target's id of each draft id; None if they are the same.
    """

    config: LayerConfig

    def __init__(
        self, config: LayerConfig, weights: dict[str, Tensor], target: RaggedModel, taps: tuple[int, ...] = ()
    ) -> None:
        layer = config.layer
        device = target.layout.device
        dtype = target.layout.dtype
        self.config = config
        self.taps = taps
        self.ops = target.ops
        self.vocab_size = target.vocab_size
        self.hidden_size = layer.hidden_size
        ids = target_ids(config, weights)
        self.target_ids = None if ids is None else ids.to(device)
        kv_heads = layer.num_key_value_heads
        self.layout = KVLayout.uniform(len(config.sliding_windows), kv_heads, layer.head_dim, dtype, device)
        self._ops = target.ops.without_checks
        self._head_dim = layer.head_dim
        self._sizes = [heads * layer.head_dim for heads in (layer.num_attention_heads, kv_heads, kv_heads)]
        self._epsilon = layer.rms_norm_eps
        self._act = ACT2FN[layer.hidden_act]
        self._rotary = RotaryTable(layer, dtype, device)
        self._is_recorded = False

    def weights(self) -> list[Tensor]:
        """Return all tensors that it keeps; some may be the target's."""
        return [*self.tensors(), self._rotary.factors]

    @property
    def row_bytes(self) -> int:
        """Estimate the bytes per row of a forward, which PyTorch runs: its widest operands and the residual stream."""
        return (4 * self.hidden_size + 3 * self.config.layer.intermediate_size) * self.layout.dtype.itemsize

    def on(self: _Model, ops: Ops) -> _Model:
        """Return this model, or for ops that record a copy that computes rotary factors anew, because a table grows."""
        if ops is self.ops:
            return self
        model = copy(self)
        model._ops = ops
        model._is_recorded = True
        return model

    def _layer(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        factors: Factors,
        pages: LayerPages,
        batch: RaggedBatch,
        seen: PagedBatch | None = None,
    ) -> Tensor:
        """Compute a pre-norm transformer layer for rows ``[T, H]``; the arguments are those of ``_attended``."""
        rows = self._normed(hidden, layer.input_norm)
        return self._with_mlp(layer, hidden + self._attended(layer, rows, factors, pages, batch, seen))

    def _attended(
        self,
        layer: LayerWeights,
        rows: Tensor,
        factors: Factors,
        pages: LayerPages,
        batch: RaggedBatch,
        seen: PagedBatch | None = None,
    ) -> Tensor:
        """Write the keys and values of ``T`` rows, and attend.

        Args:
            layer: its weights.
            rows: ``[T, size]``, what queries, keys and values are made of.
            factors: cosine and sine for every row, ``[T, 1, head_dim]`` each.
            pages: keys and values of the layer.
            batch: the rows.
            seen: what they attend to; None: as ``batch`` says.

        Returns:
            ``[T, H]``.
        """
        parts = self._linear(rows, layer.qkv).split(self._sizes, dim=1)
        query, key, value = (part.unflatten(1, (-1, self._head_dim)) for part in parts)
        if layer.q_norm is not None:
            query = self._normed(query, layer.q_norm)
        if layer.k_norm is not None:
            key = self._normed(key, layer.k_norm)
        self._ops.append_kv_(*pages, rotated(key, *factors), value, batch.slot_mapping)
        query = rotated(query, *factors)
        attended = self._ops.paged_attention(query, pages, batch if seen is None else seen, layer.attention)
        return self._linear(attended.flatten(1), layer.output)

    def _with_mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = self._linear(self._normed(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return hidden + self._linear(self._act(gate) * up, layer.down)

    def _linear(self, rows: Tensor, weights: WeightAndBias) -> Tensor:
        result: Tensor = self._ops.linear(rows, *weights)
        return result

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self._epsilon)

    def _factors_at(self, batch: RaggedBatch) -> Factors:
        if self._is_recorded:
            return self._rotary.computed(batch.positions)
        return self._rotary.at(batch.positions, batch.max_seqlen_k)


def without_prefix(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def joined(weights: dict[str, Tensor], names: list[str]) -> WeightAndBias:
    """Return weight ``[out, in]`` and bias ``[out]`` or None of several linears with the same input, as one."""
    matrices = [weights[f"{name}.weight"] for name in names]
    biases = [weights.get(f"{name}.bias") for name in names]
    if all(bias is None for bias in biases):
        return torch.cat(matrices), None
    filled = [m.new_zeros(len(m)) if bias is None else bias for m, bias in zip(matrices, biases, strict=True)]
    return torch.cat(matrices), torch.cat(filled)


def rotary_embedding(layer: LlamaConfig, device: torch.device) -> LlamaRotaryEmbedding:
    """Return the rotary embedding of a layer; it is computed on the CPU, whatever the caller's default device.

    Raises:
        ConfigError: its parameters give no finite frequencies.
    """
    try:
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(layer)
        is_finite = bool(rotary.inv_freq.isfinite().all()) and isfinite(rotary.attention_scaling)
    except Exception as error:  # transformers computes with the parameters as they are
        raise ConfigError(f"cannot compute the rotary embedding {layer.rope_parameters}: {error}") from error
    if not is_finite:
        raise ConfigError(f"the rotary embedding {layer.rope_parameters} has frequencies that are not finite.")
    return rotary.to(device)


class RotaryTable:
    """Cosine and sine of every position, computed once and extended as sequences grow."""

    def __init__(self, layer: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._rotary = rotary_embedding(layer, device)
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.factors = self._computed(_FIRST_POSITIONS)
        self._former: list[Tensor] = []  # kept, because graphs that were recorded with them still read them

    def at(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine at ``positions [T]`` below ``num_positions``: ``[T, 1, head_dim]`` each."""
        if num_positions > self.factors.shape[1]:
            if self.factors.device.type != "cpu":
                self._former.append(self.factors)
            self.factors = self._computed(max(num_positions, 2 * self.factors.shape[1]))
        cos, sin = self.factors[:, positions].unsqueeze(2)
        return cos, sin

    def computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``at`` returns, without the table."""
        cos, sin = self._rotary(self._like, positions[None])
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)

    def _computed(self, num_positions: int) -> Tensor:
        """Return cosine and sine of positions 0 to ``num_positions - 1``: ``[2, num_positions, head_dim]``."""
        positions = torch.arange(num_positions, device=self._like.device)
        cos, sin = self._rotary(self._like, positions[None])
        return torch.stack([cos[0], sin[0]])


def rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[T, heads, head_dim]`` by position (Su et al., arXiv 2104.09864, in the half-split order of Llama)."""
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat([-second, first], dim=-1) * sin


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
        elif isinstance(value, Weights):
            yield from value.tensors()
