"""Task "devices" of ``bench.gpu``: a target whose layers lie on the GPU and on the CPU, as ``device_map`` spreads them.

Every output must be that of plain decoding at batch 1 by the same target. The weights are random, and the speeds, which
are measured beside other gates, are those of the CPU's layers. On a CPU alone, all layers lie there.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.common.measurement import Tokens
from bench.gpu_.isolated_tasks import Progress, Settings
from bench.gpu_.ranks import BATCH_SIZES, DRAFT_MODEL, PLAIN, TEMPERATURES, Case, compare, decode_all, params_of
from specdec_fast import Engine
from specdec_fast.models.placement import place

_NAMES = (PLAIN, DRAFT_MODEL)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the target, which has layers of the shape of Qwen3-0.6B, and of the comparison."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_prompts: int
    new_tokens: int
    num_draft_tokens: int


FULL = Sizes(1024, 151936, 4, 3, 16, 3)
SMOKE = Sizes(64, 256, 2, 2, 4, 2)


def run(settings: Settings, progress: Progress) -> None:
    """Decode with and without a draft model, and compare what is emitted with plain decoding at batch 1."""
    sizes = SMOKE if settings.smoke else FULL
    device = torch.device(settings.device)
    target = target_of(sizes)
    draft = first_layer_of(target)
    place(target, map_of(sizes, str(device)))
    engine = Engine(
        target,
        draft.to(device),
        num_draft_tokens=sizes.num_draft_tokens,
        max_batch_size=max(BATCH_SIZES),
    )
    described = engine.describe()
    names = ("devices", "ops", "why_no_program", "rows_one_by_one", "own_linears")
    progress.note(prompts=sizes.num_prompts, **{name: described[name] for name in names})
    generator = torch.Generator(device="cpu").manual_seed(0)
    ids = torch.randint(sizes.vocab_size, (sizes.num_prompts, 12), generator=generator, device="cpu")
    prompts: list[Any] = ids.tolist()
    found: dict[float, Tokens] = {}  # of plain decoding at batch 1, by temperature
    for temperature, name, batch_size in product(TEMPERATURES, _NAMES, BATCH_SIZES):
        params = params_of(sizes.num_prompts, sizes.new_tokens, temperature, 0 if name == PLAIN else None)
        case = Case(name, batch_size, temperature)
        decode = partial(decode_all, engine, prompts, params, batch_size)
        progress.attempt(str(case), partial(compare, decode, case, found, progress))


def target_of(sizes: Sizes) -> nn.Module:
    """Return a random target in bfloat16 on the CPU."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=3 * sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.hidden_size // 64,
        num_key_value_heads=max(1, sizes.hidden_size // 128),
        head_dim=128,
        eos_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    return model


def first_layer_of(target: Any) -> Any:
    """Return a draft model of the target's first layer and its ends."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1]
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    draft.load_state_dict(target.state_dict(), strict=False)
    return draft


def map_of(sizes: Sizes, device: str) -> dict[str, str]:
    """Put the second half of the layers on the CPU, and everything else on the device."""
    half = sizes.num_layers // 2
    layers = {f"model.layers.{i}": device if i < half else "cpu" for i in range(sizes.num_layers)}
    return {"model.embed_tokens": device, "model.rotary_emb": device, "model.norm": device, "lm_head": device, **layers}
