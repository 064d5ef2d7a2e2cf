"""Checkpoints with a random MTP layer in every format, and what it drafts, computed from the formulas."""

from __future__ import annotations

import copy

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, Qwen2Config, Qwen3Config

from support.models import TINY, TINY_GROUPED

NUM_LAYERS = 3
_MIXTURE = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS = {
    "qwen2": Qwen2Config(**TINY_GROUPED),
    "qwen3": Qwen3Config(**TINY_GROUPED, head_dim=16),
    "glm4_moe": Glm4MoeConfig(**TINY_GROUPED, head_dim=16, use_qk_norm=True, **_MIXTURE),
    "deepseek_v3": DeepseekV3Config(**TINY, num_key_value_heads=4, **_LATENT, **_MIXTURE),
}
# By format: what stands before a name, and the names of embedding norm, hidden norm, projection and last norm.
NAMES = {
    "deepseek": ("model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
PARTS = ("enorm", "hnorm", "eh_proj", "norm")


class Case:
    """A target of three layers, and an MTP layer: the fourth layer of a larger model of the same class.

    Attributes:
        target: the model.
        block: the decoder layer, as a module of transformers.
        parts: the other weights by ``PARTS``.
        eps: of its norms.

    """

    def __init__(self, architecture, seed=0):
        torch.manual_seed(seed)
        config = copy.deepcopy(CONFIGS[architecture])
        config.num_hidden_layers = NUM_LAYERS + 1
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None):
                setattr(config, name, [*getattr(config, name)[:NUM_LAYERS], getattr(config, name)[NUM_LAYERS - 1]])
        self.larger = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.target = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[architecture]), dtype=torch.float32).eval()
        self.target.load_state_dict(self.larger.state_dict(), strict=False)
        self.block, self.eps = self.larger.model.layers[NUM_LAYERS], config.rms_norm_eps
        size = config.hidden_size
        shapes = zip(PARTS, ((size,), (size,), (size, 2 * size), (size,)), strict=True)
        self.parts = {n: torch.randn(s) * 0.2 + (1.0 if len(s) == 1 else 0.0) for n, s in shapes}
        self.is_hidden_first = False

    def write(self, folder, kind, shards=1):
        """Write target and MTP layer as one checkpoint; return all its weights."""
        prefix, *names = NAMES[kind]
        self.is_hidden_first = kind == "mimo"
        self.larger.save_pretrained(folder / "larger")
        behind = f"model.layers.{NUM_LAYERS}."
        stored = load_file(folder / "larger" / "model.safetensors")
        own = {name.removeprefix(behind): weight for name, weight in stored.items() if name.startswith(behind)}
        block = f"{prefix}layers.0." if kind == "qwen" else prefix
        weights = {f"{block}{name}": weight for name, weight in own.items()}
        weights |= {f"{prefix}{name}.weight": self.parts[part] for name, part in zip(names, PARTS, strict=True)}
        if kind == "deepseek":
            weights |= {
                f"{prefix}embed_tokens.weight": self.target.get_input_embeddings().weight.detach().clone(),
                f"{prefix}shared_head.head.weight": self.target.get_output_embeddings().weight.detach().clone(),
            }
        self.target.save_pretrained(folder)
        write_mtp(folder, load_file(folder / "model.safetensors") | weights, shards)
        return weights

    @torch.no_grad()
    def drafted(self, features, token_ids, choose, limit):
        """Return the draft tokens for ``features [n - 1, 1, H]`` of a text of ``n`` tokens, row after row."""
        inputs, tokens, drafted = list(features[:, 0]), list(token_ids[1:]), []
        for ahead in range(limit if inputs else 0):
            hidden = self.result(torch.stack(inputs), torch.tensor(tokens))
            drafted.append(choose(self.target.lm_head(hidden), ahead))
            inputs.append(hidden)
            tokens.append(drafted[-1])
        return drafted

    def result(self, hidden, tokens):
        """Return the result of the last row, for rows of hidden states ``[n, H]`` and tokens ``[n]``."""
        embedded = self.rms_norm(self.target.get_input_embeddings().weight[tokens], self.parts["enorm"])
        hidden = self.rms_norm(hidden, self.parts["hnorm"])
        pair = (hidden, embedded) if self.is_hidden_first else (embedded, hidden)
        rows = torch.cat(pair, dim=-1) @ self.parts["eh_proj"].T
        dense = self.by_formula if type(self.block).__name__.startswith("Qwen") else self.by_module
        return self.rms_norm(dense(rows), self.parts["norm"])[-1]

    def rms_norm(self, rows, weight):
        return rows / (rows.square().mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def by_module(self, rows):
        """The decoder layer as transformers computes it, for mixtures of experts and latent attention."""
        factors = self.target.model.rotary_emb(rows, torch.arange(len(rows))[None])
        mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
        return self.block(rows[None], attention_mask=mask, position_embeddings=factors)[0]

    def by_formula(self, rows):
        """The dense decoder layer of Qwen2 and Qwen3, from its weights."""
        w = self.block.state_dict()
        normed = self.rms_norm(rows, w["input_layernorm.weight"])
        query, key, value = (self.heads(w, name, normed) for name in "qkv")
        query, key = rotated(query), rotated(key)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        future = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        rows = rows + attended @ w["self_attn.o_proj.weight"].T
        normed = self.rms_norm(rows, w["post_attention_layernorm.weight"])
        inner = silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
        return rows + inner @ w["mlp.down_proj.weight"].T

    def heads(self, w, name, rows):
        out = rows @ w[f"self_attn.{name}_proj.weight"].T
        if (bias := w.get(f"self_attn.{name}_proj.bias")) is not None:
            out = out + bias
        out = out.unflatten(1, (-1, self.block.self_attn.head_dim))
        norm = w.get(f"self_attn.{name}_norm.weight")
        return out if norm is None else self.rms_norm(out, norm)


def rotated(rows):
    """RoPE with theta 10,000 on ``[n, heads, head_dim]``, row i at position i."""
    half = rows.shape[-1] // 2
    angles = torch.arange(len(rows))[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = rows[..., :half], rows[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def write_mtp(folder, weights, shards=1):
    """Replace the weights of a checkpoint; in several files, with an index."""
    import json

    (folder / "model.safetensors").unlink(missing_ok=True)
    names = sorted(weights)
    if shards == 1:
        save_file({name: weights[name].contiguous() for name in names}, folder / "model.safetensors", {"format": "pt"})
        return
    files = {f"model-{i}.safetensors": names[i::shards] for i in range(shards)}
    for file, own in files.items():
        save_file({name: weights[name].contiguous() for name in own}, folder / file, {"format": "pt"})
    index = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
