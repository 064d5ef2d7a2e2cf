"""New Clover heads for a target, their training, and the checkpoint that they become (Xiao et al., arXiv 2405.00263).

The loss is that of EAGLE-3: head i is trained as drafting step i. The output layer stays the target's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specdec_fast.drafters.clover.checkpoint import MODEL_TYPE
from specdec_fast.drafters.clover.model import normalised
from specdec_fast.drafters.shared.checkpoint.weights import WEIGHTS_FILE
from specdec_fast.drafters.shared.checkpoint.writing import layer_settings, write_files
from specdec_fast.drafters.shared.new_drafter import DrafterSize, layer_config, output_weight
from specdec_fast.drafters.shared.trainable import DrafterModule, ResidualBlock
from specdec_fast.models.hidden_states import decoder_layers

_NOISE = 0.1  # length of the noise in a row of the projections, whose identity has length 1


class _Head(nn.Module):
    """One head: the gated attention to the token before, and the residual blocks in front of the output layer."""

    def __init__(self, config: LlamaConfig, num_blocks: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self._num_gates = config.num_attention_heads
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        for projection in (self.q_proj, self.k_proj):
            nn.init.eye_(projection.weight)
            with torch.no_grad():
                projection.weight += torch.randn_like(projection.weight) * (_NOISE / hidden**0.5)
        nn.init.zeros_(self.v_proj.weight)
        self.blocks = nn.ModuleList(ResidualBlock(hidden) for _ in range(num_blocks))

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the hidden states ``[..., H]`` behind one more token, whose normalised rows are ``embedded``."""
        shape = (self._num_gates, -1)
        query = self.q_proj(self.norm(hidden)).unflatten(-1, shape)
        key, value = (projection(embedded).unflatten(-1, shape) for projection in (self.k_proj, self.v_proj))
        gate = cosine_similarity(query, key, dim=-1)
        output: Tensor = hidden + (gate[..., None] * value).flatten(-2)
        return output


class CloverModule(DrafterModule):
    """An augmenting block and heads in sequence. Its ``state_dict()`` has the names of checkpoints.

    All heads share ``output [vocab_size, H]``, the weights of the target's output layer, which stay. The residual
    blocks of a head begin as the identity.
    """

    def __init__(self, config: LlamaConfig, output: Tensor, num_heads: int, num_blocks: int = 1) -> None:
        super().__init__()
        self.config = config
        self.augmenting_block = LlamaDecoderLayer(config, layer_idx=0)
        self.heads = nn.ModuleList(_Head(config, num_blocks) for _ in range(num_heads))
        self._rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("_output", output, persistent=False)
        self.register_buffer("_embedding", normalised(output), persistent=False)

    def unroll(self, features: Tensor, token_ids: Tensor, num_steps: int) -> list[Tensor]:
        length = token_ids.shape[1]
        factors = self._rotary(features, torch.arange(length, device=token_ids.device)[None])
        # Without a mask the layer's attention is causal. Padding comes last, so no other row sees it.
        hidden = self.augmenting_block(features, position_embeddings=factors)
        embedded = self._embedding[token_ids]  # type: ignore[index]
        logits = []
        for step, head in enumerate(self.heads[:num_steps]):
            hidden = head(hidden[:, : length - 1 - step], embedded[:, step + 1 :])
            rows = hidden
            for block in head.blocks:  # type: ignore[union-attr]
                rows = block(rows)
            logits.append(rows @ self._output.T)
        return logits


def new_clover(target: PreTrainedModel, num_heads: int) -> CloverModule:
    """Return heads to be trained, on the target's device, in fp32.

    The augmenting block begins as the identity: its two output projections are 0. All else in it begins as in the
    target's last layer, if that has the weights of a Llama layer and no others.
    The errors are those of ``output_weight``.
    """
    layer = layer_config(target, DrafterSize())
    layer._attn_implementation = "sdpa"
    module = CloverModule(layer, output_weight(target), num_heads)
    block = module.augmenting_block
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    last = decoder_layers(target, num_layers)[-1].state_dict()
    if {name: w.shape for name, w in last.items()} == {name: w.shape for name, w in block.state_dict().items()}:
        block.load_state_dict(last)
    for projection in (block.self_attn.o_proj, block.mlp.down_proj):
        nn.init.zeros_(projection.weight)
    return module.to(target.device)


def save_clover(module: CloverModule, folder: Path, choices: list[list[int]]) -> None:
    """Write ``config.json`` and ``model.safetensors``; the arguments are those of ``save_heads`` (Medusa)."""
    config = {
        "architectures": ["CloverModel"],
        "model_type": MODEL_TYPE,
        "clover_num_heads": len(module.heads),
        "clover_num_layers": len(module.heads[0].blocks),  # type: ignore[arg-type]
        "clover_choices": choices,
        **layer_settings(module.config),
    }
    write_files(folder, WEIGHTS_FILE, module.state_dict(), config)
