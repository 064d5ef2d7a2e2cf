"""New Medusa heads for a target, their training, and the checkpoint that they become (Cai et al., arXiv 2401.10774).

The loss is that of EAGLE-3: head i is trained as drafting step i. So the heads learn the target's distribution
instead of the one token that it drew, which has the same gradient on average, and less noise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from specdec_fast.errors import ConfigError
from specdec_fast.training.drafter_module import DrafterModule
from specdec_fast.training.files import write_drafter

_STORED = torch.bfloat16


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


class MedusaModule(DrafterModule):
    """Heads over the input of the target's output layer. ``heads.state_dict()`` has the names of checkpoints.

    Args:
        output: ``[vocab_size, H]``, the weights of the target's output layer, with which every head begins.
        num_heads: number of tokens to draft.
        num_blocks: residual blocks of a head; they begin as the identity.

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
        """Return the logits of the first ``num_steps`` heads at every position; see ``DrafterModule``."""
        length = token_ids.shape[1]
        return [head(features[:, : length - 1 - step]) for step, head in enumerate(self.heads[:num_steps])]

    def output_layers(self) -> list[nn.Module]:
        """Return the last layer of every head; see ``DrafterModule``."""
        return [head[-1] for head in self.heads]  # type: ignore[index]


def new_heads(target: PreTrainedModel, num_heads: int) -> MedusaModule:
    """Return heads to be trained, on the target's device, in fp32.

    Raises:
        ConfigError: the target's output layer is not one matrix without a bias, so no head can begin as its copy.

    """
    layer = target.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        raise ConfigError(
            f"the output layer of {type(target).__name__} is a {type(layer).__name__}; Medusa heads begin as a copy of "
            "a linear layer without a bias."
        )
    return MedusaModule(layer.weight.detach().float(), num_heads).to(target.device)


def save_heads(module: MedusaModule, folder: Path, choices: list[list[int]]) -> None:
    """Write ``config.json`` and ``medusa_lm_head.safetensors``, weights in bf16.

    Args:
        module: the trained heads.
        folder: exists.
        choices: the tree that is drafted without ``EngineConfig.draft_tree``, as rank paths.

    """
    weights = {name: w.detach().to("cpu", _STORED).contiguous() for name, w in module.heads.state_dict().items()}
    config = {
        "model_type": "medusa",
        "medusa_num_heads": len(module.heads),
        "medusa_num_layers": len(module.heads[0]) - 1,  # type: ignore[arg-type]
        "medusa_choices": choices,
    }
    write_drafter(folder, "medusa_lm_head.safetensors", weights, config)


@torch.no_grad()
def hit_counts(module: DrafterModule, features: Tensor, token_ids: Tensor, lengths: Tensor, shape: list[int]) -> Tensor:
    """Count how often the token at each depth is the one of each rank, where all tokens before it had a counted rank.

    Args:
        module: drafts; step d has depth d.
        features: ``[B, L, feature_size]`` of texts.
        token_ids: ``[B, L]`` int64, the texts, padded at the end.
        lengths: ``[B]``.
        shape: ``[depths, ranks]`` to count; texts of L tokens have L - 2 depths at most.

    Returns:
        ``[depths, 1 + ranks]`` int64: the number of positions that were looked at, then those of each rank.

    """
    num_depths, num_ranks = shape
    counts = torch.zeros(num_depths, 1 + num_ranks, dtype=torch.int64, device="cpu")
    reached = torch.ones_like(token_ids, dtype=torch.bool)
    for depth, logits in enumerate(module.unroll(features, token_ids, min(num_depths, token_ids.shape[1] - 2))):
        positions = torch.arange(2 + depth, token_ids.shape[1], device=token_ids.device)
        valid = reached[:, : len(positions)] & (positions < lengths[:, None])
        best = logits[:, : len(positions)].topk(num_ranks, dim=-1).indices
        is_hit = (best == token_ids[:, 2 + depth :, None]) & valid[..., None]
        counts[depth, 0] += valid.sum().cpu()
        counts[depth, 1:] += is_hit.sum((0, 1)).cpu()
        reached = is_hit.any(-1)
    return counts
