"""New Medusa heads for a target, their training, and the checkpoint that they become (Cai et al., arXiv 2401.10774).

The loss is that of EAGLE-3: head i is trained as drafting step i. So the heads learn the target's distribution
instead of the one token that it drew, which has the same gradient on average, and less noise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_fast.drafters.medusa.checkpoint import HEADS_FILE
from specdec_fast.drafters.shared.checkpoint.writing import write_files
from specdec_fast.drafters.shared.new_drafter import output_weight
from specdec_fast.drafters.shared.trainable import DrafterModule, ResidualBlock


class MedusaModule(DrafterModule):
    """Heads over the input of the target's output layer. ``heads.state_dict()`` has the names of checkpoints.

    Every head begins with ``output [vocab_size, H]``, the weights of the target's output layer; its residual blocks
    begin as the identity.
    """

    def __init__(self, output: Tensor, num_heads: int, num_blocks: int = 1) -> None:
        super().__init__()
        vocab_size, hidden_size = output.shape
        self.heads = nn.ModuleList()
        for _ in range(num_heads):
            last = nn.Linear(hidden_size, vocab_size, bias=False)
            with torch.no_grad():
                last.weight.copy_(output)
            self.heads.append(nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_blocks)), last))

    def unroll(self, features: Tensor, token_ids: Tensor, num_steps: int) -> list[Tensor]:
        length = token_ids.shape[1]
        return [head(features[:, : length - 1 - step]) for step, head in enumerate(self.heads[:num_steps])]

    def output_layers(self) -> list[nn.Module]:
        return [head[-1] for head in self.heads]  # type: ignore[index]


def new_heads(target: PreTrainedModel, num_heads: int) -> MedusaModule:
    """Return heads to be trained, on the target's device, in fp32.

    Raises:
        ConfigError: the target's output layer is not one matrix without a bias, so no head can begin as its copy.
    """
    return MedusaModule(output_weight(target), num_heads).to(target.device)


def save_heads(module: MedusaModule, folder: Path, choices: list[list[int]]) -> None:
    """Write ``config.json`` and ``medusa_lm_head.safetensors``, weights in bf16, into a folder that exists.

    ``choices`` is the tree that is drafted without ``EngineConfig.draft_tree``, as rank paths.
    """
    config = {
        "model_type": "medusa",
        "medusa_num_heads": len(module.heads),
        "medusa_num_layers": len(module.heads[0]) - 1,  # type: ignore[arg-type]
        "medusa_choices": choices,
    }
    write_files(folder, HEADS_FILE, module.heads.state_dict(), config)
