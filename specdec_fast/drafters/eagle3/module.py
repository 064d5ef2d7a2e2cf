"""An EAGLE-3 drafter as a module that can be trained (Li et al., arXiv 2503.01840)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_fast.drafters.shared.trainable import MLP, Attention, CosineAndSine, DecoderLayer, DrafterModule


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        epsilon = config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, epsilon)
        self.hidden_norm = nn.RMSNorm(hidden, epsilon)
        self.post_attention_layernorm = nn.RMSNorm(hidden, epsilon)
        self.self_attn = Attention(config, 2 * hidden)  # of embedding and feature
        self.mlp = MLP(config)


class Eagle3Module(DrafterModule):
    """Layers over projected features, with the parameter names of raw EAGLE-3 checkpoints.

    The paper has one layer. Further ones are plain layers, ``config.num_hidden_layers`` in all; their output
    projections begin as 0, so that at first they change nothing. ``config.vocab_size`` is the target's;
    ``feature_size`` is the width of a row's taps, concatenated.
    """

    def __init__(self, config: LlamaConfig, feature_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(feature_size, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.layers = nn.ModuleDict({str(i): _further_layer(config) for i in range(1, config.num_hidden_layers)})
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)

    def unroll(self, features: Tensor, token_ids: Tensor, num_steps: int) -> list[Tensor]:
        """Draft from every position at once, each token on the module's output of the step before.

        Step k of the chain from position i has the token of position ``i + 1 + k``, the hidden state of step k - 1,
        and position ``i + k``. It attends to the true rows 0 to i and to the rows of its chain, as in drafting.
        """
        length = token_ids.shape[1]
        cos, sin = self._rotary(features, torch.arange(length, device=token_ids.device)[None])
        embedded = self.embed_tokens(token_ids)
        hidden = self.fc(features)
        visible = torch.ones(length, length, dtype=torch.bool, device=token_ids.device).tril()
        first = self.midlayer
        further = cast(list[DecoderLayer], list(self.layers.values()))
        attentions = [
            _ChainAttention(attention, visible) for attention in (first.self_attn, *(d.self_attn for d in further))
        ]
        logits = []
        for step in range(num_steps):
            count = length - 1 - step
            hidden = hidden[:, :count]
            normed = first.input_layernorm(embedded[:, step + 1 :])
            rows = torch.cat([normed, first.hidden_norm(hidden)], dim=-1)
            within = (cos[:, step : step + count], sin[:, step : step + count])
            hidden = hidden + attentions[0].step(rows, within)
            hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
            for layer, attention in zip(further, attentions[1:], strict=True):
                hidden = hidden + attention.step(layer.input_layernorm(hidden), within)
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def _further_layer(config: LlamaConfig) -> DecoderLayer:
    layer = DecoderLayer(config)
    nn.init.zeros_(layer.self_attn.o_proj.weight)
    nn.init.zeros_(layer.mlp.down_proj.weight)
    return layer


class _ChainAttention:
    """The attention of one layer in one call of ``unroll``; ``visible`` as for ``_attended``."""

    def __init__(self, attention: Attention, visible: Tensor) -> None:
        self._attention = attention
        self._visible = visible
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self, rows: Tensor, within: CosineAndSine) -> Tensor:
        """Return ``[B, n, H]`` for the next step's rows ``[B, n, num_inputs]`` at the positions of ``within``."""
        count = rows.shape[1]
        query = self._attention.queries(rows, within)
        key, value = self._attention.entries(rows, within)
        self._keys.append(key)
        self._values.append(value)
        attended = _attended(query, self._keys, self._values, self._visible[:count, :count])
        output: Tensor = self._attention.o_proj(attended)
        return output


def _attended(query: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor) -> Tensor:
    """Attend from the last step's rows to the first step's rows up to the same position, and to their chain.

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
    of_chain = [(query * key[:, :, :count]).sum(-1, keepdim=True) * scale for key in keys[1:]]
    weights = torch.cat([scores, *of_chain], dim=-1).softmax(-1)
    output = weights[..., :count] @ values[0][:, :, :count]
    for step, value in enumerate(values[1:]):
        output = output + weights[..., count + step, None] * value[:, :, :count]
    return output.transpose(1, 2).flatten(-2)
