"""The forward of a SpecBlock drafter over flat rows and pages of its own (Shi et al., arXiv 2605.07243, section 3).

A block has K rows, its *slots*. That of position i is made of the feature of position i and of the token at i + 1, and
slot k drafts the token at i + 2 + k. A block that follows a drafted token is made of the hidden state of the slot that
drafted it, and of that token; it stands at the position of the first block. A slot sees all slots of earlier positions,
the slots of the blocks above it down to those that drafted its path, and the slots of its own block down to itself.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.drafters.shared.checkpoint.target import embedding_weight, fitting_taps
from specdec_fast.drafters.shared.checkpoint.weights import placed
from specdec_fast.drafters.shared.layers import LayeredModel, LayerWeights, without_prefix
from specdec_fast.drafters.specblock.checkpoint import NUM_FEATURES, SpecBlockConfig, read_config, weight_table
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import Ops
from specdec_fast.program import RowFunction
from specdec_fast.runner.ragged_model import RaggedModel


def load_specblock(folder: Path, target: RaggedModel, tap_layers: tuple[int, ...] | None = None) -> SpecBlockModel:
    """Load a checkpoint onto a target's device and in its dtype.

    Raises ``ConfigError`` or ``VocabularyMismatchError`` where the folder cannot be read or does not fit the target.
    """
    config = read_config(folder)
    taps = fitting_taps(config, target, tap_layers)
    return SpecBlockModel(config, weight_table(config, len(taps)).read(folder), target, taps)


class _Layer(LayerWeights):
    """The weights of one layer; all but the first one mix slots before."""

    def __init__(self, weights: dict[str, Tensor], index: int, head_dim: int) -> None:
        super().__init__(weights, index, None, head_dim)
        self.shift = weights.get(f"shift_proj.{index - 1}.weight")


class SpecBlockModel(LayeredModel):
    """A SpecBlock drafter for one target, which gives the embedding if the checkpoint has none.

    ``num_slots`` is K; ``layout`` has the shapes of the KV entries of one slot.
    """

    config: SpecBlockConfig

    def __init__(
        self, config: SpecBlockConfig, weights: dict[str, Tensor], target: RaggedModel, taps: tuple[int, ...]
    ) -> None:
        super().__init__(config, weights, target, taps)
        self.num_slots = config.num_slots
        hidden_size = self.hidden_size
        weights = placed(weights, self.layout.dtype, self.layout.device)
        first = without_prefix(weights, "input_layer.")
        self._embedding = embedding_weight(config, first, target)
        self._project = first["condition_proj.weight"]
        self._condition_norm = first["condition_norm.weight"]
        self._token_norm = first["token_norm.weight"]
        self._fuse = first["fuse.weight"][:, : 2 * hidden_size].contiguous()
        queries = self._normed(first["position_queries.weight"], first["query_norm.weight"])
        self._queries = queries @ first["fuse.weight"][:, 2 * hidden_size :].T  # the same for all blocks: [K, H]
        self._layers = [_Layer(weights, i, self._head_dim) for i in range(len(config.sliding_windows))]
        self._norm = weights["norm.weight"]
        self._head = weights["lm_head.weight"]
        self._rank_in = _without_gaps(weights["rank_head.0.weight"], hidden_size)
        self._rank_out = weights["rank_head.2.weight"]
        self._slots = torch.arange(1, self.num_slots + 1, device=self.layout.device)

    def assign(self, other: SpecBlockModel) -> None:
        """Take the numbers of another checkpoint of the same shapes, in place, so that programs read them."""
        for present, new in zip(self.tensors(), other.tensors(), strict=True):
            if present.data_ptr() != new.data_ptr():  # not if it is the target's
                present.copy_(new)

    @property
    def row_bytes(self) -> int:  # of a slot, which takes its query and rotary factors besides
        return super().row_bytes + self.hidden_size * self.layout.dtype.itemsize

    @property
    def ranked_bytes(self) -> int:
        """Estimate the bytes per slot of ``ranked``: the logits and two copies in fp32, and those of the rank head."""
        itemsize = self.layout.dtype.itemsize
        copies = 5 if itemsize < 4 else 3  # of the logits' size
        of_rank_head = 2 * len(self._rank_in) * itemsize + NUM_FEATURES * (8 + 4 * 4)
        return copies * self.config.draft_vocab_size * itemsize + of_rank_head

    def project(self, features: Tensor) -> Tensor:
        """Reduce hidden states ``[T, taps, target's hidden size]`` to one condition per row, ``[T, H]``."""
        return self._linear(features.to(self.layout.dtype).flatten(1), (self._project, None))

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
        """Return cosine and sine of the slots of blocks, ``[K * N, 2 * head_dim]``, block after block.

        Args:
            bases: ``[N]`` int64, the position of each block.
            most_slots: number of slots of the longest sequence.
        """
        positions = (bases[:, None] + self._slots).flatten()
        cos, sin = self._rotary.at(positions, most_slots // self.num_slots + self.num_slots + 1)
        return torch.cat([cos[:, 0], sin[:, 0]], dim=1)

    def first_inputs(self, conditions: Tensor, factors: Tensor) -> Tensor:
        """Return what the slots of ``N`` blocks take in the first layer, beside the token of their block.

        ``conditions [N, H]`` are from ``project``, or the hidden states of the slots that drafted the blocks' tokens.
        """
        queries = self._queries.repeat(len(conditions), 1)
        return torch.cat([conditions.repeat_interleave(self.num_slots, dim=0), queries, factors], dim=1)

    def next_inputs(self, hidden: Tensor, factors: Tensor) -> Tensor:
        """Return what slots take in a further layer: their result, and that of the slot before (slot 0: its result).

        ``hidden [K * N, H]`` are the results of the layer before.
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
        inner = silu(self._linear(torch.cat([normed, features], dim=-1), (self._rank_in, None)))
        classes = self._linear(inner, (self._rank_out, None)).argmax(dim=-1)
        return ids, top - logits.float().logsumexp(dim=-1, keepdim=True), classes

    def _run(
        self, index: int, ops: Ops, pool: PagePool, batch: RaggedBatch, inputs: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute a layer for ``T`` slots, and write its KV entries; see ``RowFunction``."""
        model = self.on(ops)
        states, other, factors = inputs.split([self.hidden_size, self.hidden_size, 2 * self._head_dim], dim=1)
        cos, sin = (part.unsqueeze(1) for part in factors.split(self._head_dim, dim=1))
        joined = model._joined(index, batch, states, other)
        hidden = model._layer(self._layers[index], joined, (cos, sin), pool.layers[index], batch)
        chosen = hidden if wanted is None else hidden[wanted]
        if index + 1 == len(self._layers):
            chosen = model._linear(model._normed(chosen, self._norm), (self._head, None))
        return chosen, hidden

    def _joined(self, index: int, batch: RaggedBatch, states: Tensor, other: Tensor) -> Tensor:
        """Return what a layer begins with: condition, token and query together; or a slot mixed with the one before."""
        if index:
            shift = self._layers[index].shift
            assert shift is not None
            return self._linear(torch.cat([states, other], dim=1), (shift, None))
        token = self._normed(embedding(batch.token_ids, self._embedding), self._token_norm)
        pair = torch.cat([self._normed(states, self._condition_norm), token], dim=1)
        return self._linear(pair, (self._fuse, None)) + other


def _without_gaps(weight: Tensor, hidden_size: int) -> Tensor:
    """Return the first weight ``[256, H + 12]`` of the rank head for inputs without the gaps, with minus the entropy.

    The gap between two logits is that between their log-probabilities, so its weight is added to theirs.
    """
    log_probs = weight[:, hidden_size : hidden_size + 10].clone()
    gaps = weight[:, hidden_size + 10 : hidden_size + 13]
    log_probs[:, 0] += gaps.sum(dim=1)
    log_probs[:, [1, 2, 4]] -= gaps
    top = weight[:, hidden_size + 13 : hidden_size + 14]
    entropy = weight[:, hidden_size + 14 :]
    return torch.cat([weight[:, :hidden_size], log_probs, top, -entropy], dim=1)
