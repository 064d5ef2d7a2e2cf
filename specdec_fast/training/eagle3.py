"""A new EAGLE-3 drafter for a target, and the checkpoint that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from specdec_fast.drafters.eagle3.config import LAYER_SIZES
from specdec_fast.errors import ConfigError
from specdec_fast.models.hidden_states import default_taps
from specdec_fast.training.eagle3_module import Eagle3Module
from specdec_fast.training.files import write_drafter
from specdec_fast.training.texts import Texts

_STORED = torch.bfloat16


@dataclass(frozen=True)
class DrafterSize:
    """The sizes of a drafter; None takes the target's, the heads' in proportion to ``hidden_size``.

    Attributes:
        hidden_size: width of its layer.
        ffn_size: inner width of its MLP; None: in proportion to ``hidden_size``.
        tap_layers: see ``Drafter.taps``; None: the default ones of EAGLE-3.
        draft_vocab_size: number of ids that it can propose, those that are most frequent in the texts.

    """

    hidden_size: int | None = None
    ffn_size: int | None = None
    tap_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the taps for a target of ``num_layers`` layers.

        Raises:
            ConfigError: a tap is none of its layers but the last, or comes twice; or there are no default ones.

        """
        taps = self.tap_layers or default_taps(num_layers)
        if len(set(taps)) < len(taps) or not all(0 <= tap < num_layers for tap in taps):
            raise ConfigError(f"tap layers {taps}: expected different ones from 0 to {num_layers - 1}.")
        return taps


def new_module(
    target: PreTrainedModel, size: DrafterSize, num_draft_ids: int, draft_ids: Tensor | None
) -> Eagle3Module:
    """Return a drafter to be trained, on the target's device, in fp32.

    Embedding and output layer begin as the target's. A narrower drafter gets their projections onto the directions in
    which the target's embeddings differ most, and trains its embedding too; otherwise the embedding is the target's
    and stays as it is.

    Args:
        target: the model that it will draft for.
        size: its sizes.
        num_draft_ids: number of ids that it can propose.
        draft_ids: ``[num_draft_ids]`` int64, those ids; None: all.

    Raises:
        ConfigError: the sizes do not go together.

    """
    config = target.config.get_text_config(decoder=True)
    layer = layer_config(config, size)
    module = Eagle3Module(layer, len(size.taps(config.num_hidden_layers)) * config.hidden_size, num_draft_ids)
    copy_ends(target, module.embed_tokens, module.lm_head, draft_ids)
    return module.to(target.device)


def copy_ends(
    target: PreTrainedModel, embed_tokens: nn.Embedding, lm_head: nn.Linear, draft_ids: Tensor | None
) -> None:
    """Let a drafter's embedding and output layer begin as the target's, as ``new_module`` says."""
    embedding = target.get_input_embeddings().weight.detach().float().cpu()
    output = target.get_output_embeddings().weight.detach().float().cpu()
    if embed_tokens.embedding_dim == embedding.shape[1]:
        embed_tokens.requires_grad_(False)
    else:
        directions = torch.linalg.svd(embedding, full_matrices=False).Vh[: embed_tokens.embedding_dim].T
        embedding, output = embedding @ directions, output @ directions
    with torch.no_grad():
        embed_tokens.weight.copy_(embedding)
        lm_head.weight.copy_(output if draft_ids is None else output[draft_ids.cpu()])


def layer_config(config: Any, size: DrafterSize, num_layers: int = 1) -> LlamaConfig:
    """Return the sizes of a drafter's layers, in proportion to the target's where ``size`` names none.

    Raises:
        ConfigError: the sizes do not go together.

    """
    hidden, head_dim = size.hidden_size or config.hidden_size, getattr(config, "head_dim", None)
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


def frequent_ids(texts: Texts, vocab_size: int, count: int | None) -> Tensor | None:
    """Return the ``count`` most frequent ids of texts, ``[count]`` int64 in rising order; None if that is all ids.

    Raises:
        ConfigError: ``count`` is not from 1 to ``vocab_size``.

    """
    if count is None or count == vocab_size:
        return None
    if not 1 <= count <= vocab_size:
        raise ConfigError(f"a draft vocabulary of {count} ids; expected 1 to {vocab_size}, the target's.")
    frequencies = torch.bincount(texts.token_ids.long(), minlength=vocab_size)
    return frequencies.argsort(descending=True, stable=True)[:count].sort().values


def save_drafter(
    module: Eagle3Module, folder: Path, target: PreTrainedModel, taps: tuple[int, ...], draft_ids: Tensor | None
) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the raw format, weights in bf16.

    Args:
        module: the trained drafter.
        folder: exists.
        target: the model that it was trained for.
        taps: ``DrafterSize.taps``.
        draft_ids: from ``frequent_ids``.

    """
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        # SGLang's ids are those of the layers behind which the taps are read.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps], "use_aux_hidden_state": True},
    }
    write_checkpoint(module, module.config, config, folder, target, draft_ids)


def write_checkpoint(
    module: nn.Module,
    layer: LlamaConfig,
    config: dict[str, Any],
    folder: Path,
    target: PreTrainedModel,
    draft_ids: Tensor | None,
) -> None:
    """Write ``config.json`` and ``model.safetensors``, weights in bf16; an embedding that is the target's is left out.

    Args:
        module: the trained drafter, whose parameters have the names of checkpoints.
        layer: sizes of its layers.
        config: further entries of ``config.json``.
        folder: exists.
        target: the model that it was trained for.
        draft_ids: from ``frequent_ids``.

    """
    vocab_size = layer.vocab_size
    weights = {
        name: weight.detach().to("cpu", _STORED).contiguous()
        for name, weight in module.named_parameters()
        if weight.requires_grad or not name.endswith("embed_tokens.weight")
    }
    if draft_ids is not None:
        ids = draft_ids.cpu()
        weights["d2t"] = ids - torch.arange(len(ids), device="cpu")
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool, device="cpu").index_fill_(0, ids, True)
    config = {
        **config,
        "model_type": "llama",
        **{name: getattr(layer, name) for name in LAYER_SIZES},
        "rope_parameters": layer.rope_parameters,
        "rope_theta": layer.rope_parameters["rope_theta"],  # the name that transformers 4 looks for
        "draft_vocab_size": vocab_size if draft_ids is None else len(draft_ids),
        "target_hidden_size": target.config.get_text_config(decoder=True).hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    write_drafter(folder, "model.safetensors", weights, config)
