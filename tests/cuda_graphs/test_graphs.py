"""Graphs with repeated calls in their place: buckets, what a batch leaves behind, pools, whole engines, waiting."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import RowPadding, Rows
from specdec_fast.cuda_graphs import capture
from specdec_fast.cuda_graphs import graphs as module
from specdec_fast.cuda_graphs.buckets import Bucket, Inputs, Limits
from specdec_fast.cuda_graphs.capture import Captured
from specdec_fast.drafters.draft_model import ModelDrafter
from specdec_fast.kv_cache.forward_layout import decode_batches, lay_out
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.hf_model import RaggedModel
from specdec_fast.ops import resolve
from specdec_fast.ops.registry import all_ops
from specdec_fast.program import executors
from support.models import VOCAB_SIZE, tiny_model, truncated_copy
from support.repeated import Repeated, waits

CPU = torch.device("cpu")
LIMITS = Limits(sequences=5, rows_each=4, num_forwards=3)
RULE = RowPadding(multiple=4, largest=512)  # one thread: fp32 linears are invariant there
OWNERS, ROOM = 6, 70
counts_of_batches = st.lists(st.lists(st.integers(1, LIMITS.rows_each), min_size=1, max_size=5), min_size=1, max_size=6)


class Everything:
    """Every bucket has been asked for before."""

    def __contains__(self, key):
        return True

    def add(self, key):
        """Nothing is new."""


@pytest.fixture(scope="module")
def hugging_face_model():
    return tiny_model("qwen3")


@pytest.fixture
def graphs_on_cpu(monkeypatch):
    """Let engines on the CPU work as on a GPU: no programs, but graphs."""
    monkeypatch.setattr(executors, "EXECUTORS", {})
    monkeypatch.setitem(capture.CAPTURES, "cpu", Repeated)


@pytest.fixture
def model(hugging_face_model, graphs_on_cpu):
    """A model that records every forward the first time it sees its bucket."""
    made = RaggedModel(hugging_face_model, resolve(CPU))
    made.row_padding = RULE
    made.use_graphs(LIMITS)
    made.graphs._asked = Everything()
    return made


def opened_pool(model, page_size=16):
    pool = PagePool(model.layout, OWNERS * (ROOM + page_size), page_size, model.row_padding)
    for owner in range(OWNERS):
        pool.reserve(owner, ROOM)
    return pool


def eagerly(model, batch, pool, logit_rows=None):
    return model._run_eagerly(batch, pool, logit_rows)


def batches(pool, counts_of, seed=0):
    """Batches of the pool's owners, each going on where it stopped; everybody's next is somebody else's turn."""
    generator, lengths = torch.Generator().manual_seed(seed), [0] * OWNERS
    for turn, counts in enumerate(counts_of):
        rows = []
        for i, count in enumerate(counts):
            owner = (i + turn) % OWNERS
            rows.append(Rows(owner, lengths[owner], count))
            lengths[owner] += count
        yield lay_out(pool, rows, torch.randint(VOCAB_SIZE, (sum(counts),), generator=generator))


# Buckets


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    limits=st.builds(Limits, st.integers(1, 40), st.integers(1, 9)),
    multiple=st.sampled_from((1, 4, 8, 64)),
    page_size=st.sampled_from((1, 16, 48, 1024)),
)
def test_a_bucket_holds_its_batch(counts, limits, multiple, page_size):
    row_padding = RowPadding(multiple, largest=256)
    pool = PagePool(_layout(), len(counts) * (9 + page_size), page_size, row_padding)
    for owner in range(len(counts)):
        pool.reserve(owner, 9)
    rows = [Rows(owner, 0, count) for owner, count in enumerate(counts)]
    batch = lay_out(pool, rows, torch.arange(sum(counts)))
    bucket = limits.bucket(batch, page_size, row_padding)
    if len(counts) > limits.sequences or max(counts) > limits.rows_each:
        assert bucket is None
        return
    if bucket is None:
        assert 2 * sum(counts) * multiple > row_padding.largest or multiple * len(counts) > row_padding.largest
        return
    assert bucket.num_rows % multiple == bucket.one_each % multiple == 0
    assert sum(counts) <= bucket.num_rows <= row_padding.largest
    assert len(counts) <= bucket.one_each <= bucket.num_sequences
    assert bucket.max_seqlen_q in (1, limits.rows_each)
    assert bucket.num_pages * page_size >= 512
    filled = Inputs(bucket, page_size, CPU)
    filled.fill(batch)
    each = filled.batch.cu_seqlens_q.diff()
    assert each.tolist()[: len(counts)] == counts
    assert each.sum() == bucket.num_rows, "every row belongs to somebody, or attention would leave it unwritten"
    assert 0 <= each.min() <= each.max() <= bucket.max_seqlen_q
    assert torch.equal(filled.batch.seqused_k[len(counts) :], each[len(counts) :])
    assert filled.batch.slot_mapping[sum(counts) :].lt(page_size).all(), "on the scratch page"
    assert not filled.batch.block_table[len(counts) :].any()


