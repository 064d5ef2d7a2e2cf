"""The MTP drafter proposes what the formulas say, whatever the batch, the chunks, rejections and preemptions."""

from __future__ import annotations

import random

import pytest
import torch

import specdec_fast as sd
from specdec_fast.config import EngineConfig
from specdec_fast.drafters import DrafterContext
from specdec_fast.drafters.mtp.drafter import MtpDrafter
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import each_value_once, grid
from support.models import VOCAB_SIZE
from support.mtp import Case
from support.simulated_engine import SimulatedEngine

GREEDY = sd.SamplingParams(max_new_tokens=60)
CASES = [("qwen2", "mimo"), ("qwen3", "qwen"), ("qwen3", "deepseek"), ("glm4_moe", "deepseek")]
CASES += [("deepseek_v3", "deepseek")]
PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 2, 33, 9, 17, 5))]
KINDS = (
    sd.SamplingParams(max_new_tokens=12, ignore_eos=True),
    sd.SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=5),
    sd.SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.2, top_k=20, repetition_penalty=1.3, seed=6),
)


def load(case, folder, **config):
    target = RaggedModel(case.target, resolve(torch.device("cpu")))
    return MtpDrafter(DrafterContext(target, EngineConfig(**config)), str(folder))


@pytest.mark.parametrize(("architecture", "kind"), grid(CASES, keep=[CASES[0], CASES[1], CASES[4]]))
def test_proposals_are_those_of_the_formulas(tmp_path, architecture, kind):
    case = Case(architecture)
    case.write(tmp_path, kind)
    engine = SimulatedEngine(case.target, load(case, tmp_path), case.drafted, seed=3)
    sequences = engine.new_sequences((1, 2, 9, 23), [GREEDY, KINDS[1]])
    for _ in range(4):
        engine.step(sequences, 4)
    left = engine.rng.sample(sequences, 2)
    for sequence in left:  # preempted: its pages go, and it comes back with more tokens
        engine.drafter.release(sequence)
    engine.prefill(left)
    for _ in range(2):
        engine.step(random.Random(1).sample(sequences, 3), 3)
    assert engine.num_proposed > 20
    engine.release(sequences)


@each_value_once
@pytest.mark.parametrize(
    "dtype", grid([torch.float32, torch.bfloat16, torch.float16], keep=[torch.float32, torch.bfloat16]), ids=str
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_engine_emits_what_plain_decoding_does(tmp_path, dtype, batch_size):
    case = Case("qwen3")
    case.write(tmp_path, "deepseek")
    params = [KINDS[i % 3] for i in range(len(PROMPTS))]
    options = {"max_batch_size": batch_size, "dtype": dtype}
    plain = sd.Engine(str(tmp_path), None, **options).generate(PROMPTS, params, progress=False)
    engine = sd.Engine(str(tmp_path), "mtp", num_draft_tokens=3, **options)
    found = engine.generate(PROMPTS, params, progress=False)
    assert [o.raise_for_error().token_ids for o in found] == [o.raise_for_error().token_ids for o in plain]
    assert sum(o.stats.num_draft_tokens for o in found) > 20
    assert engine.describe()["drafter"] == "mtp"


@pytest.mark.parametrize("architecture", grid(["glm4_moe", "deepseek_v3"], keep=["deepseek_v3"]))
def test_mixtures_are_served_by_the_engine(tmp_path, architecture):
    case = Case(architecture)
    case.write(tmp_path, "deepseek", shards=3)
    plain = sd.Engine(str(tmp_path), None, max_batch_size=4).generate(PROMPTS, KINDS[0], progress=False)
    engine = sd.Engine(str(tmp_path), f"mtp:{tmp_path}", max_batch_size=4, num_draft_tokens=2)
    found = engine.generate(PROMPTS, KINDS[0], progress=False)
    assert [o.raise_for_error().token_ids for o in found] == [o.raise_for_error().token_ids for o in plain]
    assert sum(o.stats.num_draft_tokens for o in found) > 20
