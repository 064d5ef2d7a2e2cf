"""Ops of recurrent layers: a row has the bits of plain decoding, whatever the batch, the chunks and rejected rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.op_cases import OP_CASES
from specdec_fast.ops import all_ops
from support.grids import each_value_once
from support.op_cases import CASES, changed, each_dtype, make
from support.op_checks import assert_implementation_agrees, device_for, same_bits
from support.recurrent_calls import POOLS, Layer, Run, Sequence, Step, random_steps

OPS = tuple(POOLS)
SUBJECTS = (
    ("conv_rows_", "odd_channels"),
    ("linear_attention_rows_", "gated_delta"),
    ("linear_attention_rows_", "delta_per_channel"),
    ("linear_attention_rows_", "mamba"),
    ("selective_scan_rows_", "groups"),
    ("selective_scan_rows_", "odd_sizes"),
)
each_subject = pytest.mark.parametrize(("op", "case"), SUBJECTS, ids=["-".join(subject) for subject in SUBJECTS])
each_op = pytest.mark.parametrize(("op", "case"), [SUBJECTS[0], SUBJECTS[1], SUBJECTS[4]], ids=OPS)


def by_plain_decoding(layer: Layer, rows: list[int]) -> tuple[dict[int, Tensor], Tensor]:
    """One row in each call, alone."""
    sequence = Sequence(rows, slot=1)
    for _ in rows:
        layer.call([sequence], [Step(1)], [])
    return sequence.outputs, layer.state(sequence)


def assert_bits_of_plain_decoding(op: str, case: str, run: Run, dtype: torch.dtype, seed: int, num_rows: int) -> None:
    """Three sequences with random steps, in a batch whose order and members change."""
    generator = torch.Generator().manual_seed(seed)
    layer = Layer(op, case, run, dtype, num_slots=5)
    orders = [torch.randperm(layer.num_rows, generator=generator).tolist()[:num_rows] for _ in range(3)]
    sequences = [Sequence(rows, slot) for rows, slot in zip(orders, (3, 1, 4), strict=True)]
    steps = [list(random_steps(num_rows, generator)) for _ in sequences]
    while any(steps):
        chosen = [i for i in torch.randperm(3, generator=generator).tolist() if steps[i]]
        chosen = chosen[: int(torch.randint(1, 4, (), generator=generator))]
        layer.call([sequences[i] for i in chosen], [steps[i].pop(0) for i in chosen], orders[0])
    layer.call(sequences, [Step(0)] * 3, [])  # accepted rows alone
    for sequence in sequences:
        outputs, state = by_plain_decoding(Layer(op, case, run, dtype, num_slots=2), sequence.rows)
        assert sequence.length == num_rows
        assert all(same_bits(sequence.outputs[p], outputs[p]) for p in range(num_rows))
        assert same_bits(layer.state(sequence), state)
    assert all(pool[[0, 2]].isnan().all() for pool in layer.pools), "a slot without an owner was written"


@each_value_once("op", "case", "dtype")
@each_dtype
@pytest.mark.parametrize("backend", ["cpp", "torch"])
@each_subject
def test_rows_have_the_bits_of_plain_decoding(op, case, backend, dtype):
    device_for(all_ops()[op], backend)
    for seed in range(2 if backend == "cpp" else 1):
        assert_bits_of_plain_decoding(op, case, all_ops()[op].load(backend), dtype, seed, num_rows=11)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.grid)])
@each_op
def test_rows_have_the_bits_of_plain_decoding_in_triton(op, case, dtype):
    device_for(all_ops()[op], "triton")
    assert_bits_of_plain_decoding(op, case, all_ops()[op].load("triton"), dtype, seed=2, num_rows=5)


# Negative controls: a state that has advanced by another number of rows, and a kept row at another place.
def one_row_too_many(run: Run, **args: Any) -> Tensor:
    counts = args["batch"].num_replayed + args["batch"].cu_seqlens.diff().int()
    return run(**changed(args, "batch.num_stored", lambda stored: torch.minimum(stored + 1, counts)))


def one_row_too_few(run: Run, **args: Any) -> Tensor:
    return run(**changed(args, "batch.num_stored", lambda stored: (stored - 1).clamp(min=0)))


def next_row_replayed(run: Run, **args: Any) -> Tensor:
    return run(**changed(args, "batch.state_lengths", lambda length: length + (args["batch"].num_replayed > 0).int()))


# A convolution stores all rows, and rejected ones are overwritten; so only a wrong position can harm it.
WRONG = [(*SUBJECTS[0], next_row_replayed)]
WRONG += [(*subject, wrong) for subject in SUBJECTS[1:] for wrong in (one_row_too_many, one_row_too_few)]
WRONG += [(*subject, next_row_replayed) for subject in SUBJECTS[1:]]


@pytest.mark.parametrize(("op", "case", "wrong"), WRONG)
def test_another_number_of_rows_is_noticed(op, case, wrong):
    run = all_ops()[op].load("torch", check=False)
    assert_bits_of_plain_decoding(op, case, run, torch.float32, seed=2, num_rows=9)
    with pytest.raises(AssertionError):
        assert_bits_of_plain_decoding(op, case, lambda **args: wrong(run, **args), torch.float32, 2, num_rows=9)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@each_op
def test_nan_stays_in_its_sequence(op, case, backend):
    """In a sequence's state and kept rows, and in the scratch slot."""
    device_for(all_ops()[op], backend)
    run, spoiled = all_ops()[op].load(backend), 4
    args, plain = make(op, case), make(op, case)
    for pool in args[POOLS[op]] if op != "conv_rows_" else [args["state"]]:
        pool[[0, int(args["batch"].slots[spoiled])]] = float("nan")
    got, expected = run(**args), run(**plain)
    first, stop = args["batch"].cu_seqlens[spoiled : spoiled + 2].tolist()
    assert got[first:stop].isnan().all()
    assert same_bits(got[:first], expected[:first])
    assert same_bits(got[stop:], expected[stop:])


