"""An EAGLE-3 drafter as a module that can be trained (Li et al., arXiv 2503.01840)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specdec_fast.drafters.shared.trainable import MLP, DrafterModule


class _Attention(nn.Module):
    """The projections of the layer's attention; queries, keys and values are made from embedding and feature."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden = config.hidden_size
        kv_size = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(2 * hidden, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=False)

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[B, heads, L, head_dim]``, and keys and values repeated to as many heads."""
        shape = (*rows.shape[:2], -1, self.head_dim)
        query, key, value = (
            layer(rows).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = self.num_heads // self.num_kv_heads
        return query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        epsilon = config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, epsilon)
        self.hidden_norm = nn.RMSNorm(hidden, epsilon)
        self.post_attention_layernorm = nn.RMSNorm(hidden, epsilon)
        self.self_attn = _Attention(config)
        self.mlp = MLP(config)


class Eagle3Module(DrafterModule):
    """One layer over projected features, with the parameter names of raw EAGLE-3 checkpoints.

    Args:
        config: sizes of the drafter; ``vocab_size`` is the target's.
        feature_size: width of a row's taps side by side.
        draft_vocab_size: number of ids that it can propose.

    """

    def __init__(self, config: LlamaConfig, feature_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(feature_size, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)

    def unroll(self, features: Tensor, token_ids: Tensor, num_steps: int) -> list[Tensor]:
        """Draft ``num_steps`` tokens from every position at once, each on the module's own output of the step before.

        Step k of the chain from position i has the token of position ``i + 1 + k``, the hidden state of step k - 1,
        and position ``i + k``. It attends to the true rows 0 to i and to the chain's own rows, as in drafting.

        Args:
            features: ``[B, L, feature_size]``, the target's taps at every position.
            token_ids: ``[B, L]`` int64.
            num_steps: at least 1, and less than L.

        Returns:
            Per step k, logits ``[B, L - 1 - k, draft_vocab_size]``: row i for the token at position ``i + 2 + k``.

        """
        length = token_ids.shape[1]
        attention = self.midlayer.self_attn
        cos, sin = self._rotary(features, torch.arange(length, device=token_ids.device)[None])
        embedded = self.embed_tokens(token_ids)
        hidden = self.fc(features)
        visible = torch.ones(length, length, dtype=torch.bool, device=token_ids.device).tril()
        keys = []
        values = []
        logits = []
        for step in range(num_steps):
            count = length - 1 - step
            hidden = hidden[:, :count]
            rows = torch.cat(
                [
                    self.midlayer.input_layernorm(embedded[:, step + 1 :]),
                    self.midlayer.hidden_norm(hidden),
                ],
                dim=-1,
            )
            query, key, value = attention.project(rows)
            query, key = apply_rotary_pos_emb(query, key, cos[:, step : step + count], sin[:, step : step + count])
            keys.append(key)
            values.append(value)
            hidden = hidden + attention.o_proj(_attended(query, keys, values, visible[:count, :count]))
            hidden = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def _attended(query: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor) -> Tensor:
    """Attend from the last step's rows to the first step's rows up to their own, and to their own chain.

    Args:
        query: ``[B, heads, n, head_dim]``.
        keys: per step, ``[B, heads, n or more, head_dim]``.
        values: as the keys.
        visible: ``[n, n]`` bool, which rows of the first step a row sees.

    Returns:
        ``[B, n, heads * head_dim]``.

    """
    count = query.shape[2]
    scale = query.shape[3] ** -0.5
    scores = (query @ keys[0][:, :, :count].mT) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    own = [(query * key[:, :, :count]).sum(-1, keepdim=True) * scale for key in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1)
    output = weights[..., :count] @ values[0][:, :, :count]
    for step, value in enumerate(values[1:]):
        output = output + weights[..., count + step, None] * value[:, :, :count]
    return output.transpose(1, 2).flatten(-2)
