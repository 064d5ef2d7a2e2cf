"""MTP layers of Qwen3-Next and Qwen3.5: gated attention, norms around 1, experts; whatever layers the target has."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext
from specdec_fast.drafters.mtp.drafter import MtpDrafter
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import combinations, each_value_once, grid
from support.models import VOCAB_SIZE
from support.mtp import GATED, HAS_PROGRAMS, Case, write_mtp
from support.simulated_engine import SimulatedEngine, features_of

OPS = resolve(torch.device("cpu"))
WRITTEN = {
    "one file": {},
    "shards": {"shards": 3},
    "own embedding": {"own_ends": ["embed_tokens"]},
    "own output layer": {"own_ends": ["lm_head"]},
    "own ends": {"own_ends": ["embed_tokens", "lm_head"], "shards": 2},
    "stacked experts": {"stacked": True},
}
IN_LAST_LAYER = ("qwen3_5_hybrid", "deepseek")  # it is named after the number of all layers, not of those with pages
PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 33, 9, 17))]
PARAMS = [
    sd.SamplingParams(max_new_tokens=12, ignore_eos=True),
    sd.SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=5),
]


def load(case, folder, **config):
    drafter = MtpDrafter(DrafterContext(RaggedModel(case.target, OPS), EngineConfig(**config)), str(folder))
    assert drafter.taps == ("final",)
    has_program = HAS_PROGRAMS and not config.get("enforce_eager", False)
    assert drafter.describe()["forward_program"] == drafter.drafts_in_one_call == has_program, drafter.describe()
    return drafter


def logits_of(drafter, hidden, tokens):
    """The drafter's logits at every row of a text, in one forward."""
    drafter.prepare(64, 16)
    drafter.pool.add("text")
    batch = lay_out(drafter.pool, [Rows("text", 0, len(tokens))], tokens)
    with torch.inference_mode():
        return drafter.rows(drafter.pool, batch, hidden, None)[0]


@combinations(architecture=GATED, written=WRITTEN, enforce_eager=[False, True])
def test_logits_are_those_of_the_formulas(tmp_path, architecture, written, enforce_eager):
    case = Case(architecture)
    case.write(tmp_path, "qwen", **written)
    tokens = torch.arange(19) * 11 % VOCAB_SIZE
    hidden = features_of(case.target, tokens.tolist(), ("final",))[:-1, 0]
    found = logits_of(load(case, tmp_path, enforce_eager=enforce_eager), hidden, tokens[1:])
    expected = case.logits(hidden, tokens[1:])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, wrong in (("is_hidden_first", True), ("centre", 0.0), ("share_rotated", 1.0)):
        with_defect = copy.copy(case)
        setattr(with_defect, name, wrong)
        distance = (with_defect.logits(hidden, tokens[1:]) - expected).norm() / expected.norm()
        assert distance > 0.01, f"the comparison would not see a wrong {name}"


@pytest.mark.parametrize(
    ("architecture", "kind"),
    grid([*((name, "qwen") for name in GATED), IN_LAST_LAYER], keep=[IN_LAST_LAYER]),
)
def test_proposals_are_those_of_the_formulas(tmp_path, architecture, kind):
    case = Case(architecture)
    case.write(tmp_path, kind, own_ends=["lm_head"] if kind == "qwen" else ())
    engine = SimulatedEngine(case.target, load(case, tmp_path), case.drafted, seed=3)
    sequences = engine.new_sequences((1, 2, 9, 23), PARAMS)
    for _ in range(4):
        engine.step(sequences, 4)
    assert engine.num_proposed > 20
    engine.release(sequences)