@pytest.mark.parametrize("op", OPS)
def test_number_of_threads_changes_no_bit(op):
    device_for(all_ops()[op], "cpp")
    case = next(case for case in OP_CASES[op].benchmarks if case.name == "verify")
    run, before = all_ops()[op].load("cpp"), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            args = case.make(torch.Generator().manual_seed(0), torch.bfloat16, torch.device("cpu"))
            results.append((run(**args), args[POOLS[op]]))
    finally:
        torch.set_num_threads(before)
    assert same_bits(*results)


def versions() -> list[str]:
    if all_ops()["conv_rows_"].why_unavailable("cpp"):
        return []
    from specdec_fast import _C

    return _C.recurrent_versions()


@pytest.fixture(params=versions())
def version(request) -> Iterator[str]:
    from specdec_fast import _C

    _C.choose_recurrent_version(request.param)
    yield request.param
    _C.choose_recurrent_version(versions()[-1])


@each_value_once
@each_dtype
def test_every_version_agrees_with_the_oracle(version, dtype):
    for name, case in CASES:
        if name in OPS:
            op = all_ops()[name]
            assert_implementation_agrees(op, op.load("cpp"), lambda name=name, case=case: make(name, case, dtype))


@each_value_once("version", "op", "case")
@each_dtype
@each_subject
def test_rows_are_independent_in_every_version(version, op, case, dtype):
    assert_bits_of_plain_decoding(op, case, all_ops()[op].load("cpp"), dtype, seed=3, num_rows=10)


def test_unknown_version_is_refused():
    _C = pytest.importorskip("specdec_fast._C", reason="built without C++")
    with pytest.raises(ValueError, match="no version 'mmx'"):
        _C.choose_recurrent_version("mmx")


# What the engine's unchecked calls would otherwise do outside the pools.
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slots", 99, "sequence 1 has slot 99; there are"),
        ("slots", -1, "sequence 1 has slot -1; there are"),
        ("cu_seqlens", 99, r"sequence 0 has rows 0 to 99; there are \d+ rows"),
        ("num_stored", 99, r"sequence 1 has a state of length .* and stores 99 of 3 rows"),
        ("num_replayed", -1, r"sequence 1 has a state of length .*, replays -1 rows"),
        ("state_lengths", -1, "sequence 1 has a state of length -1"),
    ],
)
@each_op
def test_cpp_refuses_what_lies_outside(op, case, field, value, message):
    device_for(all_ops()[op], "cpp")
    args = make(op, case)
    before = make(op, case)
    getattr(args["batch"], field)[1] = value
    with pytest.raises(IndexError, match=message):
        all_ops()[op].load("cpp", check=False)(**args)
    assert same_bits(args[POOLS[op]], before[POOLS[op]])


@pytest.mark.parametrize("op", OPS[1:])
def test_cpp_refuses_more_kept_rows_than_places(op):
    device_for(all_ops()[op], "cpp")
    args = make(op, "gated_delta" if op == OPS[1] else "mixed")
    args["batch"].num_replayed[4] = 9
    with pytest.raises(IndexError, match="sequence 4 needs 12 places for kept rows; there are 8"):
        all_ops()[op].load("cpp", check=False)(**args)


def test_slot_0_may_appear_twice():
    """It is for rows that pad a batch."""
    args = make("linear_attention_rows_", "chunk")
    args["batch"] = replace(args["batch"], slots=torch.zeros(2, dtype=torch.int32))
    all_ops()["linear_attention_rows_"].check(**args)
