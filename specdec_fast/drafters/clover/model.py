"""The forward of Clover heads over flat rows and pages of their own (Xiao et al., arXiv 2405.00263, section 3).

The paper leaves the attention of a head to its one key open, whose softmax would be 1. Here, as in Clover-2
(arXiv 2408.00264), each attention head weighs the value by the cosine of query and key.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.clover.checkpoint import PREFIXES, CloverConfig, read_config, weight_table
from specdec_fast.drafters.shared.checkpoint.target import check_target, output_layer_of
from specdec_fast.drafters.shared.checkpoint.weights import placed
from specdec_fast.drafters.shared.layers import (
    LayeredModel,
    LayerWeights,
    WeightAndBias,
    Weights,
    joined,
    without_prefix,
)
from specdec_fast.errors import ConfigError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.ops.checks import stored
from specdec_fast.program import RowFunction
from specdec_fast.runner.ragged_model import RaggedModel

_TINY = 1e-12  # the mean square of a row of zeros, which some tokens that no text has are


def load_clover(folder: Path, target: RaggedModel) -> CloverModel:
    """Load a checkpoint onto a target's device and in its dtype.

    Raises ``ConfigError`` or ``VocabularyMismatchError`` where the folder cannot be read or does not fit the target.
    """
    config = read_config(folder)
    check_target(config, target)
    return CloverModel(config, weight_table(config).read(folder, PREFIXES), target)


class _Head(Weights):
    """The weights of one head, those of key and value joined to one matrix."""

    def __init__(self, weights: dict[str, Tensor], index: int, num_blocks: int) -> None:
        of_head = without_prefix(weights, f"heads.{index}.")
        self.norm = of_head["norm.weight"]
        self.query = joined(of_head, ["q_proj"])
        self.key_value = joined(of_head, ["k_proj", "v_proj"])
        self.blocks = [joined(of_head, [f"blocks.{block}.linear"]) for block in range(num_blocks)]


class CloverModel(LayeredModel):
    """An augmenting block, which has the KV entries, and heads that follow one another.

    Their output layer is the target's; ``ConfigError`` if that is not a linear layer.
    """

    config: CloverConfig

    def __init__(self, config: CloverConfig, weights: dict[str, Tensor], target: RaggedModel) -> None:
        super().__init__(config, weights, target)
        weights = placed(weights, self.layout.dtype, self.layout.device)
        self._block = LayerWeights(weights, 0, None, self._head_dim)
        self._heads = [_Head(weights, index, config.num_blocks) for index in range(config.num_heads)]
        self._output = _linear_of(target)
        num_gates = config.layer.num_attention_heads
        self._gates = (num_gates, self.hidden_size // num_gates)

    def augment(self, batch: RaggedBatch, pool: PagePool, hidden: Tensor) -> Tensor:
        """Run the augmenting block, one pre-norm transformer layer, and write its KV entries.

        ``hidden [T, H]`` are the inputs of the target's output layer at the rows' positions, whose tokens are not read.
        The result is h_0 of every row, ``[T, H]``.
        """
        return self._layer(self._block, hidden, self._factors_at(batch), pool.layers[0], batch)

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
            def run(
                ops: Ops, pool: PagePool, batch: RaggedBatch, hidden: Tensor, wanted: Tensor | None
            ) -> tuple[Tensor, Tensor]:
                model = self.on(ops)
                if index == 0:
                    hidden = model.augment(batch, pool, hidden)
                hidden = model.step(index, hidden, batch.token_ids)
                return model.logits(index, hidden if wanted is None else hidden[wanted]), hidden

            return RowFunction(run, self.layout, self.hidden_size, self.hidden_size)

        return [function(index) for index in range(self.config.num_heads)]


def normalised(rows: Tensor) -> Tensor:
    """Return rows ``[..., n]``, each divided by its root mean square."""
    return rms_norm(rows, rows.shape[-1:], eps=_TINY)


def _linear_of(target: RaggedModel) -> WeightAndBias:
    """Return the weights of a target's output layer, which all heads share; it must be a linear one of floats."""
    layer = output_layer_of(target)
    if not isinstance(layer, nn.Linear) or not torch.is_floating_point(layer.weight):
        raise ConfigError(
            f"the output layer of {type(target.model).__name__} is a {type(layer).__name__}; Clover's heads share a "
            "linear layer of floating-point weights."
        )
    bias = None if layer.bias is None else stored(layer.bias.detach())
    return stored(layer.weight.detach()).contiguous(), bias
