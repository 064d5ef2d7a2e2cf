"""The parts of a drafter's transformer layers, as Llama and Qwen3 have them, on flat rows."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_fast.batch.ragged_batch import AttentionParams
from specdec_fast.errors import ConfigError

_FIRST_POSITIONS = 512  # of the table of rotary factors; it is doubled as needed


class LayerWeights:
    """The weights of one layer, those with the same input joined to one matrix.

    Args:
        weights: of the checkpoint, by name.
        index: of the layer.
        window: number of positions that a row sees; None: all.
        head_dim: width of a head.

    """

    def __init__(self, weights: dict[str, Tensor], index: int, window: int | None, head_dim: int) -> None:
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        self.input_norm = own["input_layernorm.weight"]
        self.mlp_norm = own["post_attention_layernorm.weight"]
        self.q_norm = own.get("self_attn.q_norm.weight")
        self.k_norm = own.get("self_attn.k_norm.weight")
        self.qkv = joined(own, [f"self_attn.{name}_proj" for name in "qkv"])
        self.output = joined(own, ["self_attn.o_proj"])
        self.gate_up = joined(own, ["mlp.gate_proj", "mlp.up_proj"])
        self.down = joined(own, ["mlp.down_proj"])
        self.attention = AttentionParams(head_dim**-0.5, sliding_window=window)

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        values = [part for value in vars(self).values() for part in (value if isinstance(value, tuple) else (value,))]
        return [value for value in values if isinstance(value, Tensor)]


def joined(weights: dict[str, Tensor], names: list[str]) -> tuple[Tensor, Tensor | None]:
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
