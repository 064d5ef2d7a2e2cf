"""Trees of draft tokens: tokens and log-probabilities have the bits of plain decoding, and mistakes are noticed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import specdec_fast as sd
from bench.common.tiny_models import tiny_model as tiny_default_model
from specdec_fast.runner import verification
from specdec_fast.runner.verification import Outcome, Verification
from support.grids import each_value_once, grid
from support.invariants import CheckedEngine
from support.models import VOCAB_SIZE, WITH_CHUNKS, tiny_model
from support.scripted_trees import RandomTrees

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULES = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3}]
LATENT = "deepseek_v3"  # keys and values of different sizes, a pool with two allocations
SINKS = "mimo_v2_flash"  # attention sinks, sliding windows, layers of two shapes
MODELS = [*WITH_CHUNKS, LATENT, SINKS]


def model_of(name):
    return tiny_model(name) if name in WITH_CHUNKS else tiny_default_model(name)


def prompts_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def params_of(count, new_tokens=17):
    """Greedy, sampled and penalised requests of different lengths that ask for log-probabilities."""
    return [
        sd.SamplingParams(max_new_tokens=new_tokens - i % 5, ignore_eos=True, logprobs=True, seed=i, **RULES[i % 3])
        for i in range(count)
    ]


def decode(engine, count):
    outputs = engine.generate(prompts_of(count), params_of(count), progress=False)
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs]


def trees_for(expected, **settings):
    return RandomTrees([token_ids for token_ids, _ in expected], **settings)


@each_value_once
@pytest.mark.parametrize("model", grid(MODELS, keep=["llama", "gemma2", "mistral-window", LATENT, SINKS]))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_size", [1, 8, 32])
@pytest.mark.parametrize("eager", [False, True])
def test_trees_have_the_bits_of_plain_decoding(model, dtype, batch_size, eager):
    target, count = model_of(model).to(dtype), min(batch_size + 2, 16)
    settings = {"page_size": 4, "enforce_eager": eager}
    expected = decode(sd.Engine(target, None, max_batch_size=2, **settings), count)
    drafter = trees_for(expected, max_nodes=14 if batch_size < 8 else 40)
    engine = sd.Engine(target, drafter, max_batch_size=batch_size, num_draft_tokens=5, **settings)
    assert decode(engine, count) == expected
    assert engine.last_run.decoding.mean_acceptance_length > 1.5, "the trees held little of the text"


@pytest.mark.parametrize("dtype", grid(DTYPES, keep=[torch.bfloat16]), ids=str)
def test_trees_have_the_bits_of_plain_decoding_in_pytorch_ops(dtype):
    """Attention in PyTorch depends on the number of rows, so every row attends alone."""
    target = tiny_model("mistral-window").to(dtype)
    expected = decode(sd.Engine(target, None, max_batch_size=1, backend="torch"), 2)
    engine = sd.Engine(target, trees_for(expected), max_batch_size=2, backend="torch")
    assert decode(engine, 2) == expected


@each_value_once
@pytest.mark.parametrize("eager", [False, True], ids=["program", "pytorch"])
@pytest.mark.parametrize("model", grid(MODELS, keep=["llama", LATENT]))
def test_no_entry_of_another_branch_is_read(model, eager):
    """All KV memory that no committed token owns is NaN, and every entry is that of its committed token."""
    target = model_of(model)
    prompts, params = prompts_of(4), sd.SamplingParams(max_new_tokens=16, ignore_eos=True)
    expected = [o.token_ids for o in sd.generate(target, None, prompts, params, progress=False)]
    drafter = RandomTrees(expected, max_nodes=12)
    engine = CheckedEngine(sd.Engine(target, drafter, max_batch_size=3, page_size=4, enforce_eager=eager))
    assert [o.token_ids for o in engine.generate(prompts, params)] == expected


def sibling_seen(original, parents, num_draft_tokens):
    """Let every row see the row before it, whatever branch that is on."""
    trees = original(parents, num_draft_tokens)
    mask = trees.mask.copy()
    for row in range(1, len(mask)):
        if trees.parents[row] >= 0:
            mask[row, 0] |= 1 << trees.parents[row] + 1 & 31
    return trees._replace(mask=mask)


def slot_as_position(original, parents, num_draft_tokens):
    trees = original(parents, num_draft_tokens)
    rows = [row for count in num_draft_tokens for row in range(count + 1)]
    return trees._replace(depths=torch.tensor(rows).numpy())


def noise_by_row(original, logits, token_ids, cu_seqlens, sampling=None, parents=None):
    """Draw every row's token with the noise of its place among the rows, then walk down the tree."""
    if parents is None or sampling is None:
        return original(logits, token_ids, cu_seqlens, sampling, parents)
    drawn = original(logits, token_ids, cu_seqlens, sampling)[0]
    chosen = torch.nn.functional.one_hot(drawn.clamp(min=0), logits.shape[1]).float()
    return (drawn, *original(chosen, token_ids, cu_seqlens, None, parents)[1:])


