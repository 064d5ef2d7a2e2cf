"""Checks of a loaded model: questions to its KV cache, and whether pages reproduce its own logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, Cache, Llama4TextConfig, LlamaConfig

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_arguments import cache_argument
from specdec_fast.ops import resolve
from specdec_fast.runner import ragged_model
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.runner.reproduction import RaggedForward, check_reproduces
from support.experts import tiny_mixture
from support.grids import each_value_once, grid
from support.models import TINY, WITH_CHUNKS, tiny_model
from support.programs import needs_programs


def llama4(tuning: bool) -> torch.nn.Module:
    """Scale queries by their positions, which are found from the cache's length, in steps of 150."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, moe_layers=[], no_rope_layers=[1, 0],
        layer_types=["full_attention", "full_attention"], attn_temperature_tuning=tuning, floor_scale=150,
        attn_scale=2.0, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@each_value_once
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("tuning", [False, True])
def test_a_model_that_adds_the_length_to_numbers_of_rows_is_served(tuning, eager):
    model, prompt = llama4(tuning), [i * 7 % 97 for i in range(400)]
    params = sd.SamplingParams(max_new_tokens=8)
    engine = sd.Engine(model, "ngram", enforce_eager=eager)
    assert engine.target.hf.rules.answers_each_row is tuning
    assert engine.target.has_program is not eager
    outputs = engine.generate([prompt, prompt[:9]], params)
    assert [o.token_ids for o in outputs] == [transformers_greedy(model, ids, 8) for ids in (prompt, prompt[:9])]


@pytest.mark.grid
def test_a_length_that_is_not_that_of_the_row_changes_tokens(monkeypatch):
    model, prompts = llama4(tuning=True), [[i * 7 % 97 for i in range(n)] for n in (400, 390)]
    expected = [transformers_greedy(model, ids, 8) for ids in prompts]
    original = PagedCache.get_seq_length
    monkeypatch.setattr(PagedCache, "get_seq_length", lambda self, layer=0: original(self, layer) * 0)
    engine = sd.Engine(model, "ngram", enforce_eager=True)
    assert [o.token_ids for o in engine.generate(prompts, sd.SamplingParams(max_new_tokens=8))] != expected


