"""The caller's default device has no effect: every tensor of the package names its device."""

from __future__ import annotations

import ast

import pytest
import torch

import specdec_fast as sd
from support.demo import MAX_NEW_TOKENS
from support.dflash import write_checkpoint as write_dflash
from support.eagle3 import write_checkpoint as write_eagle3
from support.grids import grid
from support.models import tiny_model
from support.source_tree import PACKAGE, shown
from support.specblock import write_checkpoint as write_specblock

FACTORIES = {f"torch.{name}" for name in (
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
    "Generator",
)}  # fmt: skip


@pytest.fixture
def _meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("_meta")
@pytest.mark.parametrize("drafter", grid(["model", "ngram"], keep=["ngram"]))
@pytest.mark.parametrize(
    "settings",
    grid({"program": {}, "eager": {"enforce_eager": True}, "torch": {"backend": "torch"}}, keep=["program"]),
)
def test_an_engine_lives_under_another_default_device(target, draft, prompt_ids, expected, drafter, settings):
    engine = sd.Engine(target, draft if drafter == "model" else drafter, max_batch_size=4, **settings)
    params = [sd.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, logprobs=True) for _ in prompt_ids[:6]]
    outputs = engine.generate(prompt_ids[:6], params)
    assert [o.token_ids for o in outputs] == expected[:6]
    drawn = sd.SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    assert all(len(o.token_ids) for o in engine.generate(prompt_ids[:6], drawn))
    assert [token for chunk in engine.stream([prompt_ids[0]], params[0]) for token in chunk.token_ids] == expected[0]


@pytest.mark.parametrize("write", [write_dflash, write_eagle3, write_specblock], ids=lambda write: write.__module__)
def test_a_learned_drafter_lives_under_another_default_device(tmp_path, write):
    model, prompts, params = tiny_model("llama"), [[1, 2, 3], [4, 5]], sd.SamplingParams(max_new_tokens=6)
    write(tmp_path, model)
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            engine = sd.Engine(model, str(tmp_path), num_draft_tokens=3)
            outputs = [output.token_ids for output in engine.generate(prompts, params)]
            found.append((outputs, engine.last_run.decoding.num_draft_tokens, engine.describe()["draft"]))
    assert found[0] == found[1]
    assert found[0][1] > 0


def without_device(tree: ast.AST) -> list[int]:
    """Lines that make a tensor on whatever device the caller has set as default."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    made = (call for call in calls if ast.unparse(call.func) in FACTORIES)
    return [call.lineno for call in made if all(keyword.arg != "device" for keyword in call.keywords)]


def test_every_tensor_names_its_device():
    found = {shown(path): without_device(ast.parse(path.read_text())) for path in PACKAGE}
    assert not {path: places for path, places in found.items() if places}


@pytest.mark.parametrize("source", ["torch.empty(3)", "x = torch.arange(3) % 2", "torch.Generator().manual_seed(0)"])
def test_device_check_rejects(source):
    assert without_device(ast.parse(source)) == [1]
