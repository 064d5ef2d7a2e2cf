"""The sizes of a new drafter, and the weights that it takes from its target before it is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from specdec_fast.errors import ConfigError
from specdec_fast.models.hidden_states import default_taps
from specdec_fast.models.quantized_linears import QuantizedLinear, weight_of


@dataclass(frozen=True)
class DrafterSize:
    """The sizes of a drafter; None takes the target's, the heads' in proportion to ``hidden_size``."""

    hidden_size: int | None = None  # width of its layer
    ffn_size: int | None = None  # inner width of its MLP; None: in proportion to hidden_size
    tap_layers: tuple[int, ...] | None = None  # see Drafter.taps; None: the default ones of EAGLE-3
    draft_vocab_size: int | None = None  # number of ids that it can propose, the most frequent ones of the texts
    num_layers: int = 1  # of EAGLE-3; the other kinds have their own number

    def feature_size(self, target: PreTrainedModel) -> int:
        """Return the width of a row's taps, concatenated."""
        config = target.config.get_text_config(decoder=True)
        size: int = len(self.taps(config.num_hidden_layers)) * config.hidden_size
        return size

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the taps for a target of ``num_layers`` layers.

        Raises:
            ConfigError: a tap is none of its layers but the last, or comes twice; or there are no default ones.
        """
        taps = self.tap_layers or default_taps(num_layers)
        if len(set(taps)) < len(taps) or not all(0 <= tap < num_layers for tap in taps):
            raise ConfigError(f"tap layers {taps}: expected different ones from 0 to {num_layers - 1}.")
        return taps


def copy_ends(
    target: PreTrainedModel, embed_tokens: nn.Embedding, lm_head: nn.Linear, draft_ids: Tensor | None
) -> None:
    """Let a drafter's embedding and output layer begin as the target's.

    A narrower drafter gets their projections onto the directions in which the target's embeddings differ most, and
    trains its embedding too; otherwise the embedding is the target's and stays as it is.
    """
    embedding = target.get_input_embeddings().weight.detach().float().cpu()
    output = weight_of(target.get_output_embeddings()).float().cpu()
    if embed_tokens.embedding_dim == embedding.shape[1]:
        embed_tokens.requires_grad_(False)
    else:
        directions = torch.linalg.svd(embedding, full_matrices=False).Vh[: embed_tokens.embedding_dim].T
        embedding = embedding @ directions
        output = output @ directions
    with torch.no_grad():
        embed_tokens.weight.copy_(embedding)
        lm_head.weight.copy_(output if draft_ids is None else output[draft_ids.cpu()])


def output_weight(target: PreTrainedModel) -> Tensor:
    """Return the weights ``[vocab_size, H]`` of the target's output layer, in fp32.

    Raises:
        ConfigError: it is not one matrix without a bias.
    """
    layer = target.get_output_embeddings()
    if not isinstance(layer, nn.Linear | QuantizedLinear) or layer.bias is not None:
        bias = " with a bias" if getattr(layer, "bias", None) is not None else ""
        raise ConfigError(
            f"the output layer of {type(target).__name__} is a {type(layer).__name__}{bias}; a new drafter of this "
            "kind shares or begins as a linear layer without a bias."
        )
    return weight_of(layer).float()


def layer_config(target: PreTrainedModel, size: DrafterSize, num_layers: int = 1) -> LlamaConfig:
    """Return the sizes of a drafter's layers, in proportion to the target's where ``size`` names none.

    Raises:
        ConfigError: the sizes do not go together.
    """
    config = target.config.get_text_config(decoder=True)
    hidden = size.hidden_size or config.hidden_size
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    heads = max(1, config.num_attention_heads * hidden // config.hidden_size)
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if hidden > config.hidden_size or heads % groups not in (0, heads):
        raise ConfigError(
            f"a drafter of hidden size {hidden} would have {heads} heads of {head_dim} in groups of {groups}; choose a "
            f"hidden size that divides the target's {config.hidden_size}."
        )
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10_000.0})
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        intermediate_size=size.ffn_size or config.intermediate_size * hidden // config.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // groups),
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_parameters=rope,
        tie_word_embeddings=False,
    )