def _layout():
    return KVLayout.uniform(1, 1, 8, torch.float32, CPU)


@pytest.mark.parametrize(("multiple", "most"), [(1, 30), (4, 24)])
def test_there_are_few_buckets(multiple, most):
    """A graph costs a second to record: all batches of eight sequences and K = 5 share some."""
    row_padding, limits, found = RowPadding(multiple, 512), Limits(8, 6), set()
    pool = PagePool(_layout(), 8 * 32, 16, row_padding)
    for owner in range(8):
        pool.reserve(owner, 16)
    for batch_size in range(1, 9):
        for total in range(batch_size, 6 * batch_size + 1):
            counts = [total // batch_size + (i < total % batch_size) for i in range(batch_size)]
            batch = lay_out(pool, [Rows(i, 0, n) for i, n in enumerate(counts)], torch.zeros(total, dtype=torch.int64))
            found.add(limits.bucket(batch, 16, row_padding))
    assert None not in found
    assert len(found) <= most


def test_pages_are_rounded_up_and_what_is_too_large_has_no_bucket():
    row_padding = RowPadding(4, 16)
    pool = PagePool(_layout(), 4096, 16, row_padding)
    pool.reserve("long", 2000)
    pool.reserve("other", 16)

    def bucket(*rows):
        batch = lay_out(pool, list(rows), torch.zeros(sum(r.count for r in rows), dtype=torch.int64))
        return Limits(8, 6).bucket(batch, 16, row_padding)

    pages = [bucket(Rows("long", start, 1)).num_pages for start in (0, 511, 512, 1024)]
    assert pages == [32, 32, 64, 128]
    assert bucket(Rows("long", 0, 7)) is None, "more rows each than K + 1"
    assert bucket(Rows("long", 0, 6)) == Bucket(8, 4, 6, 32, 4)
    assert Limits(8, 20).bucket(lay_out(pool, [Rows("long", 0, 17)], torch.zeros(17)), 16, row_padding) is None, (
        "not proved"
    )


def test_nothing_is_left_of_an_earlier_batch(model):
    """Whatever stands in a bucket, a batch makes the same of it."""
    pool = opened_pool(model)
    batch = next(batches(pool, [[2, 1, 4]]))
    bucket = LIMITS.bucket(batch, pool.page_size, RULE)
    clean, used = (Inputs(bucket, pool.page_size, CPU) for _ in range(2))
    for field in fields(used.batch):
        if isinstance(tensor := getattr(used.batch, field.name), torch.Tensor):
            tensor.fill_(10**8)
    for inputs in (clean, used):
        inputs.fill(batch)
    for field in fields(used.batch):
        if isinstance(tensor := getattr(used.batch, field.name), torch.Tensor):
            assert torch.equal(tensor, getattr(clean.batch, field.name)), field.name


# Bits


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts_of=counts_of_batches, seed=st.integers(0, 2**31), page_size=st.sampled_from((1, 16)))
def test_logits_and_pages_have_the_bits_of_eager_forwards(model, counts_of, seed, page_size):
    pools = [opened_pool(model, page_size) for _ in range(2)]
    for eager, graphed in zip(*(batches(pool, counts_of, seed) for pool in pools), strict=True):
        expected = eagerly(model, eager, pools[0])
        assert torch.equal(model.forward(graphed, pools[1]), expected)
        wanted = eager.last_rows.flip(0)
        assert torch.equal(model.forward(graphed, pools[1], wanted), expected[wanted])
    assert torch.equal(pools[0].tensors[0][:, :, 1:], pools[1].tensors[0][:, :, 1:]), "page 0 is scratch"
    assert 0 < model.graphs.num_captured <= len(counts_of)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(1, 2), min_size=1, max_size=5), start=st.integers(0, 20), seed=st.integers(0, 99))
