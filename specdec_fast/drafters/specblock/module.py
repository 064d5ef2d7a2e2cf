"""A SpecBlock drafter as a module that can be trained (Shi et al., arXiv 2605.07243)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_fast.drafters.shared.trainable import DecoderLayer, DrafterModule
from specdec_fast.drafters.specblock.checkpoint import NUM_CLASSES, RANK_FEATURES, RANK_HIDDEN

KeyValues = list[tuple[Tensor, Tensor]]  # per layer, ``[B, heads, rows, head_dim]`` each


class _InputLayer(nn.Module):
    """Makes the slots of a block from a condition, a token, and a query per slot."""

    def __init__(self, config: LlamaConfig, feature_size: int, num_slots: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        epsilon = config.rms_norm_eps
        self.condition_proj = nn.Linear(feature_size, hidden, bias=False)
        self.condition_norm = nn.RMSNorm(hidden, epsilon)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.token_norm = nn.RMSNorm(hidden, epsilon)
        self.position_queries = nn.Embedding(num_slots, hidden)
        self.query_norm = nn.RMSNorm(hidden, epsilon)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, conditions: Tensor, token_ids: Tensor) -> Tensor:
        """Return ``[B, N, K, H]`` for conditions ``[B, N, H]`` and tokens ``[B, N]``."""
        condition, token, query = self.fuse.weight.chunk(3, dim=1)
        blocks = self.condition_norm(conditions) @ condition.T + self.token_norm(self.embed_tokens(token_ids)) @ token.T
        return blocks[:, :, None] + self.query_norm(self.position_queries.weight) @ query.T


class SpecBlockModule(DrafterModule):
    """Blocks of K slots over projected features, with the parameter names of checkpoints.

    K is ``num_slots``; ``config.vocab_size`` is the target's; ``feature_size`` is the width of a row's taps,
    concatenated. ``draft_ids [draft_vocab_size]`` int64 are the ids that it can propose; None: all.
    """

    _draft_id_of: Tensor

    def __init__(
        self, config: LlamaConfig, feature_size: int, num_slots: int, draft_vocab_size: int, draft_ids: Tensor | None
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        ids = torch.arange(config.vocab_size, device="cpu")
        if draft_ids is not None:
            ids = torch.full_like(ids, -1).index_copy_(0, draft_ids.cpu(), ids[:draft_vocab_size])
        self.register_buffer("_draft_id_of", ids, persistent=False)
        self.config = config
        self.num_slots = num_slots
        self.input_layer = _InputLayer(config, feature_size, num_slots)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        shifts = (nn.Linear(2 * hidden, hidden, bias=False) for _ in range(config.num_hidden_layers - 1))
        self.shift_proj = nn.ModuleList(shifts)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)
        self.rank_head = nn.Sequential(
            nn.Linear(hidden + RANK_FEATURES, RANK_HIDDEN, bias=False),
            nn.SiLU(),
            nn.Linear(RANK_HIDDEN, NUM_CLASSES, bias=False),
        )
        self._rotary = LlamaRotaryEmbedding(config)

    def decoder_layers(self) -> list[DecoderLayer]:
        """Return the layers, from the first to the last."""
        return list(self.layers)  # type: ignore[arg-type]

    def draft_ids_of(self, token_ids: Tensor) -> Tensor:
        """Return the draft id of each token; -1 if it cannot be proposed."""
        return self._draft_id_of[token_ids]

    def unroll(self, features: Tensor, token_ids: Tensor, num_steps: int) -> list[Tensor]:
        hidden, _ = self.true_blocks(features, token_ids)
        count = hidden.shape[1]
        slots = range(min(num_steps, self.num_slots))
        return [self.lm_head(self.norm(hidden[:, : count - slot, slot])) for slot in slots]

    def true_blocks(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, KeyValues]:
        """Compute the block of every position that has a token behind it.

        For ``features [B, L, feature_size]`` and ``token_ids [B, L]`` int64, return hidden states ``[B, L - 1, K, H]``,
        and keys and values of all slots, as ``blocks_behind`` takes them.
        """
        conditions = self.input_layer.condition_proj(features[:, :-1])
        positions = torch.arange(conditions.shape[1], device=token_ids.device)
        return self._blocks(conditions, token_ids[:, 1:], positions, None)

    def blocks_behind(
        self, hidden: Tensor, key_values: KeyValues, token_ids: Tensor, positions: Tensor, slot: int
    ) -> Tensor:
        """Compute blocks that follow the text's token behind a slot.

        Args:
            hidden: from ``true_blocks``.
            key_values: from ``true_blocks``.
            token_ids: ``[B, L]`` int64.
            positions: ``[N]`` int64, of the true blocks that are followed, each below ``L - 2 - slot``.
            slot: the slot of these whose hidden state is the condition.

        Returns:
            ``[B, N, K, H]``; slot k drafts the token at ``position + slot + 3 + k``.
        """
        seen = self.num_slots * positions + slot + 1  # slots of true blocks that each block sees
        tokens = token_ids[:, positions + slot + 2]
        return self._blocks(hidden[:, positions, slot], tokens, positions, (key_values, seen))[0]

    def _blocks(
        self, conditions: Tensor, token_ids: Tensor, positions: Tensor, above: tuple[KeyValues, Tensor] | None
    ) -> tuple[Tensor, KeyValues]:
        slots = torch.arange(1, self.num_slots + 1, device=positions.device)
        factors = self._rotary(conditions, (positions[:, None] + slots).flatten()[None])
        hidden = self.input_layer(conditions, token_ids)
        key_values: KeyValues = []
        for index, layer in enumerate(self.decoder_layers()):
            if index > 0:
                before = torch.cat([hidden[:, :, :1], hidden[:, :, :-1]], dim=2)
                hidden = self.shift_proj[index - 1](torch.cat([hidden, before], dim=-1))
            rows = hidden.flatten(1, 2)
            normed = layer.input_layernorm(rows)
            query = layer.self_attn.queries(normed, factors)
            key, value = layer.self_attn.entries(normed, factors)
            key_values.append((key, value))
            if above is None:  # all slots of earlier positions, and those of its block so far
                attended = scaled_dot_product_attention(query, key, value, is_causal=True)
            else:
                attended = self._attended_behind(query, (key, value), above[0][index], above[1])
            rows = rows + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
            hidden = rows.view_as(hidden)
        return hidden, key_values

    def _attended_behind(
        self, query: Tensor, within: tuple[Tensor, Tensor], above: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """Attend from blocks to the first ``seen`` slots of true blocks, and to the slots ``within`` them so far."""
        shape = (-1, self.num_slots)
        scale = query.shape[-1] ** -0.5
        columns = torch.arange(above[0].shape[2], device=query.device)
        hidden = (columns >= seen[:, None]).repeat_interleave(self.num_slots, dim=0)
        scores = (query @ above[0].mT * scale).masked_fill(hidden, float("-inf"))
        grouped, key, value = (part.unflatten(2, shape) for part in (query, *within))
        later = torch.ones(self.num_slots, self.num_slots, dtype=torch.bool, device=query.device).triu(1)
        near = (grouped @ key.mT * scale).masked_fill(later, float("-inf")).flatten(2, 3)
        weights = torch.cat([scores, near], dim=-1).softmax(-1)
        far, near = weights.split([scores.shape[-1], self.num_slots], dim=-1)
        return far @ above[1] + (near.unflatten(2, shape) @ value).flatten(2, 3)