def scaling(factor: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.nn.Module:
    """Make a Llama that scales its logits by a function of the length that its cache returns, and of the row count."""
    model = tiny_model("llama")
    original, cache = model.forward, cache_argument(model)

    def forward(input_ids, logits_to_keep=0, **kwargs):
        length = torch.as_tensor(kwargs[cache].get_seq_length())
        out = original(input_ids, logits_to_keep=logits_to_keep, **kwargs)
        out.logits = out.logits * (1 + factor(length, input_ids.shape[1]).float().log1p())[..., None]
        return out

    model.forward = forward
    return model


LENGTHS = {
    "first": lambda length, rows: length.flatten()[0],
    "mean": lambda length, rows: length.float().mean() + torch.arange(rows),
    "entries": lambda length, rows: length + rows,  # of the whole forward
}


@pytest.mark.parametrize("factor", LENGTHS.values(), ids=LENGTHS)
def test_a_model_that_computes_otherwise_with_the_length_is_refused(factor):
    sd.Engine(scaling(lambda length, rows: torch.ones(())), None)
    with pytest.raises(
        sd.UnsupportedModelError, match=r"asks its KV cache for get_seq_length|does not reproduce its own"
    ):
        sd.Engine(scaling(factor), None)


def asking(question: str, is_used: bool) -> torch.nn.Module:
    """Make a Llama that calls a method of its cache in every forward, and may change a logit by its result."""
    model = tiny_model("llama")
    original, cache = model.forward, cache_argument(model)

    def forward(input_ids, logits_to_keep=0, **kwargs):
        args = {"get_seq_length": (), "get_query_offset": (0,), "get_mask_sizes": (input_ids.shape[1], 0)}[question]
        answer = getattr(kwargs[cache], question)(*args)
        length = answer[0] if isinstance(answer, tuple) else answer
        out = original(input_ids, logits_to_keep=logits_to_keep, **kwargs)
        if is_used and length > 1000:
            out.logits[..., 3] += 1e-3
        return out

    model.forward = forward
    return model


@pytest.mark.parametrize("question", ["get_seq_length", "get_query_offset", "get_mask_sizes"])
def test_asking_is_allowed_and_using_is_not(question):
    assert sd.generate(asking(question, is_used=False), None, [[5, 6, 7]])[0].error is None
    with pytest.raises(sd.UnsupportedModelError, match=f"{question} and computes with the answer"):
        sd.Engine(asking(question, is_used=True), None)


@pytest.mark.parametrize("name", ["layers", "is_croppable", "batch_size", "crop"])
def test_what_pages_cannot_answer_is_refused_by_name(name):
    assert hasattr(Cache, name) or name == "layers"
    model = tiny_model("llama")
    original, cache = model.forward, cache_argument(model)

    def forward(*args, **kwargs):
        getattr(kwargs[cache], name)
        return original(*args, **kwargs)

    model.forward = forward
    with pytest.raises(sd.UnsupportedModelError, match=f"`{name}`"):
        sd.Engine(model, None)


@pytest.mark.parametrize("architecture", grid(sorted(WITH_CHUNKS), keep=sorted(WITH_CHUNKS)[::4]))
def test_a_model_of_the_grid_is_not_refused(architecture):
    sd.Engine(tiny_model(architecture), None)


def disturbed(model: RaggedModel, is_wrong: Callable[[torch.Tensor], torch.Tensor]) -> RaggedForward:
    """Return a forward whose logits are those of another token at the positions that ``is_wrong`` names."""

    def forward(batch: RaggedBatch, pool: PagePool) -> torch.Tensor:
        logits = model.forward(batch, pool).clone()
        wrong = is_wrong(batch.positions)
        logits[wrong] = logits[wrong].roll(1, dims=-1)
        return logits

    return forward


@pytest.mark.parametrize(
    ("dtype", "is_wrong", "refused"),
    [
        (torch.float32, lambda positions: positions < 0, False),
        (torch.float32, lambda positions: positions == 6, True),
        (torch.bfloat16, lambda positions: positions == 6, False),
        (torch.float16, lambda positions: positions == 6, False),
        (torch.bfloat16, lambda positions: positions > 0, True),
        (torch.bfloat16, lambda positions: positions > 3, True),
        (torch.float16, lambda positions: positions > 3, True),
    ],
    ids=["none", "one", "one in bf16", "one in fp16", "most in bf16", "the last in bf16", "the last in fp16"],
)
def test_rounding_may_change_single_rows_in_16_bits_only(dtype, is_wrong, refused):
    """In 16 bits rounding lets some mixtures of experts choose other experts for a row."""
    model, token_ids = RaggedModel(tiny_model("llama").to(dtype), resolve(torch.device("cpu"))), torch.arange(8)
    expected = model.hf.dense_logits(token_ids)
    with pytest.raises(sd.UnsupportedModelError, match="does not reproduce") if refused else nullcontext():
        check_reproduces(model.hf, disturbed(model, is_wrong), 16, token_ids, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_zeros_are_reproduced(dtype):
    model, token_ids = RaggedModel(tiny_model("llama").to(dtype), resolve(torch.device("cpu"))), torch.arange(8)
    expected = model.hf.dense_logits(token_ids).clone()
    expected[2:7] = 0

    def forward(batch: RaggedBatch, pool: PagePool) -> torch.Tensor:
        is_zero = (batch.positions > 1) & (batch.positions < 7)
        return model.forward(batch, pool).masked_fill(is_zero[:, None], 0)

    check_reproduces(model.hf, forward, 16, token_ids, expected)


class WrongRow:
    """A program that computes one row wrongly: its logits, or its hidden states."""

    def __init__(self, program, position, is_of_taps=False):
        self.program, self.position, self.is_of_taps = program, position, is_of_taps

    def __getattr__(self, name):
        return getattr(self.program, name)

    def __call__(self, token_ids, batch, pages, logit_rows, hidden_states=None):
        logits = self.program(token_ids, batch, pages, logit_rows, hidden_states).clone()
        wrong = batch.positions == self.position
        if self.is_of_taps and hidden_states is not None:
            hidden_states[wrong] = hidden_states[wrong].roll(1, dims=-1)
        if not self.is_of_taps:
            logits[wrong] = logits[wrong].roll(1, dims=-1)
        return logits


@pytest.fixture
def wrong_row(monkeypatch):
    """Let programs that are made from now on compute a row wrongly."""
    original = ragged_model.executor_for

    def start(position, is_of_taps=False):
        def executor_for(ops, device):
            executor, why = original(ops, device)

            def made(plan):
                programs = executor(plan)
                return programs._replace(program=WrongRow(programs.program, position, is_of_taps))

            return made, why

        monkeypatch.setattr(ragged_model, "executor_for", executor_for)

    return start


@needs_programs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_program_that_computes_one_row_wrongly_is_refused(dtype, wrong_row):
    wrong_row(position=6)
    model = RaggedModel(tiny_model("llama").to(dtype), resolve(torch.device("cpu")))
    assert not model.has_program
    assert ("other logits of a row" if dtype != torch.float32 else "does not reproduce") in model.why_no_program


@needs_programs
def test_a_program_that_computes_hidden_states_of_one_row_wrongly_is_refused(wrong_row):
    wrong_row(position=6, is_of_taps=True)
    model = RaggedModel(tiny_model("llama").bfloat16(), resolve(torch.device("cpu")))
    assert model.has_program
    with pytest.raises(sd.UnsupportedModelError, match=r"computes other hidden states \(taps \(1, 2\)\) of a row"):
        model.use_taps((1, 2))


@needs_programs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt-oss", "phimoe", "deepseek-v3"])
def test_programs_of_mixtures_are_admitted_in_16_bits(name, dtype):
    model = RaggedModel(tiny_mixture(name, dtype), resolve(torch.device("cpu")))
    assert model.has_program, model.why_no_program


@pytest.mark.parametrize("eager", [False, True])
def test_logits_that_are_all_zeros_are_reproduced(eager):
    """Some models begin their training with an output layer of zeros."""
    model = tiny_model("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    output = sd.generate(model, "ngram", [[5, 6, 7]], sd.SamplingParams(max_new_tokens=4), enforce_eager=eager)[0]
    assert output.token_ids == transformers_greedy(model, [5, 6, 7], 4)


@pytest.mark.parametrize("positions", [7, 8])
def test_a_model_has_the_positions_that_the_checks_need(positions):
    """Beyond its original length LongRoPE computes other logits, so checks of more tokens would miss the difference."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, "original_max_position_embeddings": positions}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, rope_parameters=rope)).eval()
    few = pytest.raises(sd.UnsupportedModelError, match="can serve 7 positions; at least 8 are needed")
    with few if positions < 8 else nullcontext():
        output = sd.generate(model, None, [[5, 6, 7]], sd.SamplingParams(max_new_tokens=5))[0]
        assert output.token_ids == transformers_greedy(model, [5, 6, 7], 5)
