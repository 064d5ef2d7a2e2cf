"""Models that an engine cannot load or serve: a typed error says what is wrong with them and what to do."""

from __future__ import annotations

import copy
import json
import shutil
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    PhimoeConfig,
    T5Config,
    T5Model,
)

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.models.loading import load_model
from specdec_fast.ops import BACKENDS
from support.models import TINY, TINY_GROUPED, tiny_model


def test_models_may_be_paths():
    engine = sd.Engine(demo_pair() / "target", demo_pair() / "draft", num_draft_tokens=2)
    assert engine.drafter.name.endswith("draft")
    assert engine.tokenizer is not None
    with pytest.raises(sd.ConfigError, match="no such folder"):
        sd.Engine(demo_pair() / "target", Path("no/such-folder"))


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled target that may be damaged."""
    return Path(shutil.copytree(demo_pair() / "target", tmp_path / "target"))


def test_truncated_weights(folder):
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(sd.ConfigError, match=r"cannot load .*target"):
        sd.Engine(folder, None)


def test_a_folder_with_an_adapter_alone_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(sd.ConfigError, match="holds an adapter of PEFT, and no model; load both, with AutoPeftModel"):
        sd.Engine(tmp_path, None)
    with pytest.raises(sd.ConfigError, match="holds an adapter of PEFT"):
        sd.Engine(demo_pair() / "target", tmp_path)


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (SimpleNamespace(is_prompt_learning=True), "puts virtual tokens before every text"),
        (SimpleNamespace(is_prompt_learning=False, alora_invocation_tokens=[3]), "begins at certain tokens of a text"),
        (SimpleNamespace(is_prompt_learning=False, alora_invocation_tokens=None), None),
    ],
    ids=["prompt tuning", "activated LoRA", "LoRA"],
)
def test_adapters_that_more_than_the_forward_computes_are_refused(adapter, reason):
    model = tiny_model("llama")
    model.active_peft_config = adapter  # as PEFT's class around a model has it
    if reason is None:
        assert sd.generate(model, None, [[5, 6, 7]])[0].error is None
        return
    with pytest.raises(sd.UnsupportedModelError, match=f"LlamaForCausalLM has an adapter that {reason}"):
        sd.Engine(model, None)


def test_weights_that_are_missing_are_not_made_up(folder):
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(sd.ConfigError, match=r"lacks weights of LlamaForCausalLM: model.layers.* in all"):
        sd.Engine(folder, None)


def test_weights_of_other_shapes_are_named(folder):
    edit(folder / "config.json", intermediate_size=24)
    with pytest.raises(sd.ConfigError, match=r"model.layers.0.mlp.\w+.weight is \[.*\], expected \[.*24.* in all"):
        sd.Engine(folder, None)


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def forbid_prompts_on_stdin(monkeypatch):
    def fail(*args):
        raise AssertionError("the library reads stdin")

    monkeypatch.setattr("builtins.input", fail)


def test_tokenizer_with_code_of_its_own(folder, monkeypatch):
    forbid_prompts_on_stdin(monkeypatch)
    (folder / "tokenizer.json").unlink()
    edit(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    (folder / "own.py").write_text("raise AssertionError('it was run')\n")
    with pytest.raises(sd.ConfigError, match=r"needs code of its own.*pass tokenizer="):
        sd.Engine(folder, None)


def test_model_with_code_of_its_own(folder, monkeypatch):
    forbid_prompts_on_stdin(monkeypatch)
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit(folder / "config.json", model_type="own", auto_map=names)
    (folder / "own.py").write_text("raise AssertionError('it was run')\n")
    with pytest.raises(sd.ConfigError, match=r"cannot load .* custom code"):
        sd.Engine(folder, None)


def test_damaged_tokenizer_warns(folder, target):
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.warns(UserWarning, match="the tokenizer of .* cannot be read"):
        assert sd.Engine(folder, None).tokenizer is None


def test_why_there_is_no_program(target):
    description = sd.Engine(target, None, backend="torch").describe()
    assert description["forward_program"] is False
    assert description["why_no_program"].startswith("programs run on cpp, here torch serves append_kv_")


def test_why_there_is_no_program_without_the_extension(target, monkeypatch):
    broken = replace(BACKENDS["cpp"], why_unavailable=lambda: "no compiler here")
    monkeypatch.setitem(BACKENDS, "cpp", broken)
    assert "no compiler here" in sd.Engine(target, None).describe()["why_no_program"]


def test_draft_with_another_vocabulary(target):
    config = copy.deepcopy(target.config)
    config.vocab_size = 1000
    config._name_or_path = ""
    stranger = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(sd.VocabularyMismatchError, match=r"has 1000 ids.*has 1024.*ngram"):
        sd.Engine(target, stranger)


def test_a_draft_with_other_ids_for_the_same_words_translates(target, draft, tmp_path, tokenizer):
    text = (demo_pair() / "draft" / "tokenizer.json").read_text()
    draft.save_pretrained(tmp_path)
    swapped = text.replace('"Ġthe":', '"\\u0000":').replace('"Ġa":', '"Ġthe":').replace('"\\u0000":', '"Ġa":')
    assert swapped != text
    (tmp_path / "tokenizer.json").write_text(swapped)
    (tmp_path / "tokenizer_config.json").write_text((demo_pair() / "draft" / "tokenizer_config.json").read_text())
    engine = sd.Engine(target, str(tmp_path), tokenizer=tokenizer)
    assert engine.describe()["draft"]["translation"] == "tokens"
    assert engine.describe()["draft"]["share_of_draft_tokens"] == 1


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("part", ["", "model.layers.0"], ids=["all", "a layer"])
def test_weights_without_numbers(target, draft, role, part):
    """What ``device_map`` offloads, and a model made without weights, is on the meta device."""
    models = {"target": target, "draft": draft}
    models[role] = copy.deepcopy(models[role])
    models[role].get_submodule(part).to("meta")
    with pytest.raises(sd.ConfigError, match=rf"{role} LlamaForCausalLM has weights on the meta .*from_pretrained"):
        sd.Engine(models["target"], models["draft"])


@pytest.mark.parametrize("role", ["target", "draft"])
def test_model_spread_over_devices(target, draft, role):
    """As ``device_map`` does with several GPUs; a stand-in has the device that no machine of the tests has."""
    models = {"target": target, "draft": draft}
    models[role] = copy.deepcopy(models[role])
    with FakeTensorMode():
        models[role].model.norm.weight = torch.nn.Parameter(torch.empty(128, device="cuda:1"))
    with pytest.raises(sd.ConfigError, match=rf"{role} LlamaForCausalLM is spread over cpu, cuda:1, .*tensor-parallel"):
        sd.Engine(models["target"], models["draft"])


def test_draft_on_another_device(target, draft):
    with pytest.raises(sd.ConfigError, match="the loaded draft LlamaForCausalLM is on cpu, its target on cuda; move"):
        load_model(draft, None, torch.device("cuda"), "draft")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_model_without_weights(target, role):
    models = {"target": target, "draft": None, role: torch.nn.ReLU().eval()}
    with pytest.raises(sd.ConfigError, match=f"{role} ReLU has no weights; expected a Hugging Face"):
        sd.Engine(models["target"], models["draft"])


@pytest.mark.parametrize("device", ["cuda:99", "xpu:99", "hpu"])
def test_device_that_is_not_there_is_noticed_before_the_weights_are_read(device, folder):
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(sd.ConfigError, match=rf"device={device} cannot be used here: .*; expected one .* or None"):
        sd.Engine(folder, None, device=device)


def test_dtype_that_pages_do_not_serve():
    with pytest.raises(sd.UnsupportedModelError, match=r"attends in torch.float64; load it in one of torch.float32"):
        sd.Engine(tiny_model("llama").double(), None)


def test_dtype_of_a_loaded_model(target):
    with pytest.raises(sd.ConfigError, match="float32"):
        sd.Engine(target, None, dtype="bfloat16")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AutoModelForCausalLM.from_config(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)),
            "0 of 2 layers",
        ),
        (
            lambda: T5Model(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=97)),
            "encoder-decoder",
        ),
        (lambda: torch.nn.Linear(2, 2), "not a Hugging Face model"),
    ],
    ids=["own attention", "encoder-decoder", "no language model"],
)
def test_unsupported_model(make, message):
    with pytest.raises(sd.UnsupportedModelError, match=message):
        sd.Engine(make().eval(), None)


def test_window_that_only_the_mask_knows_is_refused():
    """PhiMoE applies its window by the mask alone: over pages it would attend to too much, and the probe is short."""
    config = PhimoeConfig(**TINY_GROUPED, num_local_experts=2, sliding_window=20)
    with pytest.raises(sd.UnsupportedModelError, match="sliding window by a mask alone"):
        sd.Engine(AutoModelForCausalLM.from_config(config).eval(), None)


def test_window_of_all_positions_is_no_window():
    """Phi-3.5-MoE has a window as long as its positions; only a shorter one would be missing over pages."""
    torch.manual_seed(0)
    config = PhimoeConfig(**TINY_GROUPED | {"max_position_embeddings": 20}, num_local_experts=2, sliding_window=20)
    model = AutoModelForCausalLM.from_config(config).eval()
    output = sd.generate(model, "ngram", [[5, 6, 7]], sd.SamplingParams(max_new_tokens=18))[0]
    assert output.token_ids == transformers_greedy(model, [5, 6, 7], 18)
    config.sliding_window = 19
    with pytest.raises(sd.UnsupportedModelError, match="sliding window by a mask alone"):
        sd.Engine(model, None)


@pytest.mark.parametrize(("rows", "fails"), [(2, "without this library"), (8, "without"), (9, "on a paged KV cache")])
def test_whatever_a_model_raises_is_typed_and_names_the_layer(rows, fails):
    """A forward of ``rows`` rows raises: any, the text of the probe, or one of its parts over pages."""
    model = tiny_model("llama")
    module = model.model.layers[1].mlp
    original = module.forward

    class Stumbling(type(module)):
        def forward(self, x):
            if x.shape[1] % rows == 0:
                raise AttributeError("no such thing")
            return original(x)

    module.__class__ = Stumbling
    with pytest.raises(sd.UnsupportedModelError, match=rf"{fails}.*in model\.layers\.1\.mlp: AttributeError: no such"):
        sd.Engine(model, None, enforce_eager=True)


@pytest.mark.parametrize("settings", [{}, {"memory_bytes": 10**8}], ids=["no budget", "budget"])
def test_a_vocabulary_smaller_than_the_text_of_the_checks(settings):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**TINY, "vocab_size": 3})).eval()
    (output,) = sd.Engine(model, "ngram", **settings).generate([[2, 0]], sd.SamplingParams(max_new_tokens=4))
    assert len(output.raise_for_error().token_ids) == 4
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**TINY, "vocab_size": 1})).eval()
    with pytest.raises(sd.UnsupportedModelError, match=r"a vocabulary of size 1 .*expected at least two ids"):
        sd.Engine(model, "ngram", **settings)


def test_code_in_the_files_of_a_model_is_not_recommended(tmp_path):
    """PyTorch's message names the way in which the code would run."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    torch.save({"model.norm.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(sd.ConfigError, match="it holds print, and only tensors are read") as raised:
        sd.Engine(tmp_path, None)
    assert "weights_only" not in "".join(traceback.format_exception(raised.value))


def test_model_without_a_head():
    with pytest.raises(sd.UnsupportedModelError, match="LlamaModel cannot run"):
        sd.Engine(AutoModel.from_config(LlamaConfig(**TINY)).eval(), None)
