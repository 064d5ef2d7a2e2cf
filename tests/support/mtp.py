"""Checkpoints with a random MTP layer in every format, and what it drafts, computed from the formulas."""

from __future__ import annotations

import copy

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from specdec_fast.ops.registry import all_ops
from support.models import TINY, TINY_GROUPED, VOCAB_SIZE

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
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
# Gated attention; layers of linear attention where "hybrid" is in the name.
_GATED = {
    **TINY_GROUPED,
    "head_dim": 16,
    "layer_types": ["full_attention"] * NUM_LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_HYBRID = {**_GATED, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_WITHOUT_DENSE = {name: value for name, value in _GATED.items() if name != "intermediate_size"}
CONFIGS = {
    "qwen2": Qwen2Config(**TINY_GROUPED),
    "qwen3": Qwen3Config(**TINY_GROUPED, head_dim=16),
    "glm4_moe": Glm4MoeConfig(**TINY_GROUPED, head_dim=16, use_qk_norm=True, **_MIXTURE),
    "deepseek_v3": DeepseekV3Config(**TINY, num_key_value_heads=4, **_LATENT, **_MIXTURE),
    "qwen3_next": Qwen3NextConfig(**_GATED, num_experts=0),
    "qwen3_next_moe": Qwen3NextConfig(**_GATED, **_EXPERTS, decoder_sparse_step=2),
    "qwen3_5": Qwen3_5TextConfig(**_GATED),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**_WITHOUT_DENSE, **_EXPERTS),
    "qwen3_next_hybrid": Qwen3NextConfig(**_HYBRID, **_EXPERTS),
    "qwen3_5_hybrid": Qwen3_5TextConfig(**_HYBRID),
}
HAS_PROGRAMS = all_ops()["linear"].why_unavailable("cpp") is None
GATED = tuple(name for name in CONFIGS if name.startswith(("qwen3_next", "qwen3_5")))
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
        centre: what a norm adds to its weight: 1 for Qwen3-Next and Qwen3.5 (``GATED``), else 0.
        share_rotated: of the numbers of a head that are rotated.
        ends: embedding and output layer that are the MTP layer's own.

    """

    def __init__(self, architecture, seed=0):
        torch.manual_seed(seed)
        config = copy.deepcopy(CONFIGS[architecture])
        config.num_hidden_layers = NUM_LAYERS + 1
        self.is_gated = architecture in GATED
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None):
                last = "full_attention" if self.is_gated else getattr(config, name)[NUM_LAYERS - 1]
                setattr(config, name, [*getattr(config, name)[:NUM_LAYERS], last])
        self.larger = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.centre = 1.0 if self.is_gated else 0.0
        self.share_rotated = 0.25 if self.is_gated else 1.0
        if self.is_gated:
            for name, weight in self.larger.named_parameters():
                if "norm" in name:
                    weight.data.normal_(std=0.2)
        self.target = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[architecture]), dtype=torch.float32).eval()
        self.target.load_state_dict(self.larger.state_dict(), strict=False)
        self.block, self.eps = self.larger.model.layers[NUM_LAYERS], config.rms_norm_eps
        size = config.hidden_size
        shapes = zip(PARTS, ((size,), (size,), (size, 2 * size), (size,)), strict=True)
        self.parts = {n: torch.randn(s) * 0.2 + (1.0 - self.centre if len(s) == 1 else 0.0) for n, s in shapes}
        self.is_hidden_first = False
        self.ends = {}

    def write(self, folder, kind, shards=1, own_ends=(), stacked=False, whole=None):
        """Write target and MTP layer as one checkpoint; return the layer's weights.

        Of ``embed_tokens`` and ``lm_head``, the layer has its own if ``own_ends`` names it. Experts are one by one, or
        ``stacked`` to one tensor. ``whole`` is a model that contains the target, and is written in its place.
        """
        prefix, *names = NAMES[kind]
        self.is_hidden_first = kind == "mimo"
        self.larger.save_pretrained(folder / "larger")
        behind = f"model.layers.{NUM_LAYERS}."
        stored = load_file(folder / "larger" / "model.safetensors")
        own = {name.removeprefix(behind): weight for name, weight in stored.items() if name.startswith(behind)}
        if stacked:
            own = {name: weight.detach() for name, weight in self.block.state_dict().items()}
        block = f"{prefix}layers.0." if kind == "qwen" else prefix
        weights = {f"{block}{name}": weight for name, weight in own.items()}
        weights |= {f"{prefix}{name}.weight": self.parts[part] for name, part in zip(names, PARTS, strict=True)}
        if kind == "deepseek":
            weights |= {
                f"{prefix}embed_tokens.weight": self.target.get_input_embeddings().weight.detach().clone(),
                f"{prefix}shared_head.head.weight": self.target.get_output_embeddings().weight.detach().clone(),
            }
        self.ends = {name: torch.randn(VOCAB_SIZE, self.target.config.hidden_size) * 0.3 for name in own_ends}
        weights |= {f"{prefix}{name}.weight": weight for name, weight in self.ends.items()}
        (self.target if whole is None else whole).save_pretrained(folder)
        write_mtp(folder, load_file(folder / "model.safetensors") | weights, shards)
        return weights

    @torch.no_grad()
    def drafted(self, features, token_ids, choose, limit):
        """Return the draft tokens for ``features [n - 1, 1, H]`` of a text of ``n`` tokens, row after row."""
        inputs, tokens, drafted = list(features[:, 0]), list(token_ids[1:]), []
        for ahead in range(limit if inputs else 0):
            hidden = self.results(torch.stack(inputs), torch.tensor(tokens))[-1]
            drafted.append(choose(hidden @ self.output_layer.T, ahead))
            inputs.append(hidden)
            tokens.append(drafted[-1])
        return drafted

    @property
    def output_layer(self):
        return self.ends.get("lm_head", self.target.lm_head.weight)

    @torch.no_grad()
    def logits(self, hidden, tokens):
        """Return the logits ``[n, vocab_size]`` for rows of hidden states ``[n, H]`` and tokens ``[n]``."""
        return self.results(hidden, tokens) @ self.output_layer.T

    def results(self, hidden, tokens):
        """Return the results ``[n, H]`` for rows of hidden states ``[n, H]`` and tokens ``[n]``."""
        embedding = self.ends.get("embed_tokens", self.target.get_input_embeddings().weight)
        embedded = self.rms_norm(embedding[tokens], self.parts["enorm"])
        hidden = self.rms_norm(hidden, self.parts["hnorm"])
        pair = (hidden, embedded) if self.is_hidden_first else (embedded, hidden)
        rows = torch.cat(pair, dim=-1) @ self.parts["eh_proj"].T
        is_formula = self.is_gated or type(self.block).__name__.startswith("Qwen")
        computed = self.by_formula(rows) if is_formula else self.by_module(rows)
        return self.rms_norm(computed, self.parts["norm"])

    def rms_norm(self, rows, weight):
        return rows / (rows.square().mean(-1, keepdim=True) + self.eps).sqrt() * (self.centre + weight)

    def by_module(self, rows):
        """The decoder layer as transformers computes it, for mixtures of experts and latent attention."""
        factors = self.target.model.rotary_emb(rows, torch.arange(len(rows))[None])
        mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
        return self.block(rows[None], attention_mask=mask, position_embeddings=factors)[0]

    def by_formula(self, rows):
        """The decoder layer of Qwen2, Qwen3, Qwen3-Next and Qwen3.5, from its weights."""
        w = self.block.state_dict()
        normed = self.rms_norm(rows, w["input_layernorm.weight"])
        query, key, value = (self.heads(w, name, normed) for name in "qkv")
        gate = None
        if self.is_gated:  # every head has its query, then its gate
            query, gate = query[:, 0::2], query[:, 1::2]
        if "self_attn.q_norm.weight" in w:
            query = self.rms_norm(query, w["self_attn.q_norm.weight"])
            key = self.rms_norm(key, w["self_attn.k_norm.weight"])
        num_rotated = int(query.shape[-1] * self.share_rotated)
        query, key = rotated(query, num_rotated), rotated(key, num_rotated)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        future = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        if gate is not None:
            attended = attended * gate.flatten(1).sigmoid()
        rows = rows + attended @ w["self_attn.o_proj.weight"].T
        normed = self.rms_norm(rows, w["post_attention_layernorm.weight"])
        return rows + (self.mixture(w, normed) if "mlp.gate.weight" in w else mlp(w, "mlp.", normed))

    def mixture(self, w, rows):
        """The sum of each row's best experts, by their share of the softmax, and of a gated expert of all rows."""
        scores = (rows @ w["mlp.gate.weight"].T).softmax(-1)
        result = mlp(w, "mlp.shared_expert.", rows) * (rows @ w["mlp.shared_expert_gate.weight"].T).sigmoid()
        for i, row in enumerate(rows):
            best, chosen = scores[i].topk(2)
            for share, expert in zip(best / best.sum(), chosen, strict=True):
                gate, up = (w["mlp.experts.gate_up_proj"][expert] @ row).chunk(2)
                result[i] += share * (w["mlp.experts.down_proj"][expert] @ (silu(gate) * up))
        return result

    def heads(self, w, name, rows):
        out = rows @ w[f"self_attn.{name}_proj.weight"].T
        if (bias := w.get(f"self_attn.{name}_proj.bias")) is not None:
            out = out + bias
        return out.unflatten(1, (-1, self.block.self_attn.head_dim))


def mlp(w, prefix, rows):
    inner = silu(rows @ w[f"{prefix}gate_proj.weight"].T) * (rows @ w[f"{prefix}up_proj.weight"].T)
    return inner @ w[f"{prefix}down_proj.weight"].T


def rotated(rows, num_rotated):
    """RoPE with theta 10,000 on the first numbers of ``[n, heads, head_dim]``, row i at position i."""
    rows, rest = rows[..., :num_rotated], rows[..., num_rotated:]
    half = num_rotated // 2
    angles = torch.arange(len(rows))[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = rows[..., :half], rows[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


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
