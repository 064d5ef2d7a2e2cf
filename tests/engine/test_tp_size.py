"""``tp_size``: the engine starts the other ranks of its target, and sends them the forwards to compute."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, Qwen3Config, Qwen3ForCausalLM

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.kv_cache.forward_layout import batch_without_pages
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.kv_cache.state_pool import StateShape
from specdec_fast.planner.checkpoint import checkpoint_sizes
from specdec_fast.ranks.exchange import ABORTED
from specdec_fast.ranks.messages import UseTaps
from specdec_fast.ranks.workers import expect_no_group, join_group
from specdec_fast.runner.follower import Follower
from specdec_fast.runner.graphs.store import GraphSpec, GraphStore
from specdec_fast.runner.leader import Leader
from specdec_fast.runner.model_memory import bytes_of, weights_of
from support.graph_follower import ranks_as_on_gpus
from support.graphs import LIMITS
from support.grids import grid
from support.recurrent_models import recurrent_model
from support.scripted_drafter import Scripted
from support.scripted_trees import RandomTrees
from support.tp_size import (
    PROMPTS,
    SIZES,
    engine_of,
    expect_bits_of_plain_decoding,
    params_of,
    plainly,
    saved,
    together,
)

ENDED_SECONDS = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("accelerate")  # transformers needs it for plans
    return saved(tmp_path_factory.mktemp("target"), "untied")


def process_ids(engine):
    return [process.pid for process in engine.target.leader.workers.processes]


def is_alive(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def has_ended(process_id):
    deadline = time.monotonic() + ENDED_SECONDS
    while is_alive(process_id) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(process_id)


def test_bits_depend_neither_on_the_batch_nor_on_k_and_an_interrupt_loses_nothing(folder, monkeypatch):
    with engine_of(folder, RandomTrees([])) as engine:
        assert engine.describe()["forward_program"]
        assert engine.target.layout.shapes[0].num_kv_heads * 2 == SIZES["num_key_value_heads"]
        expected = expect_bits_of_plain_decoding(engine)
        assert engine.describe()["prefix_cache"]["num_pages"] > 0

        class Interrupted(BaseException):
            pass

        def interrupted(*_):
            raise Interrupted

        with monkeypatch.context() as patch:  # after the other rank has received the forward
            patch.setattr(engine.target, "program", interrupted)
            with pytest.raises(Interrupted):
                together(engine)
        assert together(engine) == expected
        (other,) = process_ids(engine)
    assert has_ended(other)
    with pytest.raises(sd.EngineClosedError, match="closed"):
        together(engine)
    whole = sd.Engine(folder, None)
    for (_, logprobs), (_, of_whole) in zip(expected, plainly(whole), strict=True):
        assert logprobs[0] == pytest.approx(of_whole[0], abs=1e-4)  # the first: later ones if tokens are equal


def test_a_rank_that_ends_ends_all_requests_of_a_service(folder):
    service = sd.AsyncEngine(folder, "ngram", tp_size=2, max_batch_size=2)
    (other,) = process_ids(service.engine)

    async def serve():
        params = sd.SamplingParams(max_new_tokens=90)
        requests = [asyncio.create_task(service.generate(prompt, params)) for prompt in PROMPTS]
        async for _ in service.stream([7], params):
            os.kill(other, signal.SIGKILL)
            break
        outputs = await asyncio.gather(*requests)
        later = await service.generate([1], params)
        await service.close()
        return [*outputs, later]

    started = time.monotonic()
    outputs = asyncio.run(serve())
    assert time.monotonic() - started < ENDED_SECONDS
    assert isinstance(service.failure, sd.RankError)
    for output in outputs:
        assert output.finish_reason == "error"
        assert isinstance(output.error.__cause__, sd.RankError)
        assert "rank 1 of the target has ended (signal 9)" in str(output.error)
    with pytest.raises(sd.RankError, match="signal 9"):
        service.engine.generate([[1]])
    with pytest.raises(sd.RankError, match="signal 9"):  # a rank may end while pages are allocated
        PagePool(service.engine.target.layout, 512, 16)


def noted(exchange, sent, rows, *given):
    sent.append(rows.shape[-1] * rows.itemsize)
    return exchange(rows, *given)


def exchanges_of_a_row(engine, monkeypatch):
    """Return how many exchanges rank 0 makes in a forward, and the bytes that it sends of every row."""
    ranks = engine.target.leader.workers.ranks
    sent = []
    for name in ("sum", "concatenate"):
        counting = partial(noted, getattr(ranks, name), sent)
        monkeypatch.setattr(ranks, name, counting)
    engine.generate([[1]], sd.SamplingParams(max_new_tokens=1), progress=False)
    return len(sent), sum(sent)


@pytest.mark.grid
def test_all_ranks_replay_graphs_of_recurrent_layers(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    ranks_as_on_gpus(monkeypatch)
    recurrent_model("qwen3.5", num_key_value_heads=2).save_pretrained(tmp_path)
    with engine_of(str(tmp_path), "ngram", prefix_cache=False) as engine:
        expected = plainly(engine)
        assert together(engine) == expected
        assert engine.describe()["graphs_captured"] > 1


def test_all_ranks_replay_graphs(folder, monkeypatch):
    """As on GPUs: the ranks record the same forwards at the same time, or they would wait for each other."""
    ranks_as_on_gpus(monkeypatch)
    with engine_of(folder, RandomTrees([]), prefix_cache=False) as engine:
        expect_bits_of_plain_decoding(engine)
        described = engine.describe()
        assert (described["graphs"], described["why_no_graphs"]) == (True, None)
        assert described["graphs_captured"] > 1
        part = engine.target.model.lm_head.part
        part.weight.data = part.weight.data.clone()
        with pytest.raises(sd.UnsupportedModelError, match="has changed since the engine was made"):
            engine.generate(PROMPTS[0], params_of(0))


def test_a_sharded_model_records_nothing_where_memory_ran_out():
    """Other ranks may have had the memory: they would replay what this rank computes in another way."""

    def fail(_):
        raise MemoryError

    for is_sharded in (True, False):
        store = GraphStore(fail, LIMITS, is_sharded=is_sharded)
        inputs = SimpleNamespace(batch=SimpleNamespace(recurrent=None))
        record = partial(store._recorded, lambda: GraphSpec(inputs, None, tuple), lambda *_: None)  # noqa: B023
        if is_sharded:
            with pytest.raises(MemoryError):
                record()
        else:
            assert record() is None
            assert store.why_not == "MemoryError: "


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "tp_size", "settings"),
    [
        ("untied", 2, {"dtype": "bfloat16"}),
        ("tied", 2, {"enforce_eager": True}),
        ("tied", 4, {"num_draft_tokens": "auto"}),
        ("experts", 2, {"enforce_eager": True}),
        ("untied", 2, {"dtype": "bfloat16", "quantization": "int4-a8"}),
        ("tied", 4, {"quantization": "int8", "enforce_eager": True}),
        ("experts", 2, {"quantization": "int4"}),
    ],
)
def test_other_models_and_numbers_of_ranks_have_equal_bits(kind, tp_size, settings, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    engine = engine_of(saved(tmp_path, kind), RandomTrees([]), tp_size, **settings)
    expect_bits_of_plain_decoding(engine)
    dtype = engine.target.layout.dtype
    sizes = checkpoint_sizes(str(tmp_path), dtype, settings.get("quantization"), tp_size)
    assert bytes_of(weights_of(engine.target.model)) == sizes.weights
    if not engine.target.has_program:
        assert exchanges_of_a_row(engine, monkeypatch) == sizes.exchanges
    others = process_ids(engine)
    assert len(others) == tp_size - 1
    del engine
    gc.collect()
    assert all(has_ended(other) for other in others)


@pytest.mark.parametrize(
    "family",
    grid(
        {
            "qwen3-next": ("qwen3-next", {"dtype": "bfloat16"}),
            "qwen3.5": ("qwen3.5", {"enforce_eager": True}),
            "jamba": ("jamba", {}),
            "nemotron-h": ("nemotron-h", {}),
        },
        keep=["qwen3-next"],
    ),
)
def test_every_rank_has_the_states_of_recurrent_layers(family, tmp_path):
    """Slots grow with the sequences, and the larger pool takes them."""
    pytest.importorskip("accelerate")
    name, settings = family
    recurrent_model(name, num_key_value_heads=2).save_pretrained(tmp_path)
    texts = []

    def script(sequence, limit):  # some of it is rejected
        text = next((text for text in texts if text[: sequence.length] == sequence.token_ids), None)
        drafted = [] if text is None else text[sequence.length : sequence.length + limit]
        return [token if i % 5 else token ^ 1 for i, token in enumerate(drafted, start=sequence.length)]

    with engine_of(str(tmp_path), Scripted(script), prefix_cache=False, **settings) as engine:
        expected = plainly(engine)
        texts += [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)]
        assert together(engine) == expected
        counts = engine.last_run.decoding
        assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens


def test_a_follower_counts_the_growths_of_rank_0(monkeypatch):
    """Graphs are recorded again after a growth, even after one that has failed in rank 0 alone."""
    cpu = torch.device("cpu")
    states = (StateShape("conv_rows_", (3, 4), 0, torch.float32),)
    layout = replace(KVLayout.uniform(1, 1, 1, torch.float32, cpu), states=states)
    follower = Follower(rank=1, num_ranks=2)
    target = SimpleNamespace(layout=layout, forward=lambda *_: None)
    monkeypatch.setattr(follower, "_target", target)
    pool = PagePool(layout, 8, 4)
    monkeypatch.setattr(follower, "_pools", {0: PagePool(layout, 8, 4)})
    leader = Leader(InThisProcess(follower), num_threads=1)
    monkeypatch.setitem(leader._numbers, pool, 0)
    batch = batch_without_pages(torch.zeros(2, dtype=torch.int64, device=cpu))
    for num_slots, fails in ((5, False), (9, True)):
        if fails:
            pool.states.num_growths += 1
        else:
            pool.have_slots(num_slots)
        leader.compute(lambda *_: 3, batch, pool, None, None)
        of_follower = follower._pools[0].states
        assert (of_follower.num_slots, of_follower.num_growths) == (5, pool.states.num_growths)


def aborted(*_):
    raise RuntimeError(ABORTED)


class InThisProcess:
    """Workers with one follower, without processes."""

    failure = None
    ranks = SimpleNamespace(native=SimpleNamespace(restart=lambda: None))

    def __init__(self, follower):
        self.follower = follower
        self.answered = []

    def send(self, message):
        is_asked, answer = self.follower.answer(message)
        if is_asked:
            self.answered = [answer]

    def answers(self):
        return self.answered

    def abort(self):
        pass

    close = abort


@pytest.mark.parametrize(
    ("error", "expected"), [(MemoryError("no more"), MemoryError), (ValueError("wrong"), sd.RankError)]
)
def test_a_forward_that_fails_in_another_rank_raises_in_rank_0(monkeypatch, error, expected):
    """Memory that runs out there is an error after which the engine tries fewer rows."""

    def fail(*_):
        raise error

    cpu = torch.device("cpu")
    pool = PagePool(KVLayout.uniform(1, 1, 1, torch.float32, cpu), 4, 4)
    batch = batch_without_pages(torch.zeros(2, dtype=torch.int64, device=cpu))
    follower = Follower(rank=1, num_ranks=2)
    target = SimpleNamespace(layout=pool.layout, forward=fail)
    monkeypatch.setattr(follower, "_target", target)
    monkeypatch.setattr(follower, "_pools", {0: pool})
    leader = Leader(InThisProcess(follower), num_threads=1)
    monkeypatch.setitem(leader._numbers, pool, 0)
    with pytest.raises(expected, match=f"rank 1 of the target: {type(error).__name__}: {error}"):
        leader.compute(aborted, batch, pool, None, None)
    computed = []
    target.forward = lambda *given: computed.append(given)
    assert leader.compute(lambda *_: 3, batch, pool, None, None) == 3
    assert len(computed) == 1


@pytest.mark.grid
def test_ranks_end_when_the_process_of_the_engine_is_killed(folder):
    program = (
        "import specdec_fast as sd, sys, time\n"  # no `if __name__`, and no file
        f"engine = sd.Engine({folder!r}, None, tp_size=2)\n"
        "engine.generate([[1]], sd.SamplingParams(max_new_tokens=2), progress=False)\n"
        "print(engine.target.leader.workers.processes[0].pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        other = int(process.stdout.readline())
        assert is_alive(other)
        process.kill()
    assert has_ended(other)


def test_an_error_of_the_model_in_all_ranks_is_that_of_rank_0(monkeypatch):
    def fail(*_):
        raise sd.UnsupportedModelError("no such layers")

    follower = Follower(rank=1, num_ranks=2)
    cpu = torch.device("cpu")
    monkeypatch.setattr(follower, "_target", SimpleNamespace(layout=SimpleNamespace(device=cpu), use_taps=fail))
    leader = Leader(InThisProcess(follower), num_threads=1)
    with pytest.raises(sd.UnsupportedModelError, match=r"^no such layers"):
        leader.together(UseTaps((1,)), fail)
    with pytest.raises(sd.RankError, match="rank 1 of the target: UnsupportedModelError: no such layers"):
        leader.together(UseTaps((1,)), aborted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL connects later")
def test_ranks_that_connect_wait_shortly_for_one_that_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("specdec_fast.ranks.workers._CONNECT_TIMEOUT", timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        join_group(0, 2, str(tmp_path))
    expect_no_group()


class TestRefusals:
    """What is refused before a process is started."""

    def test_wrong_numbers(self, folder):
        for wrong in (0, -1, "2", True):
            with pytest.raises(sd.ConfigError, match=r"tp_size=.*: expected an integer >= 1"):
                sd.EngineConfig(tp_size=wrong)
        with pytest.raises(sd.ConfigError, match="num_attention_heads=8 cannot be divided by the 3 processes"):
            sd.Engine(folder, None, tp_size=3)

    def test_a_loaded_model(self):
        with pytest.raises(sd.ConfigError, match="tp_size=2, but the target is a loaded Qwen3ForCausalLM"):
            sd.Engine(Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval(), None, tp_size=2)

    def test_a_model_without_a_plan(self, tmp_path):
        pytest.importorskip("accelerate")
        GPT2Config().save_pretrained(tmp_path)
        with pytest.raises(sd.NotYetSupportedError, match="no tensor-parallel plan for models of type 'gpt2'"):
            sd.Engine(str(tmp_path), None, tp_size=2)

    @pytest.mark.parametrize(
        ("settings", "error"),
        [
            ({"device": "cuda:1"}, sd.ConfigError),
        ],
    )
    def test_settings(self, settings, error):
        (name,) = settings
        with pytest.raises(error, match=rf"tp_size=2.*{name}="):
            sd.Engine(str(demo_pair() / "target"), None, tp_size=2, **settings)

    @pytest.mark.parametrize(
        ("method", "quantization", "error"),
        [
            ("gptq", "int8", (sd.ConfigError, "are quantised already")),
            ("bitsandbytes", None, (sd.NotYetSupportedError, "quantised by bitsandbytes")),
        ],
    )
    def test_quantised_checkpoints(self, method, quantization, error, tmp_path):
        pytest.importorskip("accelerate")
        config = Qwen3Config(**SIZES)
        config.quantization_config = {"quant_method": method}
        config.save_pretrained(tmp_path)
        kind, message = error
        with pytest.raises(kind, match=message):
            sd.Engine(str(tmp_path), None, tp_size=2, quantization=quantization)

    def test_fewer_gpus_than_ranks(self, folder, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(sd.ConfigError, match="takes a GPU of its own, and PyTorch sees 1;"):
            sd.Engine(folder, None, tp_size=2)

    def test_a_process_group_of_the_caller(self, folder):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            with pytest.raises(sd.ConfigError, match="tp_size makes a process group"):
                sd.Engine(folder, None, tp_size=2)
        finally:
            torch.distributed.destroy_process_group()