@each_value_once
@pytest.mark.parametrize("architecture", grid(GATED, keep=["qwen3_5_hybrid", "qwen3_next_moe"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("num_draft_tokens", grid([1, 2, 3, 4], keep=[1, 3]))
def test_engine_emits_what_plain_decoding_does(tmp_path, architecture, dtype, batch_size, num_draft_tokens):
    case = Case(architecture)
    case.write(tmp_path, "qwen", shards=2)
    options = {"max_batch_size": batch_size, "dtype": dtype}
    params = [PARAMS[i % 2] for i in range(len(PROMPTS))]
    plain = sd.Engine(str(tmp_path), None, **options).generate(PROMPTS, params, progress=False)
    engine = sd.Engine(str(tmp_path), "mtp", num_draft_tokens=num_draft_tokens, **options)
    found = engine.generate(PROMPTS, params, progress=False)
    assert [o.raise_for_error().token_ids for o in found] == [o.raise_for_error().token_ids for o in plain]
    assert sum(o.stats.num_draft_tokens for o in found) > 20
    described = engine.describe()["draft"]
    assert (described["mtp_format"], described["forward_program"]) == ("qwen", HAS_PROGRAMS), described


@pytest.mark.parametrize("architecture", grid(GATED, keep=["qwen3_5_hybrid"]))
def test_a_layer_that_predicts_well_is_accepted(tmp_path, architecture):
    """Without attention and MLP, the next token depends on the last alone, so the embedding is what a layer needs."""
    case = Case(architecture)
    with torch.no_grad():
        for name, weight in case.larger.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weight.zero_()
            elif "norm" in name:
                weight.zero_()  # so it multiplies by 1
        case.target.load_state_dict(case.larger.state_dict(), strict=False)
        size = case.target.config.hidden_size
        case.parts = {"eh_proj": torch.eye(size, 2 * size)}  # the first half of what it takes
        case.parts |= {name: torch.zeros(size) for name in ("enorm", "hnorm", "norm")}
    case.write(tmp_path, "qwen")
    engine = sd.Engine(str(tmp_path), "mtp", max_batch_size=4, num_draft_tokens=4)
    params = sd.SamplingParams(max_new_tokens=26, ignore_eos=True)
    outputs = engine.generate(PROMPTS, params, progress=False)
    stats = [output.raise_for_error().stats for output in outputs]
    drafted = sum(each.num_draft_tokens for each in stats)
    assert sum(each.num_accepted_tokens for each in stats) == drafted > 60


@pytest.mark.parametrize(
    ("architecture", "whole", "kind"),
    [
        ("qwen3_5", Qwen3_5Config, Qwen3_5ForConditionalGeneration),
        pytest.param("qwen3_5_moe", Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, marks=pytest.mark.grid),
    ],
    ids=["qwen3_5", "qwen3_5_moe"],
)
def test_the_checkpoint_of_a_model_that_sees_images(tmp_path, architecture, whole, kind):
    """Its names begin with model.language_model and model.visual; the engine serves the model of text in it."""
    case = Case(architecture)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = case.target.config.to_dict()
    model = kind(whole(text_config=text, vision_config={**vision, "num_position_embeddings": 16}))
    missing = model.model.language_model.load_state_dict(case.target.model.state_dict()).missing_keys
    model.lm_head.load_state_dict(case.target.lm_head.state_dict())
    assert not missing
    case.write(tmp_path, "qwen", whole=model)
    loaded = sd.Engine(str(tmp_path), None, max_batch_size=4)
    plain = loaded.generate(PROMPTS, PARAMS[0], progress=False)
    own = sd.Engine(case.target, None, max_batch_size=4).generate(PROMPTS, PARAMS[0], progress=False)
    engine = sd.Engine(str(tmp_path), "mtp", max_batch_size=4, num_draft_tokens=3)
    found = engine.generate(PROMPTS, PARAMS[0], progress=False)
    texts = [[o.raise_for_error().token_ids for o in outputs] for outputs in (own, plain, found)]
    assert texts[0] == texts[1] == texts[2]
    assert engine.describe()["draft"]["forward_program"] == HAS_PROGRAMS


# What is refused


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A target with experts, and the weights of its checkpoint by name."""
    case, folder = Case("qwen3_5_moe"), tmp_path_factory.mktemp("mixture")
    case.write(folder, "qwen")
    return RaggedModel(case.target, OPS), load_file(folder / "model.safetensors")


LAYER = "mtp.layers.0."
EXPERT = f"{LAYER}mlp.experts.3."
FP8 = torch.zeros(32, 64, dtype=torch.float8_e4m3fn)
PACKED = torch.zeros(4, 64, dtype=torch.int32)
NO_EXPERT = {f"{EXPERT}{name}_proj.weight": None for name in ("gate", "up", "down")}
REFUSED = {
    "no projection": ({"mtp.fc.weight": None}, r"lacks weights of its MTP layer \(mtp.*\): fc.weight; take a complete"),
    "no last norm": ({"mtp.norm.weight": None}, r"lacks weights of its MTP layer .*: norm.weight; take a complete"),
    "no norm of queries": ({f"{LAYER}self_attn.q_norm.weight": None}, "lacks weights of a .*self_attn.q_norm.weight"),
    "no router": ({f"{LAYER}mlp.gate.weight": None}, "lacks weights of a layer of Qwen3_5Moe.*: mlp.gate.weight"),
    "no gate": (
        {f"{LAYER}self_attn.q_proj.weight": torch.zeros(64, 32)},
        r"self_attn.q_proj.weight in the MTP layer of .* has the shape \[64, 32\]; expected \[128, 32\]",
    ),
    "narrow projection": (
        {"mtp.fc.weight": torch.zeros(32, 32)},
        r"fc.weight in the MTP layer of .* has the shape \[32, 32\]; expected \[32, 64\]",
    ),
    "short norm": (
        {"mtp.pre_fc_norm_hidden.weight": torch.zeros(31)},
        r"pre_fc_norm_hidden.weight in the MTP layer of .* has the shape \[31\]; expected \[32\]",
    ),
    "small embedding": (
        {"mtp.embed_tokens.weight": torch.zeros(90, 32)},
        r"embed_tokens.weight in the MTP layer of .* has the shape \[90, 32\]; expected \[97, 32\]",
    ),
    "part of an expert": ({f"{EXPERT}up_proj.weight": None}, r"experts\.3\.up_proj.weight in the .* is missing"),
    "small expert": (
        {f"{EXPERT}up_proj.weight": torch.zeros(15, 32)},
        r"experts\.3\.up_proj.weight in the MTP layer of .* has the shape \[15, 32\]; expected \[16, 32\]",
    ),
    "too few experts": (NO_EXPERT, r"mlp.experts.\w+ in the MTP layer of .* has the shape \[3, .*expected \[4, "),
    "linear attention": ({f"{LAYER}linear_attn.A_log": torch.zeros(4)}, "has unknown weights .*: linear_attn.A_log"),
    "unknown part": ({"mtp.gate.weight": torch.zeros(1)}, r"weights that are not known: mtp.gate.weight"),
    "fp8": (
        {f"{LAYER}self_attn.o_proj.weight": FP8, f"{LAYER}self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)},
        "mtp.layers.0.self_attn.o_proj.weight is stored in torch.float8_e4m3fn, so its MTP layer is quantised",
    ),
    "packed": (
        {f"{LAYER}self_attn.o_proj.weight": None, f"{LAYER}self_attn.o_proj.qweight": PACKED},
        "mtp.layers.0.self_attn.o_proj.qweight is stored in torch.int32, so its MTP layer is quantised",
    ),
}


@pytest.mark.parametrize("defect", REFUSED)
def test_a_layer_that_does_not_fit_is_refused(tmp_path, mixture, defect):
    target, weights = mixture
    changes, message = REFUSED[defect]
    kept = {name: weight for name, weight in (weights | changes).items() if weight is not None}
    write_mtp(tmp_path, kept)
    error = sd.NotYetSupportedError if "quantised" in message else sd.ConfigError
    with pytest.raises(error, match=message):
        MtpDrafter(DrafterContext(target, EngineConfig()), str(tmp_path))
