"""A new SpecBlock drafter for a target, and the checkpoint that it becomes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_fast.drafters.shared.checkpoint.weights import read_weights, target_ids
from specdec_fast.drafters.shared.checkpoint.writing import write_checkpoint
from specdec_fast.drafters.shared.new_drafter import DrafterSize, copy_ends, layer_config
from specdec_fast.drafters.specblock.checkpoint import NUM_CLASSES, read_config
from specdec_fast.drafters.specblock.module import SpecBlockModule

NUM_SLOTS = 4
_NUM_LAYERS = 2
_NOISE = 0.02


def new_blocks(
    target: PreTrainedModel, size: DrafterSize, num_draft_ids: int, draft_ids: Tensor | None
) -> SpecBlockModule:
    """Return a drafter to be trained, with the arguments and errors of ``eagle3.training.new_module``.

    At first the layers change nothing, and each slot is the sum of its condition, its token and its query, nearly.
    """
    layer = layer_config(target, size, _NUM_LAYERS)
    width = target.config.get_text_config(decoder=True).hidden_size
    module = SpecBlockModule(layer, size.feature_size(target), NUM_SLOTS, num_draft_ids, draft_ids)
    copy_ends(target, module.input_layer.embed_tokens, module.lm_head, draft_ids)
    same = torch.eye(layer.hidden_size, device="cpu")
    with torch.no_grad():
        module.input_layer.fuse.weight.normal_(std=_NOISE).add_(torch.cat([same, same, same], dim=1))
        for weight in module.shift_proj.parameters():
            weight.normal_(std=_NOISE).add_(torch.cat([same, torch.zeros_like(same)], dim=1))
        for decoder in module.decoder_layers():
            decoder.self_attn.o_proj.weight.zero_()
            decoder.mlp.down_proj.weight.zero_()
        if layer.hidden_size == width:  # the last tap and the output layer's input differ by few layers
            project = module.input_layer.condition_proj.weight
            project.normal_(std=_NOISE)[:, -layer.hidden_size :] += same
        module.input_layer.position_queries.weight.normal_(std=_NOISE)
    return module.to(target.device)


def load_blocks(folder: Path, target: PreTrainedModel) -> tuple[SpecBlockModule, dict[str, Tensor]]:
    """Return a drafter to be trained further, on the target's device, in fp32, and its maps of ids (``d2t``, ``t2d``).

    A SpecBlock drafter has loaded the folder for this target. If it has no embedding, the target's is used, and not
    trained.
    """
    config = read_config(folder)
    weights = read_weights(folder)
    draft_ids = target_ids(config, weights)
    feature_size = weights["input_layer.condition_proj.weight"].shape[1]
    module = SpecBlockModule(config.layer, feature_size, config.num_slots, config.draft_vocab_size, draft_ids)
    maps: dict[str, Tensor] = {name: weights.pop(name) for name in ("d2t", "t2d") if name in weights}
    embedding = module.input_layer.embed_tokens.weight
    if "input_layer.embed_tokens.weight" not in weights:
        embedding.requires_grad_(False)
        weights["input_layer.embed_tokens.weight"] = target.get_input_embeddings().weight.detach()
    module.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return module.to(target.device), maps


def save_blocks(
    module: SpecBlockModule,
    folder: Path,
    target: PreTrainedModel,
    taps: tuple[int, ...],
    draft_ids: Tensor | None,
    tree_nodes: int,
) -> None:
    """Write a checkpoint (``write_checkpoint``); its trees will have ``tree_nodes`` nodes at most."""
    config = {
        "architectures": ["LlamaForCausalLMSpecBlock"],
        "diffspec_draft_token_num": module.num_slots,
        "rank_classes": NUM_CLASSES,
        "tap_layers": list(taps),
        "tree_nodes": tree_nodes,
    }
    write_checkpoint(module, module.config, config, folder, target, draft_ids)
