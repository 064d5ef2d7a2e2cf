"""Trees in a KV pool that is nearly too small: sequences are preempted again and again, and nothing else changes.

Every step is checked for the invariants, with NaN on all pages that nobody owns.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

import specdec_fast as sd
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder
from specdec_fast.request.sequence import Sequence
from specdec_fast.speculation_length.fixed import FixedLength
from support import clover, eagle3, medusa, specblock
from support.grids import grid
from support.invariants import TOLERANCE, CheckedEngine
from support.models import VOCAB_SIZE, tiny_model
from support.scripted import ByteTokenizer
from support.scripted_trees import RandomTrees

PAGE, COUNT = 4, 8  # positions of a page; requests
SHORT, LONG = 60, 150  # positions of the largest request
TOKENIZER = ByteTokenizer([bytes([65 + i % 26]) for i in range(VOCAB_SIZE)])
STATIC = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 0, 1]]
RULES = [{}, {"temperature": 0.8, "top_k": 30}, {"repetition_penalty": 1.2}, {"temperature": 1.0, "top_p": 0.9}]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {torch.float32: TOLERANCE, torch.bfloat16: None}


def requests_of(largest, seed):
    """Greedy, sampled and penalised requests of up to ``largest`` positions, each with another prompt."""
    draw, found = random.Random(seed), []
    for i in range(COUNT):
        prompt = [i, *(draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 18)))]
        new_tokens = largest + 1 - len(prompt) - draw.randint(0, largest // 3) * (i > 0)
        found.append((prompt, sd.SamplingParams(new_tokens, ignore_eos=True, seed=i, logprobs=True, **RULES[i % 4])))
    return found


def with_stops(requests, outputs):
    """Let every third request end in its middle."""
    found = []
    for i, ((prompt, params), output) in enumerate(zip(requests, outputs, strict=True)):
        middle = len(output.text) // 2
        stops = ("QAJZ", output.text[middle : middle + 5]) if i % 3 == 2 else ()
        found.append((prompt, replace(params, stop=stops)))
    return found


class Plain:
    """Requests, and what plain decoding makes of each by itself.

    Args:
        dtype: of the target.
        largest: number of positions of the largest request.
        enforce_eager: whether PyTorch runs the forwards, which have other bits than a program's.
        seed: of the requests.

    """

    def __init__(self, dtype, largest, enforce_eager=False, seed=0):
        self.largest, self.enforce_eager = largest, enforce_eager
        self.target, requests = tiny_model("llama").to(dtype), requests_of(largest, seed)
        engine = sd.Engine(self.target, None, max_batch_size=1, tokenizer=TOKENIZER, enforce_eager=enforce_eager)
        self.requests = with_stops(requests, engine.generate(*map(list, zip(*requests, strict=True))))
        self.outputs = engine.generate(*map(list, zip(*self.requests, strict=True)))
        assert {output.finish_reason for output in self.outputs} == {"stop", "length"}
        self.tokens = [output.token_ids for output in self.outputs]

    @property
    def by_request(self):
        keys = [(tuple(prompt), params.max_new_tokens) for prompt, params in self.requests]
        return dict(zip(keys, self.tokens, strict=True))


plain_of = cache(Plain)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder per kind with a random checkpoint."""
    root, target = tmp_path_factory.mktemp("drafters"), tiny_model("llama")
    eagle3.write_checkpoint(root / "eagle3", target, draft_vocab_size=60)
    specblock.write_checkpoint(root / "specblock", target, draft_vocab_size=60)
    hidden = target.config.hidden_size
    medusa.write_heads(root / "medusa", medusa.named(medusa.random_heads(VOCAB_SIZE, hidden), "safetensors"))
    clover.write_clover(root / "clover", clover.random_clover(), VOCAB_SIZE)
    return root


KINDS = {
    "random": {},
    "ngram-trie": {},
    "eagle3-dynamic": {"draft_tree": 12},
    "eagle3-static": {"draft_tree": STATIC},
    "medusa": {"draft_tree": STATIC},
    "clover": {"draft_tree": STATIC},
    "specblock": {},
}
SETTINGS = {
    "exspec": {},
    "eqspec": {"method": "eqspec"},
    "chunked": {"max_prefill_tokens": 5, "max_wait_steps": 1, "window_size": 8},
    "varying": {},
}


class Varying(FixedLength):
    """Any depth for each sequence of a step, and now and then no more nodes than that."""

    def __init__(self):
        super().__init__(6)
        self._draw = random.Random(1)

    def limits(self, batch):
        self.may_branch = self._draw.random() < 0.8
        return [min(self._draw.randint(0, 6), limit) for limit in super().limits(batch)]


def checked_engine(plain, folders, kind, **config):
    name = kind.split("-")[0]
    draft = {"random": RandomTrees(plain.tokens, max_nodes=12), "ngram": "ngram-trie"}.get(name)
    config = {
        "max_batch_size": 4,
        "page_size": PAGE,
        "kv_cache_tokens": plain.largest + 3 * PAGE,
        **KINDS[kind],
        **config,
    }
    config["enforce_eager"] = plain.enforce_eager
    draft = f"{name}:{folders / name}" if draft is None else draft
    engine = sd.Engine(plain.target, draft, tokenizer=TOKENIZER, **config)
    return CheckedEngine(engine, expected=plain.by_request, tolerance=TOLERANCES[plain.target.dtype])


def add_all(engine, plain):
    """Add the requests to the core; return their sequences."""
    builder = RequestBuilder(engine.target, TOKENIZER)
    sequences = [builder.build(i, *request) for i, request in enumerate(plain.requests)]
    for sequence in sequences:
        engine.core.add(sequence)
    return sequences


