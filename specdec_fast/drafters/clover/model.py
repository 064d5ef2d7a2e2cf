"""The forward of Clover heads over flat rows and pages of their own (Xiao et al., arXiv 2405.00263, section 3).

The paper leaves the attention of a head to its one key open, whose softmax would be 1. Here, as in Clover-2
(arXiv 2408.00264), each attention head weighs the value by the cosine of query and key.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu
from transformers.activations import ACT2FN

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.clover.checkpoint import CloverConfig, read_clover
from specdec_fast.drafters.shared.checkpoint.target import check_target
from specdec_fast.drafters.shared.layers import LayerWeights, RotaryTable, joined, rotated
from specdec_fast.errors import ConfigError
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.ops.checks import stored
from specdec_fast.program import RowFunction
from specdec_fast.runner.ragged_model import RaggedModel

Linear = tuple[Tensor, Tensor | None]
_Pair = tuple[Tensor, Tensor]
_TINY = 1e-12  # the mean square of a row of zeros, which some tokens that no text has are


def load_clover(folder: Path, target: RaggedModel) -> CloverModel:
    """Load a checkpoint for one target, onto its device and in its dtype.

    Raises:
        ConfigError: the folder cannot be read, or was made for another target; the message names the setting or weight.
        VocabularyMismatchError: it was made for another vocabulary.

    """
    config, weights = read_clover(folder)
    check_target(config, target)
    return CloverModel(config, weights, target)


class _Head:
    """The weights of one head, those of key and value joined to one matrix."""

    def __init__(self, weights: dict[str, Tensor], index: int, num_blocks: int) -> None:
        prefix = f"heads.{index}."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        self.norm = own["norm.weight"]
        self.query = joined(own, ["q_proj"])
        self.key_value = joined(own, ["k_proj", "v_proj"])
        self.blocks = [joined(own, [f"blocks.{block}.linear"]) for block in range(num_blocks)]

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        pairs = (self.query, self.key_value, *self.blocks)
        return [self.norm, *(part for pair in pairs for part in pair if part is not None)]


class CloverModel:
    """An augmenting block, and heads that follow one another, for one target.

    Args:
        config: of the checkpoint.
        weights: from ``read_clover``.
        target: gives dtype, device, ops, and the output layer.

    Attributes:
        layout: shapes of the KV entries of its augmenting block.

    Raises:
        ConfigError: the target's output layer is not a linear layer.

    """

    def __init__(self, config: CloverConfig, weights: dict[str, Tensor], target: RaggedModel) -> None:
        self.config = config
        layer = config.layer
        device = target.layout.device
        dtype = target.layout.dtype
        self._ops = target.ops.unchecked or target.ops
        self.ops = target.ops
        self.vocab_size = target.vocab_size
        self.hidden_size = layer.hidden_size
        own = {name: weight.to(device, dtype).contiguous() for name, weight in weights.items()}
        self._block = LayerWeights(own, 0, None, layer.head_dim)
        self._heads = [_Head(own, index, config.num_blocks) for index in range(config.num_heads)]
        self._output = _output_layer(target)
        self._epsilon = layer.rms_norm_eps
        self._act = ACT2FN[layer.hidden_act]
        kv_heads = layer.num_key_value_heads
        self._sizes = [heads * layer.head_dim for heads in (layer.num_attention_heads, kv_heads, kv_heads)]
        self._gates = (layer.num_attention_heads, layer.hidden_size // layer.num_attention_heads)
        self.layout = KVLayout.uniform(1, kv_heads, layer.head_dim, dtype, device)
        self._rotary = RotaryTable(layer, dtype, device)
        self._is_recorded = False

    def weights(self) -> list[Tensor]:
        """Return all tensors that it keeps; the output layer is the target's."""
        heads = [tensor for head in self._heads for tensor in head.tensors()]
        return [*self._block.tensors(), *heads, self._rotary.factors, *(x for x in self._output if x is not None)]

    @property
    def row_bytes(self) -> int:
        """Estimate the bytes per row of ``augment``: its widest operands and the residual stream."""
        return (4 * self.hidden_size + 3 * self.config.layer.intermediate_size) * self.layout.dtype.itemsize

    def augment(self, batch: RaggedBatch, pool: PagePool, hidden: Tensor) -> Tensor:
        """Run the augmenting block, one pre-norm transformer layer, and write its KV entries.

        Args:
            batch: ``T`` rows; their tokens are not read.
            pool: this drafter's pages.
            hidden: ``[T, H]``, the inputs of the target's output layer at the rows' positions.

        Returns:
            h_0 of every row, ``[T, H]``.

        """
        block = self._block
        parts = self._linear(self._normed(hidden, block.input_norm), block.qkv).split(self._sizes, dim=1)
        query, key, value = (part.unflatten(1, (-1, self.config.layer.head_dim)) for part in parts)
        if block.q_norm is not None:
            query = self._normed(query, block.q_norm)
        if block.k_norm is not None:
            key = self._normed(key, block.k_norm)
        factors = self._factors_at(batch)
        pages = pool.layers[0]
        self._ops.append_kv_(*pages, rotated(key, *factors), value, batch.slot_mapping)
        attended = self._ops.paged_attention(rotated(query, *factors), pages, batch, block.attention)
        hidden = hidden + self._linear(attended.flatten(1), block.output)
        gate, up = self._linear(self._normed(hidden, block.mlp_norm), block.gate_up).chunk(2, dim=-1)
        return hidden + self._linear(self._act(gate) * up, block.down)

    def step(self, index: int, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Add a token to hidden states: ``h + cos(q, k) v`` per attention head, q of h, k and v of the token.

        Args:
            index: of the head.
            hidden: ``[N, H]``, h of the head before; the first head gets h_0.
            token_ids: ``[N]`` int64, the token that follows each row's path: for the first head the newest one.

        Returns:
            ``[N, H]``, this head's h.

        """
        head = self._heads[index]
        query = self._linear(self._normed(hidden, head.norm), head.query)
        embedded = normalised(embedding(token_ids, self._output[0]))
        parts = (query, *self._linear(embedded, head.key_value).chunk(2, dim=1))
        query, key, value = (part.unflatten(1, self._gates) for part in parts)
        gate = (normalised(query) * normalised(key)).mean(dim=-1, keepdim=True)  # the cosine
        return hidden + (gate * value).flatten(1)

    def logits(self, index: int, hidden: Tensor) -> Tensor:
        """Return ``[N, vocab_size]`` for results ``[N, H]`` of ``step``: the target's output layer over the blocks."""
        for block in self._heads[index].blocks:
            hidden = hidden + silu(self._linear(hidden, block))
        return self._linear(hidden, self._output)

    def row_functions(self) -> list[RowFunction]:
        """Return each head as a function of rows, for programs: the first one is the augmenting block as well.

        A row of the first function takes the token behind its position, and has KV entries. Those of the others take
        the token that was drafted, and have none.
        """

        def function(index: int) -> RowFunction:
            def run(ops: Ops, pool: PagePool, batch: RaggedBatch, hidden: Tensor, wanted: Tensor | None) -> _Pair:
                model = self
                if ops is not self.ops:  # it is recorded
                    model = copy(self)
                    model._ops = ops
                    model._is_recorded = True
                if index == 0:
                    hidden = model.augment(batch, pool, hidden)
                hidden = model.step(index, hidden, batch.token_ids)
                return model.logits(index, hidden if wanted is None else hidden[wanted]), hidden

            return RowFunction(run, self.layout, self.hidden_size, self.hidden_size)

        return [function(index) for index in range(self.config.num_heads)]

    def _factors_at(self, batch: RaggedBatch) -> _Pair:
        """Return cosine and sine for every row, ``[T, 1, head_dim]`` each."""
        if self._is_recorded:  # a program computes them anew, because a table grows
            return self._rotary.computed(batch.positions)
        return self._rotary.at(batch.positions, batch.max_seqlen_k)

    def _linear(self, rows: Tensor, weights: Linear) -> Tensor:
        result: Tensor = self._ops.linear(rows, *weights)
        return result

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self._epsilon)


def normalised(rows: Tensor) -> Tensor:
    """Return rows ``[..., n]``, each divided by its root mean square."""
    return rms_norm(rows, rows.shape[-1:], eps=_TINY)


def output_layer(model: nn.Module) -> nn.Linear:
    """Return the output layer of a target, which all heads share.

    Raises:
        ConfigError: it is not a linear layer of floating-point weights.

    """
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(layer, nn.Linear) or not torch.is_floating_point(layer.weight):
        raise ConfigError(
            f"the output layer of {type(model).__name__} is a {type(layer).__name__}; Clover's heads share a linear "
            "layer of floating-point weights."
        )
    return layer


def _output_layer(target: RaggedModel) -> Linear:
    layer = output_layer(target.model)
    bias = None if layer.bias is None else stored(layer.bias.detach())
    return stored(layer.weight.detach()).contiguous(), bias
