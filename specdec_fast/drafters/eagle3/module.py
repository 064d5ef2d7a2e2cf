"""An EAGLE-3 drafter as a module that can be trained (Li et al., arXiv 2503.01840)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_fast.drafters.shared.trainable import MLP, Attention, DrafterModule


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
    """One layer over projected features, with the parameter names of raw EAGLE-3 checkpoints.

    ``config.vocab_size`` is the target's; ``feature_size`` is the width of a row's taps, concatenated.
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
        """Draft from every position at once, each token on the module's output of the step before.

        Step k of the chain from position i has the token of position ``i + 1 + k``, the hidden state of step k - 1,
        and position ``i + k``. It attends to the true rows 0 to i and to the rows of its chain, as in drafting.
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
            normed = self.midlayer.input_layernorm(embedded[:, step + 1 :])
            rows = torch.cat([normed, self.midlayer.hidden_norm(hidden)], dim=-1)
            within = (cos[:, step : step + count], sin[:, step : step + count])
            query = attention.queries(rows, within)
            key, value = attention.entries(rows, within)
            keys.append(key)
            values.append(value)
            hidden = hidden + attention.o_proj(_attended(query, keys, values, visible[:count, :count]))
            hidden = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


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
