"""Models whose layers lie on several devices: pages where the layers are, and the outputs of one device.

The devices are simulated (``support/far_devices.py``), where an operation on tensors of two devices fails.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from support.dflash import write_checkpoint as write_dflash
from support.eagle3 import write_checkpoint
from support.experts import tiny_mixture
from support.far_devices import FIRST, SECOND, far_devices, map_over, spread
from support.grids import grid
from support.models import TINY, tiny_model, truncated_copy
from support.recurrent_models import recurrent_model

accelerate = pytest.importorskip("accelerate")  # its hooks move rows between devices
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9] * 20, [4]]
PARAMS = [
    sd.SamplingParams(max_new_tokens=10, logprobs=True),
    sd.SamplingParams(max_new_tokens=10, logprobs=True, temperature=1.0, seed=5, repetition_penalty=1.3),
    sd.SamplingParams(max_new_tokens=10, logprobs=True, temperature=0.8, seed=6, logit_bias={3: 2.0}),
    sd.SamplingParams(max_new_tokens=10, logprobs=True, allowed_token_ids=list(range(0, 30, 2))),
]
_SPARSE = {
    **TINY,
    **dict.fromkeys(("num_hidden_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_key_value_heads", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "v_head_dim", "moe_intermediate_size", "index_n_heads", "index_head_dim"), 16),
    **{"q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "index_topk": 6},
    **{"mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"]},
}


def sparse_model():
    """Build a model whose second layer attends over what the indexer of the first one, on another device, selected."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(transformers.GlmMoeDsaConfig(**_SPARSE), dtype=torch.float32).eval()


MODELS = {
    "glm-5": sparse_model,
    **{name: lambda name=name: tiny_model(name) for name in ("llama", "qwen3", "gemma2", "gpt2", "llama4")},
    **{name: lambda name=name: recurrent_model(name) for name in ("qwen3-next", "mamba2", "jamba", "lfm2")},
    **{name: lambda name=name: tiny_mixture(name) for name in ("qwen3-moe", "mixtral")},
}


@pytest.fixture(autouse=True)
def _devices():
    with far_devices():
        yield


def tokens(model, drafter=None, **settings):
    """Tokens of every request; ``deterministic=True`` takes seconds here, and a test of its own has it."""
    engine = sd.Engine(model, drafter, deterministic=False, **settings)
    return [output.token_ids for output in outputs(engine)], engine


def outputs(engine):
    found = engine.generate(PROMPTS, PARAMS, progress=False)
    assert not [output.error for output in found if output.error is not None]
    return found


def devices_for(model):
    return [FIRST, "cpu", SECOND, "cpu", FIRST, SECOND][: model.config.get_text_config().num_hidden_layers]


def on_one_device(model):
    return tokens(copy.deepcopy(model), enforce_eager=True)[0]


@pytest.mark.parametrize("name", grid(list(MODELS), keep=["llama", "lfm2"]))
def test_tokens_are_those_of_one_device(name):
    model = MODELS[name]()
    expected = on_one_device(model)
    found, engine = tokens(spread(model, devices_for(model)), "ngram", max_batch_size=3)
    assert found == expected
    pool, devices = engine.core.pool, devices_for(model)
    assert [str(keys.device) for keys, _ in pool.layers[: pool.layout.num_layers]] == [
        devices[layer] for layer in pool.layout.places
    ]
    of_states = [str(tensors[0].device) for tensors in pool.states.tensors] if pool.states else []
    assert set(of_states) <= set(devices)
    assert len(of_states) == len(pool.layout.states)


@pytest.mark.parametrize(
    "drafter", grid(["model", "spread model", "ngram-trie", "eagle3", "dflash"], keep=["ngram-trie"])
)
def test_drafters(drafter, tmp_path):
    model = tiny_model("llama")
    settings = {}
    if drafter == "eagle3":
        write_checkpoint(tmp_path, model)
        draft, settings = str(tmp_path), {"draft_tree": 5}
    elif drafter == "dflash":  # its output layer is the target's, which lies on the last device
        write_dflash(tmp_path, model)
        draft = str(tmp_path)
    elif drafter == "ngram-trie":
        draft = drafter
    else:
        draft = truncated_copy(model, 2)
        draft = draft.to(FIRST) if drafter == "model" else spread(draft, [SECOND, "cpu"])
    found, engine = tokens(spread(model, [FIRST, "cpu", SECOND]), draft, max_batch_size=2, **settings)
    assert found == on_one_device(model)
    assert engine.last_run.decoding.num_draft_tokens > 0
    assert engine.describe()["devices"] == [FIRST, "cpu", SECOND]
    assert "several devices" in engine.describe()["why_no_program"]


