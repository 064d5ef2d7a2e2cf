"""The caller's torch.autocast has no effect: an engine computes in the dtype of its weights."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest
import torch

import specdec_fast as sd
from bench.common.tiny_models import tiny_model as tiny_architecture
from support.grids import grid
from support.models import tiny_model

PROMPTS = [[3, 4], [5, 6, 7], [8]]
PARAMS = sd.SamplingParams(max_new_tokens=12, logprobs=True)


def bits(engine, prompts=PROMPTS):
    return [(output.token_ids, output.logprobs) for output in engine.generate(prompts, PARAMS, progress=False)]


@pytest.fixture(scope="module")
def models():
    # The router of DeepSeek computes a linear in fp32 whatever the dtype of its rows, and autocast would round it.
    return {"llama": tiny_model("llama"), "deepseek_v3": tiny_architecture("deepseek_v3").to(torch.bfloat16)}


@pytest.mark.parametrize(
    ("name", "settings"),
    grid(
        [("llama", {}), ("llama", {"enforce_eager": True}), ("llama", {"backend": "torch"}), ("deepseek_v3", {})],
        keep=[("llama", {"backend": "torch"}), ("deepseek_v3", {})],
    ),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_are_those_without_autocast(models, name, settings, dtype):
    expected = bits(sd.Engine(models[name], "ngram", **settings))
    with torch.autocast("cpu", dtype):
        engine = sd.Engine(models[name], "ngram", **settings)
        assert bits(engine) == expected
        assert torch.is_autocast_enabled("cpu"), "it is the caller's again"
        with pytest.raises(sd.SpecDecError):
            sd.Engine(models[name], "ngram", max_batch_size=0)
        assert torch.is_autocast_enabled("cpu")
    assert bits(engine) == expected


def test_a_thread_with_autocast_runs_the_steps_of_another(models):
    engine = sd.Engine(models["llama"], "ngram", backend="torch")
    expected = bits(engine)
    found = {}
    both = Barrier(2)

    def decode(enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            both.wait(30)
            found[enabled] = bits(engine, PROMPTS * 3)

    threads = [Thread(target=decode, args=(enabled,)) for enabled in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {False: expected * 3, True: expected * 3}
