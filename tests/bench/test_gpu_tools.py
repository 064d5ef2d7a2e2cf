"""What ``bench.gpu`` uses: references, batches taken apart, poisoned memory, the device's clock, random models."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.common import device as bench_device
from bench.common import pairs
from bench.common.attention_shapes import AttentionShape, part_of, repeated
from bench.common.references import attention_in_float64
from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_ import kernels as gpu_kernels
from bench.gpu_.flash_references import FLASH_REFERENCES
from bench.op_cases import OP_CASES
from specdec_fast import Engine, SamplingParams
from specdec_fast.ops.paged_attention import paged_attention
from specdec_fast.runner.ragged_model import RaggedModel
from support.op_cases import attention_by_hand

CPU = torch.device("cpu")


def test_fp64_reference_is_the_definition():
    for case in OP_CASES["paged_attention"].cases:
        args = case.make(torch.Generator().manual_seed(0), torch.float32, CPU)
        torch.testing.assert_close(attention_in_float64(**args), attention_by_hand(**args), rtol=0, atol=1e-14)


def test_parts_and_repeats_of_a_batch_are_the_same_rows():
    args = AttentionShape((20, 7), (5, 3), heads=4, kv_heads=2, head_dim=16, page_size=4).make(torch.float64, CPU)
    whole = attention_in_float64(**args)
    alone, rows = part_of(args, 0, 1, 3)
    assert rows == slice(1, 4)
    torch.testing.assert_close(attention_in_float64(**alone), whole[rows])
    assert part_of(args, 1, 2, 9)[1] == slice(7, 8), "it ends with its sequence"
    torch.testing.assert_close(attention_in_float64(**repeated(args, 2)), whole.repeat(2, 1, 1))


def varlen_by_hand(query, key, value, *lengths, window_size, enable_gqa, scale, **paged):
    """What torch documents of ``varlen_attn``, causal from the lower right; contexts in pages, or one after another."""
    assert (window_size, enable_gqa) == ((-1, 0), True)
    starts, key_starts, max_q, max_k = lengths
    out = []
    for b in range(len(starts) - 1):
        if paged:
            used = paged["seqused_k"][b]
            keys, values = (x[paged["block_table"][b].long()].flatten(0, 1)[:used] for x in (key, value))
        else:
            keys, values = (x[key_starts[b] : key_starts[b + 1]] for x in (key, value))
        rows = query[starts[b] : starts[b + 1]]
        assert len(rows) <= max_q
        assert len(keys) <= max_k
        mask = torch.ones(len(rows), len(keys), dtype=torch.bool).tril(len(keys) - len(rows))
        heads = (x.transpose(0, 1) for x in (rows, keys, values))
        out.append(scaled_dot_product_attention(*heads, mask, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("name", FLASH_REFERENCES)
def test_flash_references_attend_to_the_same(name, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_hand)
    lengths = ((300, 300), (6, 6)) if name == "sdpa_causal" else ((300, 290, 17), (6, 3, 1))
    args = AttentionShape(*lengths, heads=4, kv_heads=2, head_dim=16).make(torch.float32, CPU)
    torch.testing.assert_close(FLASH_REFERENCES[name](**args)(), paged_attention(**args))


def test_poison_is_seen_and_undone():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    with bench_device.poisoned():
        assert torch.empty(1000).isnan().all()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
    assert torch.are_deterministic_algorithms_enabled() == before[0]


def plain_engine(enforce_eager):
    sizes = gpu_decoding.SMOKE
    model = pairs.random_model(sizes.target, sizes.vocab_size, sizes.dtype, CPU, 0)
    return Engine(model, None, method="eqspec", enforce_eager=enforce_eager)


def test_forward_meter_adds_up_forwards_and_leaves(monkeypatch):
    """A clock that only forwards move, by a second each."""
    now, forward = [0.0], RaggedModel.forward

    def slow(self, *args, **kwargs):
        now[0] += 1.0
        return forward(self, *args, **kwargs)

    engine = plain_engine(enforce_eager=True)
    monkeypatch.setattr(RaggedModel, "forward", slow)
    monkeypatch.setattr(bench_device, "perf_counter", lambda: now[0])
    with bench_device.ForwardMeter([engine.target], CPU) as meter:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=7, ignore_eos=True), progress=False)
    assert meter.seconds() == now[0] >= 7
    assert "forward" not in vars(engine.target)


def test_forward_meter_reads_the_clock_of_a_program():
    """Every step adds to it, and no more than the stages of the steps."""
    engine, found = plain_engine(enforce_eager=False), []
    engine.generate([[1, 2, 3]], progress=False)
    with bench_device.ForwardMeter([engine.target], CPU) as meter:
        assert engine.target.program is None or meter.seconds() == 0
        for _ in engine.stream([[1, 2, 3]], SamplingParams(max_new_tokens=7, ignore_eos=True)):
            found.append(meter.seconds())
    stages = engine.last_run.timer.seconds
    assert 0 < found[0] < found[-1] < stages["prefill"] + stages["verify"]
    assert all(earlier < later for earlier, later in itertools.pairwise(found))


class Event:
    """A CUDA event whose clock moves on by a millisecond whenever one is recorded."""

    now = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.now += 1
        self.at = Event.now

    def elapsed_time(self, later):
        return later.at - self.at  # milliseconds, as in torch


def test_forward_meter_reads_the_events_of_a_gpu(monkeypatch):
    synchronized = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    graphs = SimpleNamespace(draft=lambda x: x + 1, verify=lambda x: x - 1)
    model = SimpleNamespace(forward=lambda x, scale: scale * x, graphs=graphs, program=None)
    cuda = torch.device("cuda")
    with bench_device.ForwardMeter([model], cuda) as meter:
        assert [model.forward(x, scale=2) for x in (1, 2, 3)] == [2, 4, 6]
        assert (graphs.draft(7), graphs.verify(7)) == (8, 6)
    assert meter.seconds() == pytest.approx(5e-3)
    assert synchronized == [cuda], "the clock of an event is read after it has happened"


def test_cases_are_the_same_on_every_device():
    make = partial(gpu_kernels.make_case, OP_CASES["verify_chain"].cases[0], torch.float32, 3)
    assert gpu_kernels.same_bits(make(CPU), make(CPU))
    assert not gpu_kernels.same_bits(make(CPU), {**make(CPU), "logits": -make(CPU)["logits"]})