def expect_nothing_left(engine):
    """No page, and nothing else by which a drafter knows a sequence."""
    assert engine.core.pool.is_vacant
    pool = getattr(engine.drafter, "pool", None)
    assert pool is None or pool.is_vacant
    known = [value for value in vars(engine.drafter).values() if isinstance(value, dict)]
    assert not [key for value in known for key in value if isinstance(key, Sequence)]


def expect_outputs(sequences, plain):
    """Tokens, log-probability bits and ends are those of plain decoding."""
    for sequence in sequences:
        wanted = plain.outputs[sequence.index]
        assert sequence.error is None
        found = (sequence.emitted_ids, sequence.logprobs, sequence.finish_reason)
        assert found == (wanted.token_ids, wanted.logprobs, wanted.finish_reason), sequence.index


def run_all(checked, plain):
    """Decode all requests with a checked engine, and compare everything."""
    engine = checked.engine
    sequences = add_all(engine, plain)
    while engine.core.has_work:
        engine.core.step()
    expect_outputs(sequences, plain)
    assert checked.num_checked > 40
    assert engine.core.stats.num_preemptions > 3
    assert engine.core.stats.decoding.num_draft_tokens > 100
    expect_nothing_left(engine)
    return sequences


KEPT = [("random", "bf16", "exspec"), ("specblock", "bf16", "varying")]


@pytest.mark.parametrize(("kind", "dtype", "settings"), grid([*product(KINDS, DTYPES, SETTINGS)], keep=KEPT))
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.grid)], ids=["in_turn", "ahead"])
def test_no_output_changes(folders, monkeypatch, kind, dtype, settings, ahead):
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    plain = plain_of(DTYPES[dtype], SHORT)
    length = {"num_draft_tokens": Varying()} if settings == "varying" else {}
    run_all(checked_engine(plain, folders, kind, **SETTINGS[settings], **length), plain)


@pytest.mark.parametrize("kind", grid([*KINDS], keep=[]))
def test_no_output_changes_in_pytorch(folders, kind):
    plain = plain_of(torch.float32, 44, enforce_eager=True)
    run_all(checked_engine(plain, folders, kind), plain)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_long_output_changes(folders, kind, dtype, seed):
    plain = plain_of(DTYPES[dtype], LONG, seed=seed)
    sequences = run_all(checked_engine(plain, folders, kind, max_batch_size=6), plain)
    assert max(sequence.num_preemptions for sequence in sequences) > 2


@pytest.mark.parametrize(
    ("kind", "ahead"), grid(product(KINDS, [False, True]), keep=[("random", True), ("eagle3-dynamic", False)])
)
def test_requests_are_cancelled_while_they_are_preempted(folders, monkeypatch, kind, ahead):
    """One that waits after preemption, the youngest and the oldest that decode, and one that waits for its first page.

    On a GPU the next step has been launched when a request is cancelled.
    """
    monkeypatch.setattr(EngineCore, "launches_ahead", ahead)
    plain = plain_of(torch.bfloat16, SHORT)
    engine = checked_engine(plain, folders, kind).engine
    core, sequences, cancelled = engine.core, add_all(engine, plain), []
    while core.has_work:
        core.step()
        waiting = [sequence for sequence in core.waiting if sequence.num_preemptions]
        if waiting and len(core.resident) > 1 and not cancelled:
            cancelled = [waiting[0], core.resident[-1], core.resident[0], core.waiting[-1]]
            assert waiting[0].emitted_ids
            for sequence in {id(sequence): sequence for sequence in cancelled}.values():
                assert core.cancel(sequence.request_id)
                assert not core.cancel(sequence.request_id)
    assert cancelled
    assert all(sequence.finish_reason is None for sequence in cancelled)
    expect_outputs([sequence for sequence in sequences if sequence not in cancelled], plain)
    assert core.stats.decoding.num_emitted_tokens == sum(len(sequence.emitted_ids) for sequence in sequences)
    expect_nothing_left(engine)


@pytest.mark.parametrize("kind", grid([*KINDS], keep=["eagle3-static"]))
def test_a_preempted_request_that_is_cancelled_comes_again(folders, kind):
    """Its pages and its drafter's state are new."""
    plain = plain_of(torch.bfloat16, SHORT)
    engine = checked_engine(plain, folders, kind).engine
    core, builder = engine.core, RequestBuilder(engine.target, TOKENIZER)
    live, num_cancelled = add_all(engine, plain), 0
    while core.has_work:
        core.step()
        preempted = next((sequence for sequence in core.waiting if sequence.num_preemptions), None)
        if preempted is not None and num_cancelled < COUNT:
            assert core.cancel(preempted.request_id)
            num_cancelled += 1
            live.remove(preempted)
            live.append(builder.build(preempted.index, *plain.requests[preempted.index]))
            core.add(live[-1])
    assert num_cancelled > 2
    assert len(live) == COUNT
    expect_outputs(live, plain)
    expect_nothing_left(engine)


def test_streams_repeat_nothing(folders):
    plain = plain_of(torch.bfloat16, SHORT)
    engine = checked_engine(plain, folders, "random").engine
    tokens, texts = [[] for _ in plain.tokens], ["" for _ in plain.tokens]
    for chunk in engine.stream(*map(list, zip(*plain.requests, strict=True))):
        tokens[chunk.index] += chunk.token_ids
        texts[chunk.index] += chunk.text
    assert engine.last_run.num_preemptions > 3
    assert tokens == plain.tokens
    assert texts == [output.text for output in plain.outputs]
