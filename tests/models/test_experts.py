"""Mixtures of experts: as programs and by PyTorch, with the same bits in every batch, equal to ``generate()``."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import specdec_fast as sd
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.models.experts import expert_configs, mixture
from specdec_fast.ops import resolve
from specdec_fast.ops.registry import all_ops
from specdec_fast.planner.checkpoint import checkpoint_sizes
from specdec_fast.runner.ragged_model import RaggedModel
from support.experts import CONFIGS, tiny_mixture
from support.grids import each_value_once, grid

CPU = torch.device("cpu")
WITHOUT_PROGRAMS = all_ops()["linear"].why_unavailable("cpp")
PROMPTS = [[3, 5, 7, 11], [13] * 9, [2], [90, 1, 44, 17, 60, 8], [21, 34]]
PARAMS = sd.SamplingParams(max_new_tokens=12, logprobs=True)


@pytest.mark.parametrize("name", grid(list(CONFIGS), keep=list(CONFIGS)[::4]))
def test_sizes_are_known_before_loading(tmp_path, name):
    model = tiny_mixture(name)
    model.save_pretrained(tmp_path)
    assert checkpoint_sizes(tmp_path, None) == checkpoint_sizes(model, None)


def outputs_of(model, num_draft_tokens=4, max_batch_size=4, **settings):
    draft = "ngram" if num_draft_tokens else None
    engine = sd.Engine(model, draft, num_draft_tokens=num_draft_tokens, max_batch_size=max_batch_size, **settings)
    return [(output.token_ids, output.logprobs) for output in engine.generate(PROMPTS, PARAMS)], engine


@torch.inference_mode()
def generated(model, prompt):
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": PARAMS.max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


@pytest.mark.skipif(WITHOUT_PROGRAMS is not None, reason="programs run in the C++ extension")
@pytest.mark.parametrize("name", grid(list(CONFIGS), keep=list(CONFIGS)[::6]))
def test_programs_generate_what_transformers_does(name):
    model = tiny_mixture(name)
    outputs, engine = outputs_of(model)
    assert engine.describe()["why_no_program"] is None
    assert [tokens for tokens, _ in outputs] == [generated(model, prompt) for prompt in PROMPTS]
    assert outputs == outputs_of(model, num_draft_tokens=0, max_batch_size=1)[0]


@pytest.mark.skipif(WITHOUT_PROGRAMS is not None, reason="programs run in the C++ extension")
@each_value_once
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", grid(["mixtral", "qwen3-moe", "glm4-moe", "ernie4.5-moe", "hunyuan-moe"], keep=["mixtral", "hunyuan-moe"])
)
def test_programs_have_the_same_bits_in_every_batch(name, dtype):
    model = tiny_mixture(name, dtype)
    expected, engine = outputs_of(model, num_draft_tokens=0, max_batch_size=1)
    assert engine.describe()["forward_program"]
    for num_draft_tokens, max_batch_size in ((2, 5), (7, 3)):
        assert outputs_of(model, num_draft_tokens, max_batch_size)[0] == expected


def test_only_a_forward_exchanges_what_computes_the_experts():
    model = tiny_mixture("mixtral")
    model.set_experts_implementation("batched_mm")
    ragged = RaggedModel(model, resolve(CPU))
    assert model.config._experts_implementation == "batched_mm"
    with ragged.hf.hooked():
        assert model.config._experts_implementation == "specdec_grouped"
    assert model.config._experts_implementation == "batched_mm"
    model(torch.tensor([[1, 2, 3]]))


def test_experts_on_several_devices_are_refused():
    model = tiny_mixture("mixtral")
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    with pytest.raises(UnsupportedModelError, match="experts of MixtralExperts are spread over several devices"):
        RaggedModel(model, resolve(CPU))


def experts_of(name):
    """An expert module by itself, of random weights, in fp32: every way in which transformers lays weights out."""
    sizes = {"hidden_size": 24, "intermediate_size": 16, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    module, config = {
        "plain": ("mixtral.modeling_mixtral:MixtralExperts", transformers.MixtralConfig(**sizes, num_local_experts=5)),
        "transposed_bias": (
            "gpt_oss.modeling_gpt_oss:GptOssExperts",
            transformers.GptOssConfig(**sizes, num_local_experts=5),
        ),
        "no_gate": (
            "nemotron_h.modeling_nemotron_h:NemotronHExperts",
            transformers.NemotronHConfig(**sizes, n_routed_experts=5),
        ),
    }[name]
    path, cls = module.split(":")
    config._experts_implementation = "eager"
    experts = getattr(__import__(f"transformers.models.{path}", fromlist=[cls]), cls)(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts.requires_grad_(False)


def test_experts_need_no_attribute_that_transformers_5_17_lacks():
    experts, rows, expert_ids = experts_of("plain"), torch.randn(3, 24), torch.tensor([[0, 4], [1, 0], [3, 2]])
    expected = mixture(resolve(CPU), experts, rows, expert_ids, torch.ones(3, 2))
    for name in {"_is_expert_parallel", "has_post_expert_norm"} & vars(experts).keys():
        delattr(experts, name)
    assert expert_configs(experts) == [experts.config]
    assert torch.equal(mixture(resolve(CPU), experts, rows, expert_ids, torch.ones(3, 2)), expected)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "transposed_bias", "no_gate"])
def test_experts_are_computed_as_transformers_does(name, dtype, backend):
    """At most twice as far from fp64 as transformers; and each row has the bits it has alone."""
    if all_ops()["grouped_linear"].why_unavailable(backend):
        pytest.skip("built without C++")
    torch.manual_seed(0)
    experts, rows, scores = experts_of(name), torch.randn(9, 24), torch.rand(9, 5)
    weights, expert_ids = scores.topk(2)
    ops, own = resolve(CPU, backend), copy.deepcopy(experts).to(dtype)
    got = mixture(ops, own, rows.to(dtype), expert_ids, weights)
    theirs = own(rows.to(dtype), expert_ids, weights.to(dtype))
    truth = copy.deepcopy(own).double()(rows.to(dtype).double(), expert_ids, weights.double())
    assert got.dtype == dtype
    assert (got.double() - truth).norm() <= 2 * (theirs.double() - truth).norm()
    for row in range(9):
        alone = mixture(ops, own, rows[row : row + 1].to(dtype), expert_ids[row : row + 1], weights[row : row + 1])
        assert torch.equal(alone[0], got[row])


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3-moe", torch.float32), ("glm4-moe", torch.bfloat16)],
    ids=str,
)
def test_pytorch_has_the_same_bits_in_every_batch(name, dtype):
    """Without the extension too: routers and experts of the oracle."""
    model = tiny_mixture(name, dtype)
    expected, _ = outputs_of(model, num_draft_tokens=0, max_batch_size=1, backend="torch")
    assert outputs_of(model, num_draft_tokens=4, max_batch_size=3, backend="torch")[0] == expected
    if dtype == torch.float32:
        assert [tokens for tokens, _ in expected] == [generated(model, prompt) for prompt in PROMPTS]