def no_move(original, *arguments):
    """Leave accepted entries where they are."""


def moves_in_another_order(original, tensor, table, cu_moves, sources, destinations):
    """Make the last move of each sequence first, from what an earlier one was to read."""
    for start, stop in zip(cu_moves.tolist(), cu_moves.tolist()[1:], strict=False):
        for move in reversed(range(start, stop)):
            one = [x[move : move + 1] for x in (sources, destinations)]
            counts = (cu_moves > move).int()
            original(tensor, table, counts, *one)


def moves_within_a_page(original, tensor, table, cu_moves, sources, destinations):
    """Look a destination up on the page of its source."""
    size = tensor.shape[3]
    original(tensor, table, cu_moves, sources, (sources // size * size + destinations % size).int())


def emission_in_row_order(original, verified):
    """Emit the tokens chosen at a sequence's first rows, as in a chain."""
    outcome = original(verified)
    if outcome.paths is None:
        return outcome
    chosen, firsts = verified.results[0].tolist(), [0]
    for count in verified.counts:
        firsts.append(firsts[-1] + count)
    emissions = [
        [*chosen[first : first + len(path)], own[-1]]
        for first, path, own in zip(firsts, outcome.paths, outcome.emissions, strict=False)
    ]
    return Outcome(emissions, outcome.paths)


@pytest.fixture(scope="module")
def small():
    target = tiny_model("qwen3")
    settings = {"page_size": 4, "enforce_eager": True, "max_batch_size": 3}
    expected = decode(sd.Engine(target, None, **settings), 6)
    assert decode(sd.Engine(target, trees_for(expected, agreement=0.6), **settings), 6) == expected
    return target, settings, expected


def mutate_ops(monkeypatch, engine, **mistakes):
    """Replace ops of the engine's target, and of what runs its steps."""
    ops = engine.target.ops.unchecked
    wrong = {name: partial(mistake, getattr(ops, name)) for name, mistake in mistakes.items()}
    target = engine.target
    monkeypatch.setattr(target, "ops", replace(target.ops, unchecked=ops.replaced(**wrong)))
    target.use_programs(target.program, target.device_program)


@pytest.mark.parametrize(
    ("where", "mistake"),
    [
        ("rows_of_trees", sibling_seen),
        ("rows_of_trees", slot_as_position),
        ("verify_chain", noise_by_row),
        ("compact_kv_", no_move),
        ("compact_kv_", moves_in_another_order),
        ("compact_kv_", moves_within_a_page),
        ("outcome", emission_in_row_order),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistakes_change_an_output(small, monkeypatch, where, mistake):
    target, settings, expected = small
    engine = sd.Engine(target, trees_for(expected, agreement=0.6), **settings)
    if where == "outcome":
        right = Verification.outcome
        monkeypatch.setattr(Verification, "outcome", lambda self: mistake(right, self))
    elif where == "rows_of_trees":
        right = verification.rows_of_trees
        monkeypatch.setattr(verification, where, lambda *args: mistake(right, *args))
    else:
        mutate_ops(monkeypatch, engine, **{where: mistake})
    assert decode(engine, 6) != expected