@pytest.mark.parametrize("drafter", grid(["ngram-trie"], keep=[]))
def test_bits_are_those_of_plain_decoding(drafter):
    model = spread(tiny_model("llama"), [FIRST, "cpu", SECOND])
    plain, drafted = outputs(sd.Engine(model, None)), outputs(sd.Engine(model, drafter, max_batch_size=2))
    assert [(o.token_ids, o.logprobs) for o in drafted] == [(o.token_ids, o.logprobs) for o in plain]


@pytest.mark.parametrize("ends", grid({"cpu": ("cpu", "cpu"), "crossed": (SECOND, FIRST)}, keep=[]))
def test_ends_lie_elsewhere(ends):
    model = tiny_model("llama")
    found, engine = tokens(spread(model, [FIRST, FIRST, SECOND], ends), "ngram")
    assert found == on_one_device(model)
    assert str(engine.target.layout.device) == ends[0]


@pytest.mark.parametrize("name", grid(["llama", "qwen3-next"], keep=[]))
def test_hooks_of_accelerate_on_every_module(name):
    model = MODELS[name]()
    devices = [FIRST, SECOND, FIRST, SECOND, FIRST][: len(devices_for(model))]
    mapped = {name: torch.device(device) for name, device in map_over(model, devices, (FIRST, SECOND)).items()}
    skipped = model._skip_keys_device_placement
    dispatched = accelerate.dispatch_model(copy.deepcopy(model).requires_grad_(False), mapped, skip_keys=skipped)
    found, engine = tokens(dispatched)
    assert found == on_one_device(model)
    assert engine.target.hf.linears.served(are_chunked=False) == []
    num_linears = sum(type(module) is torch.nn.Linear for module in model.modules())
    assert len(engine.target.hf.linears._exchanged) == num_linears, "those behind a hook are computed here, too"


@pytest.mark.parametrize("case", grid(["folder"], keep=[]))
def test_a_folder_with_a_map(case):
    """Transformers keeps the CPU's part for a GPU; the engine computes it on the CPU."""
    pair = demo_pair()
    layers = {f"model.layers.{i}": device for i, device in enumerate([FIRST, "cpu", SECOND, SECOND])}
    ends = {"model.embed_tokens": FIRST, "model.rotary_emb": FIRST, "model.norm": SECOND, "lm_head": FIRST}
    settings = {"dtype": "float32", "deterministic": False}
    engine = sd.Engine(pair / "target", pair / "draft", device_map={**layers, **ends}, **settings)
    assert {str(weight.device) for weight in engine.target.model.parameters()} == {FIRST, "cpu", SECOND}
    expected = sd.generate(pair / "target", None, ["One day"], progress=False, **settings)
    assert engine.generate(["One day"], progress=False)[0].token_ids == expected[0].token_ids


@pytest.mark.parametrize("case", grid(["budget"], keep=[]))
def test_each_device_has_the_budget(case):
    budget = 400_000
    model = spread(tiny_model("llama"), [FIRST, SECOND, SECOND])
    plan = sd.Engine(model, "ngram", memory_bytes=budget, deterministic=False).memory_plan
    page = 16 * 2 * 2 * 8 * 4 * 2  # of two layers: 16 positions, keys and values of 2 heads of 8 numbers, 4 bytes each
    planned = sum(plan.terms.values())
    assert plan.terms["target KV"] == page * (plan.config.kv_cache_tokens // 16 + 1)
    assert planned <= budget < planned + page, "one page more does not fit on the device with most layers"
    with pytest.raises(sd.MemoryBudgetError, match="lacks"):
        sd.Engine(model, None, memory_bytes=60_000, deterministic=False)


def test_a_copy_of_the_target_does_not_draft():
    with pytest.raises(sd.NotYetSupportedError, match=r"draft='self:int4' .* its layers lie on several devices"):
        sd.Engine(spread(tiny_model("llama"), [FIRST, "cpu", SECOND]), "self", deterministic=False)


def test_a_spread_model_is_not_rounded():
    with pytest.raises(sd.ConfigError, match=r"target is spread over .*; leave quantization out"):
        sd.Engine(spread(tiny_model("llama"), [FIRST, "cpu", SECOND]), None, quantization="int8")


@pytest.mark.parametrize("other", [FIRST, "cpu"])
def test_an_operation_on_two_devices_fails(other):
    rows = torch.ones(2, 3).to(SECOND)
    with pytest.raises(RuntimeError, match=f"several devices: {other}, {SECOND}"):
        rows + torch.ones(2, 3).to(other)
    assert (rows + torch.tensor(1.0)).tolist() == [[2.0] * 3] * 2
