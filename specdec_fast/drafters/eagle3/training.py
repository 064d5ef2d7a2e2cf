"""A new EAGLE-3 drafter for a target, and the checkpoint that it becomes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from specdec_fast.drafters.eagle3.module import Eagle3Module
from specdec_fast.drafters.shared.checkpoint.writing import write_checkpoint
from specdec_fast.drafters.shared.new_drafter import DrafterSize, copy_ends, layer_config


def new_module(
    target: PreTrainedModel, size: DrafterSize, num_draft_ids: int, draft_ids: Tensor | None
) -> Eagle3Module:
    """Return a drafter to be trained, on the target's device, in fp32; ``copy_ends`` says how its ends begin.

    ``draft_ids [num_draft_ids]`` int64 are the ids that it can propose; None: all. The errors are those of
    ``layer_config``.
    """
    module = Eagle3Module(layer_config(target, size, size.num_layers), size.feature_size(target), num_draft_ids)
    copy_ends(target, module.embed_tokens, module.lm_head, draft_ids)
    return module.to(target.device)


def save_drafter(
    module: Eagle3Module, folder: Path, target: PreTrainedModel, taps: tuple[int, ...], draft_ids: Tensor | None
) -> None:
    """Write a checkpoint in the raw format (``write_checkpoint``); ``taps`` are those of ``DrafterSize``."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        # SGLang's ids are those of the layers behind which the taps are read.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps], "use_aux_hidden_state": True},
    }
    write_checkpoint(module, module.config, config, folder, target, draft_ids)