def test_a_drafting_loop_has_the_bits_of_eager_forwards(model, counts, start, seed):
    pools = [opened_pool(model) for _ in range(2)]
    for pool in pools:
        for batch in batches(pool, [[start + 1] * OWNERS], seed):
            eagerly(model, batch, pool)
    rows = [Rows(owner, start + 1, count) for owner, count in enumerate(counts)]
    tokens = torch.arange(sum(counts))
    expected = []
    for batch_of in decode_batches(pools[0], rows, LIMITS.num_forwards):
        batch = batch_of(token_ids=tokens)
        tokens = eagerly(model, batch, pools[0], batch.last_rows).argmax(dim=-1)
        expected.append(tokens)
    batch = lay_out(pools[1], rows, torch.arange(sum(counts)), ahead=LIMITS.num_forwards - 1)
    for _ in range(2):
        chosen = model.graphs.draft(batch, LIMITS.num_forwards, pools[1], likeliest)
        assert torch.equal(chosen, torch.stack(expected))
        assert torch.equal(pools[0].tensors[0][:, :, 1:], pools[1].tensors[0][:, :, 1:])
    assert model.graphs.draft(batch, LIMITS.num_forwards - 1, pools[1], likeliest) is None


def likeliest(logits):
    return logits.argmax(dim=-1)


# When graphs are recorded, and for how long they are kept


def test_a_bucket_is_recorded_when_it_is_asked_for_again(model):
    model.graphs._asked = set()
    pool = opened_pool(model)
    numbers = []
    for batch in batches(pool, [[2], [2], [2], [1, 1]]):
        model.forward(batch, pool)
        numbers.append((model.graphs.num_captured, model.graphs._capture.num_replayed))
    assert numbers == [(0, 0), (1, 1), (1, 2), (1, 2)]


def test_another_pool_gets_graphs_of_its_own(model):
    pool = opened_pool(model)
    first = model.forward(next(batches(pool, [[3, 2]])), pool).clone()
    other = opened_pool(model)
    model.forward(next(batches(other, [[1]])), other)
    assert model.graphs.num_captured == 1
    third = opened_pool(model)
    assert torch.equal(model.forward(next(batches(third, [[3, 2]])), third), first)


def test_graphs_do_not_keep_a_pool(model):
    """An engine gives its pool up before it asks for a larger one: the memory must be free by then."""
    model.graphs._capture = lambda run: Captured(lambda: None, run())
    pool = opened_pool(model)
    model.forward(next(batches(pool, [[3, 2]])), pool)
    assert model.graphs.num_captured == 1
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


def test_where_there_are_too_many_all_go(model, monkeypatch):
    """Destroying one of them would take memory from the others: see ``CudaCapture``."""
    monkeypatch.setattr(module, "MOST_GRAPHS", 2)
    pool = opened_pool(model)
    eager_pool = opened_pool(model)
    turns = [[1], [2], [1], [3, 3], [1], [2], [3, 3]]
    numbers = []
    for batch, eager in zip(batches(pool, turns), batches(eager_pool, turns), strict=True):
        assert torch.equal(model.forward(batch, pool), eagerly(model, eager, eager_pool))
        numbers.append(model.graphs.num_captured)
    assert numbers == [1, 2, 2, 1, 2, 1, 2]


