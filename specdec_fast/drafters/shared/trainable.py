"""What the trainer trains: a module that drafts from every position of a text at once, and parts of such modules."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import rotate_half

Drafts = list[tuple[Tensor, slice | Tensor]]  # see ``DrafterModule.drafts``
CosineAndSine = tuple[Tensor, Tensor]  # cosine and sine, ``[1, n, head_dim]`` each


class DrafterModule(nn.Module, ABC):
    """A drafter as a module that can be trained; its parameters lie on one device."""

    @abstractmethod
    def unroll(self, features: Tensor, token_ids: Tensor, num_steps: int) -> list[Tensor]:
        """Draft ``num_steps`` tokens from every position.

        Args:
            features: ``[B, L, feature_size]``, the target's taps at every position, concatenated.
            token_ids: ``[B, L]`` int64.
            num_steps: at least 1, and less than L.

        Returns:
            Per step k, logits ``[B, L - 1 - k, draft_vocab_size]``: row i for the token at position ``i + 2 + k``.
        """

    def output_layers(self) -> list[nn.Module]:
        """Return the layers whose outputs are logits: each row of their weights belongs to one id."""
        return [layer for name, layer in self.named_modules() if name.rpartition(".")[2] == "lm_head"]

    def drafts(self, features: Tensor, token_ids: Tensor, num_steps: int) -> Drafts:
        """Draft as ``unroll`` does, from every position or from some that the module chooses.

        Returns:
            Per step, logits ``[B, N, draft_vocab_size]``, and which ``N`` of the ``L`` positions choose their tokens.
        """
        logits = self.unroll(features, token_ids, num_steps)
        return [(drafted, slice(step + 1, None)) for step, drafted in enumerate(logits)]


class Attention(nn.Module):
    """The projections of a layer's attention, with the parameter names of checkpoints.

    Queries, keys and values are made of ``num_inputs`` numbers; None: the hidden size. ``has_norms`` says whether
    queries and keys are normalised.
    """

    def __init__(self, config: LlamaConfig, num_inputs: int | None = None, has_norms: bool = False) -> None:
        super().__init__()
        hidden = config.hidden_size
        head_dim = config.head_dim
        num_inputs = num_inputs or hidden
        self._head_dim = head_dim
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(num_inputs, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(num_inputs, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(num_inputs, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, config.rms_norm_eps) if has_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, config.rms_norm_eps) if has_norms else nn.Identity()

    def queries(self, rows: Tensor, factors: CosineAndSine) -> Tensor:
        """Return ``[B, heads, n, head_dim]`` for rows ``[B, n, num_inputs]``."""
        return _rotated(self.q_norm(self._split(self.q_proj(rows))), factors)

    def entries(self, rows: Tensor, factors: CosineAndSine) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows, repeated to as many heads as queries have."""
        key = _rotated(self.k_norm(self._split(self.k_proj(rows))), factors)
        value = self._split(self.v_proj(rows))
        return key.repeat_interleave(self._groups, dim=1), value.repeat_interleave(self._groups, dim=1)

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)


def _rotated(states: Tensor, factors: CosineAndSine) -> Tensor:
    cos, sin = (factor[:, None] for factor in factors)
    result: Tensor = states * cos + rotate_half(states) * sin
    return result


class DecoderLayer(nn.Module):
    """The modules of a pre-norm transformer layer; ``has_norms`` as for ``Attention``."""

    def __init__(self, config: LlamaConfig, has_norms: bool = False) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, has_norms=has_norms)
        self.mlp = MLP(config)


class MLP(nn.Module):
    """The gated MLP of a layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return ``[..., hidden_size]``."""
        output: Tensor = self.down_proj(silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``; it begins as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Apply the block to ``[..., H]``."""
        output: Tensor = rows + silu(self.linear(rows))
        return output
