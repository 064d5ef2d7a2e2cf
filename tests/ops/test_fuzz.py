"""Every op but attention on random shapes: backends against the oracle, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_fast.ops import all_ops
from support.fuzzing import fuzz, memory
from support.op_checks import device_for, same_bits
from support.strategies import CPP, TRITON, append_calls, compact_calls, realign_calls, verify_calls
from support.strategies_sampling import sampled_calls


def assert_equals_oracle(name: str, backend: str, call: Any) -> None:
    op = all_ops()[name]
    device = device_for(op, backend)
    args, oracle_args = call.make(device), call.make(device)
    assert same_bits(op.load(backend)(**args), op.load("torch")(**oracle_args))
    if name == "append_kv_":  # what padding leaves in the scratch page does not matter
        for cache in (args["key_cache"], args["value_cache"], oracle_args["key_cache"], oracle_args["value_cache"]):
            cache[0] = 0
    assert same_bits(memory(args), memory(oracle_args))


# Less than one vector, a few, tails after the last block of 4096 (C++) or of a power of two (Triton); batches of none.
VOCAB_SIZES = st.integers(2, 70) | st.integers(2, 5000) | st.sampled_from((4095, 4096, 4097, 8192, 8193))


@fuzz(120)
@given(call=verify_calls(CPP, VOCAB_SIZES, batch=6))
def test_verify_chain_in_cpp(call):
    assert_equals_oracle("verify_chain", "cpp", call)


@pytest.mark.grid
@fuzz(20)
@given(call=verify_calls(TRITON, VOCAB_SIZES, batch=3))
def test_verify_chain_in_triton(call):
    assert_equals_oracle("verify_chain", "triton", call)


# Every filter and penalty, alone and together; positions on both sides of 32 bits.
@fuzz(25)
@given(call=sampled_calls(CPP, VOCAB_SIZES, batch=6))
def test_sampling_in_cpp(call):
    assert_equals_oracle("verify_chain", "cpp", call)


@pytest.mark.grid
@fuzz(120)
@given(call=sampled_calls(CPP, VOCAB_SIZES, batch=6))
def test_sampling_in_cpp_at_length(call):
    assert_equals_oracle("verify_chain", "cpp", call)


@pytest.mark.grid
@fuzz(5)
@given(call=sampled_calls(TRITON, VOCAB_SIZES, batch=3))
def test_sampling_in_triton(call):
    assert_equals_oracle("verify_chain", "triton", call)


@pytest.mark.grid
@fuzz(20)
@given(call=sampled_calls(TRITON, VOCAB_SIZES, batch=3))
def test_sampling_in_triton_at_length(call):
    assert_equals_oracle("verify_chain", "triton", call)


# The largest vocabularies there are, in one sequence: many blocks, and more logits than one thread takes.
LARGE_VOCAB_SIZES = st.integers(100_000, 200_000) | st.sampled_from((128_256, 151_936, 200_000))


@fuzz(12)
@given(call=verify_calls(CPP, LARGE_VOCAB_SIZES, batch=1))
def test_verify_chain_of_a_large_vocabulary_in_cpp(call):
    assert_equals_oracle("verify_chain", "cpp", call)


@fuzz(4)
@given(call=verify_calls(TRITON, LARGE_VOCAB_SIZES, batch=1))
def test_verify_chain_of_a_large_vocabulary_in_triton(call):
    assert_equals_oracle("verify_chain", "triton", call)


@fuzz(12)
@given(call=sampled_calls(CPP, LARGE_VOCAB_SIZES, batch=1))
def test_sampling_of_a_large_vocabulary_in_cpp(call):
    assert_equals_oracle("verify_chain", "cpp", call)


# None to 40 rows beside padding rows, in pages of one to 16 slots; every layout a model may hand over.
@fuzz(120)
@given(call=append_calls(CPP))
def test_append_in_cpp(call):
    assert_equals_oracle("append_kv_", "cpp", call)


@pytest.mark.grid
@fuzz(20)
@given(call=append_calls(TRITON))
def test_append_in_triton(call):
    assert_equals_oracle("append_kv_", "triton", call)


# So few positions for so many moves that chains of them overlap, up and down in one sequence; over page boundaries.
@fuzz(120)
@given(call=compact_calls(CPP))
def test_compact_in_cpp(call):
    assert_equals_oracle("compact_kv_", "cpp", call)


@pytest.mark.grid
@fuzz(20)
@given(call=compact_calls(TRITON))
def test_compact_in_triton(call):
    assert_equals_oracle("compact_kv_", "triton", call)


# Every move that stays inside the columns: far, by little (it overlaps), not at all, of all columns and of none.
@fuzz(60)
@given(call=realign_calls(CPP))
def test_realign_in_cpp(call):
    assert_equals_oracle("realign_kv_", "cpp", call)


@pytest.mark.grid
@fuzz(20)
@given(call=realign_calls(TRITON))
def test_realign_in_triton(call):
    assert_equals_oracle("realign_kv_", "triton", call)