def test_graphs_do_not_keep_a_drafter(model):
    """One model may serve drafter after drafter; each of them holds a pool."""
    model.graphs._capture = lambda run: Captured(lambda: None, run())
    drafter = ModelDrafter(model, VOCAB_SIZE)
    drafter.prepare(OWNERS * 32, 16)
    for owner in range(OWNERS):
        drafter.pool.reserve(owner, 20)
    batch = lay_out(drafter.pool, [Rows(0, 0, 2)], torch.arange(2), ahead=LIMITS.num_forwards - 1)
    chosen = model.graphs.draft(batch, LIMITS.num_forwards, drafter.pool, drafter._likeliest)
    assert chosen.shape == (LIMITS.num_forwards, 1)
    assert model.graphs.num_captured == 1
    gone = [weakref.ref(drafter), weakref.ref(drafter.pool)]
    del drafter
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_a_method_is_recognised_and_another_drafter_gets_a_graph_of_its_own(model):
    pool = opened_pool(model)
    batch = lay_out(pool, [Rows(0, 0, 2)], torch.arange(2), ahead=LIMITS.num_forwards - 1)
    drafters = [ModelDrafter(model, VOCAB_SIZE) for _ in range(2)]
    numbers = []
    for drafter in (*drafters, *drafters):
        model.graphs.draft(batch, LIMITS.num_forwards, pool, drafter._likeliest)
        numbers.append(model.graphs.num_captured)
    assert numbers == [1, 2, 2, 2]


def moved(parameter):
    parameter.data = parameter.data.clone()


def exchanged(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 2


def exchanged_module(model):
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda *args: None)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda model: moved(model.lm_head.weight), 0),
        (exchanged, 0),
        (exchanged_module, 0),
        (hooked, 0),
        (lambda model: model.lm_head.weight.data.mul_(2), 1),  # a graph reads what is there
        (lambda model: None, 1),
    ],
    ids=["moved", "exchanged", "exchanged_module", "hooked", "in_place", "unchanged"],
)
def test_graphs_are_given_up_if_weights_are_moved(change, kept, graphs_on_cpu):
    made = RaggedModel(tiny_model("qwen3"), resolve(CPU))
    made.use_graphs(LIMITS)
    made.graphs._asked = Everything()
    pool = opened_pool(made)
    made.forward(next(batches(pool, [[3, 2]])), pool)
    assert made.graphs.num_captured == 1
    change(made.model)
    made.expect_same_weights()
    assert made.graphs.num_captured == kept
    assert (made.graphs.why_not is not None) == (change is hooked)


def test_exchanged_weights_are_freed_by_the_next_call(graphs_on_cpu):
    """The model is compared with what it was, so until then its old tensors are kept."""
    made = RaggedModel(tiny_model("qwen3"), resolve(CPU))
    made.use_graphs(LIMITS)
    layer = made.model.model.layers[0].mlp.up_proj
    old = weakref.ref(layer.weight)
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    made.expect_same_weights()
    gc.collect()
    assert old() is None


def test_what_cannot_be_recorded_runs_eagerly_and_tells_why(model):
    def refuses(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    model.graphs._capture = refuses
    pool, eager_pool = opened_pool(model), opened_pool(model)
    for _ in range(2):
        batch, eager = (next(batches(p, [[3, 1]])) for p in (pool, eager_pool))
        assert torch.equal(model.forward(batch, pool), eagerly(model, eager, eager_pool))
    told = module.described(model.graphs)
    assert told["why_no_graphs"] == "RuntimeError: operation not permitted when stream is capturing"
    assert told["graphs"] is False


@pytest.mark.parametrize(
    ("register", "named"),
    [
        (lambda model: model.model.layers[1].register_forward_hook(lambda *args: None), "a LlamaDecoderLayer has"),
        (lambda model: register_module_forward_hook(lambda *args: None), "a Module has"),
        (lambda model: register_module_forward_pre_hook(lambda *args: None), "a Module has"),
    ],
    ids=["one", "global", "global_pre"],
)
def test_a_model_with_hooks_runs_eagerly(register, named, graphs_on_cpu):
    """A graph would not call them."""
    made = RaggedModel(tiny_model("llama"), resolve(CPU))
    handle = register(made.model)
    try:
        made.use_graphs(LIMITS)
        assert f"{named} forward hooks" in module.described(made.graphs)["why_no_graphs"]
        pool = opened_pool(made)
        assert made.graphs.forward(next(batches(pool, [[1]])), pool, None) is None
    finally:
        handle.remove()


# Whole engines


@pytest.fixture(scope="module")
def pair(hugging_face_model):
    return hugging_face_model, truncated_copy(hugging_face_model, 2)


PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [40, 3, 3, 8]]
PARAMS = [
    sd.SamplingParams(max_new_tokens=23),
    sd.SamplingParams(max_new_tokens=17, temperature=0.8, seed=3),
    sd.SamplingParams(max_new_tokens=20, temperature=1.1, repetition_penalty=1.3, seed=4),
    sd.SamplingParams(max_new_tokens=1),
    sd.SamplingParams(max_new_tokens=30),
]


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "mixed"])
@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_engines_emit_the_same_with_and_without_graphs(pair, method, greedy, graphs_on_cpu):
    params = [replace(p, temperature=0.0, repetition_penalty=1.0) for p in PARAMS] if greedy else PARAMS
    outputs, engines = [], []
    for eager in (False, True):
        engine = sd.Engine(*pair, method=method, max_batch_size=3, num_draft_tokens=3, enforce_eager=eager)
        for _ in range(2):
            outputs.append([output.raise_for_error().token_ids for output in engine.generate(PROMPTS, params)])
        engines.append(engine.describe())
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert [len(ids) for ids in outputs[0]] == [p.max_new_tokens for p in params]
    graphed, eager = engines
    assert graphed["graphs"]
    assert graphed["graphs_captured"] > 0
    assert graphed["draft"]["graphs_captured"] > 0
    assert (eager["graphs"], eager["graphs_captured"], eager["draft"]["graphs"]) == (False, 0, False)


