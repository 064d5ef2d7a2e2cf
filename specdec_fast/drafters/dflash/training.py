"""A new DFlash or DSpark drafter for a target, and the checkpoint that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from specdec_fast.drafters.dflash.module import DFlashModule
from specdec_fast.drafters.shared.checkpoint.weights import WEIGHTS_FILE
from specdec_fast.drafters.shared.checkpoint.writing import layer_settings, write_files
from specdec_fast.drafters.shared.new_drafter import DrafterSize, layer_config, output_weight


@dataclass(frozen=True)
class BlockSize:
    """The sizes of a drafter beside those of its layers."""

    num_layers: int = 2
    block_size: int = 8  # rows of a block; without a Markov head it drafts one token less
    markov_rank: int = 0  # of DSpark's Markov head, with which there is a confidence head; 0: none of them


def new_dflash(target: PreTrainedModel, size: DrafterSize, block: BlockSize, mask_token_id: int) -> DFlashModule:
    """Return a drafter to be trained, on the target's device, in fp32, with the target's embedding and output layer.

    Its hidden size is the target's. The errors are those of ``output_weight`` and ``layer_config``.
    """
    layer = layer_config(target, size, block.num_layers)
    embedding = target.get_input_embeddings().weight.detach().float()
    output = output_weight(target)
    width = size.feature_size(target)
    module = DFlashModule(layer, width, block.block_size, mask_token_id, block.markov_rank, embedding, output)
    return module.to(target.device)


def save_dflash(module: DFlashModule, folder: Path, target: PreTrainedModel, taps: tuple[int, ...]) -> None:
    """Write a checkpoint in the format of z-lab and SGLang; ``taps`` are those of ``DrafterSize``."""
    head = module.markov_head
    markov = {}
    if head is not None:
        markov = {
            "markov_rank": head.markov_w1.embedding_dim,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    config = {
        "architectures": ["DFlashDraftModel" if head is None else "DSparkDraftModel"],
        "model_type": "qwen3",
        **layer_settings(module.config),
        "attention_bias": False,
        "num_target_layers": target.config.get_text_config(decoder=True).num_hidden_layers,
        "block_size": module.block_size,
        **markov,
        # An id is that of the layer behind which a tap is read.
        "dflash_config": {"mask_token_id": module.mask_token_id, "target_layer_ids": [tap - 1 for tap in taps]},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    write_files(folder, WEIGHTS_FILE, dict(module.named_parameters()), config)
