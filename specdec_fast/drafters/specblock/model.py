"""The forward of a SpecBlock drafter over flat rows and pages of its own (Shi et al., arXiv 2605.07243, section 3).

A block has K rows, its *slots*. That of position i is made of the feature of position i and of the token at i + 1, and
slot k drafts the token at i + 2 + k. A block that follows a drafted token is made of the hidden state of the slot that
drafted it, and of that token; it stands at the position of the first block. A slot sees all slots of earlier positions,
the slots of the blocks above it down to those that drafted its path, and the slots of its own block down to itself.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu
from transformers.activations import ACT2FN

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.shared.checkpoint.target import check_target, taps_of, target_embedding
from specdec_fast.drafters.shared.checkpoint.weights import placed, read_weights, target_ids
from specdec_fast.drafters.shared.layers import LayerWeights, RotaryTable, rotated
from specdec_fast.drafters.specblock.checkpoint import NUM_FEATURES, SpecBlockConfig, check_weights, read_config
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.program import RowFunction
from specdec_fast.runner.ragged_model import RaggedModel


def load_specblock(folder: Path, target: RaggedModel, tap_layers: tuple[int, ...] | None = None) -> SpecBlockModel:
    """Load a checkpoint for one target, onto its device and in its dtype.

    Args:
        folder: has ``config.json`` and weights.
        target: the model whose hidden states it reads; it must not have been made a part of several processes.
        tap_layers: its taps; None: those that the checkpoint names, or else the default ones of EAGLE-3.

    Raises:
        ConfigError: the folder cannot be read, or was made for another target; the message names the setting or weight.
        VocabularyMismatchError: it was made for another vocabulary.

    """
    config = read_config(folder)
    check_target(config, target)
    taps = taps_of(config, target, tap_layers)
    weights = read_weights(folder)
    check_weights(config, len(taps), weights)
    return SpecBlockModel(config, taps, weights, target)


class _Layer(LayerWeights):
    """The weights of one layer; all but the first one mix slots before."""

    def __init__(self, weights: dict[str, Tensor], index: int, head_dim: int) -> None:
        super().__init__(weights, index, None, head_dim)
        self.shift = weights.get(f"shift_proj.{index - 1}.weight")


class SpecBlockModel:
    """A SpecBlock drafter whose weights are loaded.

    Args:
        config: its configuration.
        taps: see ``Drafter.taps``; as many as ``condition_proj`` takes side by side.
        weights: from ``read_weights``, checked by ``check_weights``.
        target: gives dtype, device, ops, and the embedding if the checkpoint has none of its own.

    Attributes:
        num_slots: K.
        layout: shapes of the KV entries of one slot.
        target_ids: ``[draft_vocab_size]`` int64, the target's id of each draft id; None if they are the same.

    """

    def __init__(
        self, config: SpecBlockConfig, taps: tuple[int, ...], weights: dict[str, Tensor], target: RaggedModel
    ) -> None:
        self.config = config
        self.taps = taps
        self.num_slots = config.num_slots
        layer = config.layer
        device = target.layout.device
        dtype = target.layout.dtype
        self.ops = target.ops
        self.vocab_size = target.vocab_size
        self._ops = target.ops.unchecked or target.ops
        ids = target_ids(config, weights)
        self.target_ids = None if ids is None else ids.to(device)
        own = placed(weights, dtype, device)
        first = {name.removeprefix("input_layer."): weight for name, weight in own.items() if "input_layer." in name}
        self._embedding = first.get("embed_tokens.weight")
        if self._embedding is None:
            self._embedding = target_embedding(config, target)
        self._project = first["condition_proj.weight"]
        self._condition_norm = first["condition_norm.weight"]
        self._token_norm = first["token_norm.weight"]
        self._epsilon = layer.rms_norm_eps
        self.hidden_size = layer.hidden_size
        self._head_dim = layer.head_dim
        self._fuse = first["fuse.weight"][:, : 2 * self.hidden_size].contiguous()
        queries = self._normed(first["position_queries.weight"], first["query_norm.weight"])
        self._queries = queries @ first["fuse.weight"][:, 2 * self.hidden_size :].T  # the same for all blocks: [K, H]
        self._layers = [_Layer(own, i, layer.head_dim) for i in range(layer.num_hidden_layers)]
        self._norm = own["norm.weight"]
        self._head = own["lm_head.weight"]
        self._rank_in = _without_gaps(own["rank_head.0.weight"], self.hidden_size)
        self._rank_out = own["rank_head.2.weight"]
        self._act = ACT2FN[layer.hidden_act]
        kv_heads = layer.num_key_value_heads
        self._heads = (layer.num_attention_heads, kv_heads, kv_heads)
        self.layout = KVLayout.uniform(layer.num_hidden_layers, kv_heads, layer.head_dim, dtype, device)
        self._slots = torch.arange(1, self.num_slots + 1, device=device)
        self._rotary = RotaryTable(layer, dtype, device)

    def weights(self) -> list[Tensor]:
        """Return all tensors that it keeps; the embedding may be the target's."""
        return [*self._learnt(), self._rotary.factors]

    def assign(self, other: SpecBlockModel) -> None:
        """Take the numbers of another checkpoint of the same shapes, in place, so that programs read them."""
        for own, new in zip(self._learnt(), other._learnt(), strict=True):
            if own.data_ptr() != new.data_ptr():  # not if it is the target's
                own.copy_(new)

    def _learnt(self) -> list[Tensor]:
        values = [*vars(self).values()]
        values += [tensor for layer in self._layers for tensor in layer.tensors()]
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def row_bytes(self) -> int:
        """Estimate the bytes per slot of a forward, which PyTorch runs: its widest operands and the residual stream."""
        return (5 * self.hidden_size + 3 * self.config.layer.intermediate_size) * self.layout.dtype.itemsize

    @property
    def ranked_bytes(self) -> int:
        """Estimate the bytes per slot of ``ranked``: the logits and two copies in fp32, and those of the rank head."""
        itemsize = self.layout.dtype.itemsize
        copies = 5 if itemsize < 4 else 3  # of the logits' own size
        of_rank_head = 2 * len(self._rank_in) * itemsize + NUM_FEATURES * (8 + 4 * 4)
        return copies * self.config.draft_vocab_size * itemsize + of_rank_head

    def project(self, features: Tensor) -> Tensor:
        """Reduce the target's hidden states ``[T, taps, its hidden size]`` to one condition per row, ``[T, H]``."""
        return self._linear(features.to(self.layout.dtype).flatten(1), self._project)

    def row_functions(self) -> list[RowFunction]:
        """Return each layer as a function of slots, for programs; the first one joins what blocks are made of as well.

        A row takes what ``first_inputs`` or ``next_inputs`` return. The first function reads its token too, that of its
        block. The logits of all layers but the last are their results again, and nobody wants them.
        """
        sizes = [2 * self.hidden_size + 2 * self._head_dim] * len(self._layers)
        return [
            RowFunction(partial(self._run, index), self.layout, size, self.hidden_size)
            for index, size in enumerate(sizes)
        ]

    def factors(self, bases: Tensor, most_slots: int) -> Tensor:
        """Return cosine and sine of the slots of blocks.

        Args:
            bases: ``[N]`` int64, the position of each block.
            most_slots: number of slots of the longest sequence.

        Returns:
            ``[K * N, 2 * head_dim]``, block after block.

        """
        positions = (bases[:, None] + self._slots).flatten()
        cos, sin = self._rotary.at(positions, most_slots // self.num_slots + self.num_slots + 1)
        return torch.cat([cos[:, 0], sin[:, 0]], dim=1)

    def first_inputs(self, conditions: Tensor, factors: Tensor) -> Tensor:
        """Return what the slots of ``N`` blocks take in the first layer, beside the token of their block.

        Args:
            conditions: ``[N, H]``, from ``project``, or the hidden state of the slot that drafted the block's token.
            factors: from ``factors``.

        """
        queries = self._queries.repeat(len(conditions), 1)
        return torch.cat([conditions.repeat_interleave(self.num_slots, dim=0), queries, factors], dim=1)

    def next_inputs(self, hidden: Tensor, factors: Tensor) -> Tensor:
        """Return what slots take in a further layer: their own result, and that of the slot before (slot 0: its own).

        Args:
            hidden: ``[K * N, H]``, results of the layer before.
            factors: as in ``first_inputs``.

        """
        blocks = hidden.view(-1, self.num_slots, self.hidden_size)
        before = torch.cat([blocks[:, :1], blocks[:, :-1]], dim=1).flatten(0, 1)
        return torch.cat([hidden, before, factors], dim=1)

    def ranked(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rank the likeliest tokens of slots, and predict how far down the target's token is among them.

        Args:
            hidden: ``[N, H]``, results of the last layer.
            logits: ``[N, draft_vocab_size]``, its logits.

        Returns:
            The ids of the 20 largest logits ``[N, 20]``, as draft ids, and their log-probabilities in fp32; and the
            likeliest class of each slot ``[N]``: rank 1, 2 to 4, 5 to 10, or beyond.

        """
        normed = self._normed(hidden, self._norm)
        top, ids = logits.float().topk(NUM_FEATURES, dim=-1)
        among = top.log_softmax(dim=-1)
        probabilities = among.exp()
        entropy = (probabilities * among).sum(-1, keepdim=True)  # its sign is in the weights
        features = torch.cat([among[:, :10], probabilities[:, :1], entropy], dim=-1).to(normed.dtype)
        inner = silu(self._linear(torch.cat([normed, features], dim=-1), self._rank_in))
        classes = self._linear(inner, self._rank_out).argmax(dim=-1)
        return ids, top - logits.float().logsumexp(dim=-1, keepdim=True), classes

    def _run(
        self, index: int, ops: Ops, pool: PagePool, batch: RaggedBatch, inputs: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute a layer for ``T`` slots, and write its KV entries; see ``RowFunction``."""
        model = self
        if ops is not self.ops:  # it is recorded
            model = copy(self)
            model._ops = ops
        own, other, factors = inputs.split([self.hidden_size, self.hidden_size, 2 * self._head_dim], dim=1)
        hidden = model._layer(index, batch, pool, model._joined(index, batch, own, other), factors)
        chosen = hidden if wanted is None else hidden[wanted]
        if index + 1 == len(self._layers):
            chosen = model._linear(model._normed(chosen, self._norm), self._head)
        return chosen, hidden

    def _joined(self, index: int, batch: RaggedBatch, own: Tensor, other: Tensor) -> Tensor:
        """Return what a layer begins with: condition, token and query together; or a slot mixed with the one before."""
        if index:
            shift = self._layers[index].shift
            assert shift is not None
            return self._linear(torch.cat([own, other], dim=1), shift)
        token = self._normed(embedding(batch.token_ids, self._embedding), self._token_norm)  # type: ignore[arg-type]
        return self._linear(torch.cat([self._normed(own, self._condition_norm), token], dim=1), self._fuse) + other

    def _layer(self, index: int, batch: RaggedBatch, pool: PagePool, hidden: Tensor, factors: Tensor) -> Tensor:
        layer = self._layers[index]
        joined = self._linear(self._normed(hidden, layer.input_norm), *layer.qkv)
        parts = joined.split([heads * self._head_dim for heads in self._heads], dim=1)
        query, key, value = (part.unflatten(1, (-1, self._head_dim)) for part in parts)
        turn = [part.unsqueeze(1) for part in factors.split(self._head_dim, dim=1)]
        pages = pool.layers[index]
        self._ops.append_kv_(*pages, rotated(key, *turn), value, batch.slot_mapping)
        attended = self._ops.paged_attention(rotated(query, *turn), pages, batch, layer.attention)
        hidden = hidden + self._linear(attended.flatten(1), *layer.output)
        gate, up = self._linear(self._normed(hidden, layer.mlp_norm), *layer.gate_up).chunk(2, dim=-1)
        return hidden + self._linear(self._act(gate) * up, *layer.down)

    def _linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = self._ops.linear(rows, weight, bias)
        return result

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self._epsilon)


def _without_gaps(weight: Tensor, hidden_size: int) -> Tensor:
    """Return the first weight of the rank head for inputs without the gaps, and with the negative entropy.

    The gap between two logits is that between their log-probabilities, so its weight is added to theirs.

    Returns:
        ``[256, H + 12]``.

    """
    log_probs = weight[:, hidden_size : hidden_size + 10].clone()
    gaps = weight[:, hidden_size + 10 : hidden_size + 13]
    log_probs[:, 0] += gaps.sum(dim=1)
    log_probs[:, [1, 2, 4]] -= gaps
    top = weight[:, hidden_size + 13 : hidden_size + 14]
    entropy = weight[:, hidden_size + 14 :]
    return torch.cat([weight[:, :hidden_size], log_probs, top, -entropy], dim=1)