def test_there_are_none_on_a_cpu(pair):
    told = sd.Engine(*pair).describe()
    assert (told["graphs"], told["why_no_graphs"], told["draft"]["graphs"]) == (False, None, False)


# Waiting


def found_in_steps(pair, monkeypatch, params, num_draft_tokens=3):
    """What would wait for a GPU, in every step of a run: in its launch, and in its end."""
    engine = sd.Engine(*pair, max_batch_size=3, num_draft_tokens=num_draft_tokens)
    launch, finish, found_in = engine._launch, engine._finish, []

    def watched_launch(*args):
        with waits(monkeypatch) as found:
            step = launch(*args)
        found_in.append((found, []))
        return step

    def watched_finish(step):
        with waits(monkeypatch) as found:
            emitted = finish(step)
        found_in[-1][1].extend(found)
        return emitted

    monkeypatch.setattr(engine, "_launch", watched_launch)
    monkeypatch.setattr(engine, "_finish", watched_finish)
    for output in engine.generate(PROMPTS, params, progress=False):
        output.raise_for_error()
    assert len(found_in) > 5
    return found_in


@pytest.mark.skipif(all_ops()["linear"].why_unavailable("cpp") is not None, reason="PyTorch's ops wait")
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("params", [PARAMS[0], PARAMS], ids=["greedy", "mixed"])
def test_a_step_waits_once_and_not_to_be_launched(pair, monkeypatch, params, num_draft_tokens, graphs_on_cpu):
    found_in = found_in_steps(pair, monkeypatch, params, num_draft_tokens)
    assert all(found == ([], ["to_host"]) for found in found_in), found_in


@pytest.mark.skipif(all_ops()["linear"].why_unavailable("cpp") is not None, reason="PyTorch's ops wait")
@pytest.mark.parametrize(
    ("wait", "named"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: bool((x > 0).any()), "__bool__"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "aten.index"),
        (lambda x: x.argmax(-1).tolist(), "tolist"),
        (lambda x: torch.tensor([1.0], device=x.device), "tensor"),
        (lambda x: x[..., [0, 1]], "__getitem__ by a list"),
    ],
)
@pytest.mark.parametrize("which", [0, 1], ids=["verify", "draft"])
def test_a_wait_inside_a_forward_is_found(pair, monkeypatch, wait, named, which, graphs_on_cpu):
    inner = pair[which].lm_head
    forward = inner.forward

    def waiting(x):
        wait(x)
        return forward(x)

    monkeypatch.setitem(inner.__dict__, "forward", waiting)
    found_in = found_in_steps(pair, monkeypatch, PARAMS[0])
    assert all(named in launched for launched, _ in found_in[:3]), found_in[0]
