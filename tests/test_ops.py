"""Every op on every backend against the oracle; and what the op layer promises around the kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_fast.errors import BackendError, ConfigError
from specdec_fast.ops import AUTO, BACKENDS, Op, all_ops, availability, registry, resolve

CPU = torch.device("cpu")
SEEDS = (0, 1, 2)
# All dtypes the ops take: each has a code path of its own in every kernel.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
CASES = {(op.name, case.name): case for op in all_ops().values() for case in op.cases()}
SWEEP = [
    pytest.param(op, backend, case, id=f"{op.name}-{backend}-{case.name}")
    for op in all_ops().values()
    for backend in op.implementations
    if backend != "torch"
    for case in op.cases()
]


def make(op: str, case: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    return CASES[op, case].make(torch.Generator().manual_seed(seed), dtype, CPU)


def device_for(op: Op, backend: str) -> torch.device:
    """Where to run it here; skips with the reason if it cannot run."""
    reason = op.why_unavailable(backend)
    here = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    served = [name for name in BACKENDS[backend].device_types if name in here] if reason is None else []
    if not served:
        pytest.skip(reason or f"{backend} serves {BACKENDS[backend].device_types}, not {sorted(here)}")
    return torch.device(served[0])


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def same_bits(first: Any, second: Any) -> bool:
    """torch.equal, but for NaNs (equal to themselves) and signed zeros (not equal)."""

    def described(value: Any) -> list[tuple[Any, ...]]:
        return [(t.dtype, t.shape, t.contiguous().cpu().flatten().view(torch.uint8).tolist()) for t in tensors(value)]

    return described(first) == described(second)


def attention_fp64(
    query, kv, block_table, cu_seqlens_q, seqused_k, scale, sliding_window=None, softcap=None
) -> Tensor:  # fmt: skip
    out, starts = torch.empty_like(query, dtype=torch.float64), cu_seqlens_q.tolist()
    for b, context in enumerate(seqused_k.tolist()):
        rows = query[starts[b] : starts[b + 1]].double()
        pages = block_table[b, : -(-context // kv[0].shape[1])].long()
        group = query.shape[1] // kv[0].shape[2]
        key, value = (c[pages].flatten(0, 1)[:context].double().repeat_interleave(group, 1) for c in kv)
        scores = torch.einsum("rhd,khd->hrk", rows, key) * scale
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        at = torch.arange(context - len(rows), context)[:, None] - torch.arange(context)  # distance row - key
        hidden = (at < 0) | (at >= (sliding_window or context + 1))
        weights = scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1)
        out[starts[b] : starts[b + 1]] = torch.einsum("hrk,khd->rhd", weights, value)
    return out


# An op that is not exact needs its definition in fp64 here, so that the oracle's own error is known.
REFERENCES: dict[str, Callable[..., Tensor]] = {"paged_attention": attention_fp64}


def assert_agrees(op: Op, got: Any, oracle: Any, args: dict[str, Any]) -> None:
    """Exact ops bit by bit; the others by at most twice the oracle's error against fp64 plus one rounding unit."""
    if op.exact:
        assert same_bits(got, oracle)
        return
    assert (got.dtype, got.shape) == (oracle.dtype, oracle.shape)
    truth = REFERENCES[op.name](**args)
    error, oracle_error, largest = (
        float(x.abs().max()) if x.numel() else 0.0 for x in (got.double() - truth, oracle.double() - truth, truth)
    )
    assert error <= 2 * oracle_error + torch.finfo(oracle.dtype).eps * largest


@each_dtype
@pytest.mark.parametrize(("op", "backend", "case"), SWEEP)
def test_backend_agrees_with_the_oracle(op, backend, case, dtype):
    device = device_for(op, backend)
    for seed in SEEDS:
        args, oracle_args = (case.make(torch.Generator().manual_seed(seed), dtype, device) for _ in range(2))
        got, oracle = op.load(backend)(**args), op.load("torch")(**oracle_args)
        assert_agrees(op, got, oracle, oracle_args)
        assert same_bits(args, oracle_args), "the arguments were changed in another way"


def swapped(append: Callable[..., None], **args: Any) -> None:
    append(**{**args, "key": args["value"], "value": args["key"]})


def last_of_equals(verify: Callable[..., Any], **args: Any) -> Any:
    target, accepted, following = verify(**{**args, "logits": args["logits"].flip(1)})
    return args["logits"].shape[1] - 1 - target, accepted, following


def window_too_long(attention: Callable[..., Tensor], **args: Any) -> Tensor:
    return attention(**{**args, "sliding_window": args["sliding_window"] + 1})


# One plausible mistake per op: the comparison above is worth what it rejects.
@each_dtype
@pytest.mark.parametrize(
    ("name", "case", "wrong"),
    [("append_kv_", "verify", swapped), ("verify_chain", "tiny_vocabulary", last_of_equals),
     ("paged_attention", "window", window_too_long)],
)  # fmt: skip
def test_comparison_rejects(name, case, wrong, dtype):
    op, args, oracle_args = all_ops()[name], make(name, case, dtype), make(name, case, dtype)
    got, oracle = wrong(op.load("torch"), **args), op.load("torch")(**oracle_args)
    with pytest.raises(AssertionError):
        assert_agrees(op, (got, args) if op.exact else got, (oracle, oracle_args) if op.exact else oracle, oracle_args)


def test_compiled_extension_is_there():
    # else the sweep would skip every C++ case and still be green
    if os.environ.get("SPECDEC_NO_CPP") == "1":
        pytest.skip("built without C++ on purpose")
    assert BACKENDS["cpp"].why_unavailable() is None


def test_cases_say_what_they_would_catch():
    assert all(case.why for case in CASES.values())
    assert len(CASES) == sum(1 for op in all_ops().values() for _ in op.cases()), "two cases share a name"
    assert {op.name for op in all_ops().values() if not op.exact} == set(REFERENCES)


def assert_rows_independent(attention: Callable[..., Tensor], args: dict[str, Any], chunk: int) -> None:
    """``chunk`` rows of one sequence alone have the bits they have in the whole batch."""
    whole, starts = attention(**args), args["cu_seqlens_q"].tolist()
    for b, context in enumerate(args["seqused_k"].tolist()):
        for first in range(starts[b], starts[b + 1], chunk):
            last = min(first + chunk, starts[b + 1])
            part = {
                "query": args["query"][first:last],
                "block_table": args["block_table"][b : b + 1],
                "cu_seqlens_q": torch.tensor([0, last - first], dtype=torch.int32),
                "seqused_k": torch.tensor([context - (starts[b + 1] - last)], dtype=torch.int32),
            }
            assert same_bits(attention(**{**args, **part}), whole[first:last])


def long_prefill(dtype: torch.dtype) -> dict[str, Any]:
    """A prompt of 203 rows beside one of 70: several tiles and tasks of the kernel, none filled evenly."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 40, 8, 2, 24, generator=generator).to(dtype)
    return {
        "query": torch.randn(273, 4, 24, generator=generator).to(dtype),
        "kv": (kv[0], kv[1]),
        "block_table": torch.cat([torch.arange(1, 27), torch.arange(9, 35)]).int().view(2, 26),
        "cu_seqlens_q": torch.tensor([0, 203, 273], dtype=torch.int32),
        "seqused_k": torch.tensor([203, 70], dtype=torch.int32),
        "scale": 24**-0.5,
    }


# 1: decoding against verification and prefill; 3: prefill in chunks; all rows: a sequence alone against the batch.
@pytest.mark.parametrize("chunk", [1, 3, 10_000], ids=["row_by_row", "threes", "sequence_alone"])
@each_dtype
def test_cpp_attention_rows_are_independent(dtype, chunk):
    device_for(all_ops()["paged_attention"], "cpp")
    attention = all_ops()["paged_attention"].load("cpp")
    batches = [make(op, case, dtype) for op, case in CASES if op == "paged_attention"]
    for args in [*batches, long_prefill(dtype)]:
        assert_rows_independent(attention, args, chunk)


def attention_in_pieces(query, kv, block_table, cu_seqlens_q, seqused_k, scale) -> Tensor:
    """Sums the softmax in as many pieces as there are rows: right within rounding, but the batch changes bits."""
    out, starts = torch.empty_like(query), cu_seqlens_q.tolist()
    for b, context in enumerate(seqused_k.tolist()):
        rows = query[starts[b] : starts[b + 1]]
        key, value = (c[block_table[b].long()].flatten(0, 1)[:context].repeat_interleave(2, 1) for c in kv)
        at = torch.arange(context - len(rows), context)[:, None] - torch.arange(context)
        weights = (torch.einsum("rhd,khd->hrk", rows, key) * scale).exp().masked_fill(at < 0, 0)
        pieces = [p for p in torch.arange(context).tensor_split(len(query)) if len(p)]
        total = sum(torch.einsum("hrk,khd->rhd", weights[:, :, p], value[p]) for p in pieces)
        out[starts[b] : starts[b + 1]] = total / weights.sum(-1).T[:, :, None]
    return out


def test_independence_check_rejects_pieces_by_row_count():
    args = long_prefill(torch.float32)
    torch.testing.assert_close(attention_in_pieces(**args), attention_fp64(**args).float())
    for chunk in (1, 3, 10_000):
        with pytest.raises(AssertionError):
            assert_rows_independent(attention_in_pieces, args, chunk)


# Enough rows or logits that the kernels go to work with several threads.
@pytest.mark.parametrize(("name", "case"), [("paged_attention", "verify"), ("verify_chain", "large_vocabulary")])
def test_number_of_threads_changes_no_bit(name, case):
    device_for(all_ops()[name], "cpp")
    op, args, before = all_ops()[name].load("cpp"), make(name, case), torch.get_num_threads()
    single = op(**args)
    try:
        torch.set_num_threads(2)
        assert same_bits(op(**args), single)
    finally:
        torch.set_num_threads(before)


SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0)


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(1, 7), max_size=6),
    vocab_size=st.one_of(st.integers(2, 70), st.integers(2, 5000)),
    dtype=st.sampled_from(list(DTYPES.values())),
    levels=st.sampled_from([1, 2, 50, 100_000]),  # distinct logits: ties everywhere, or hardly any
    special=st.lists(st.sampled_from(SPECIAL), max_size=4),
    layout=st.sampled_from(["contiguous", "wider rows", "transposed"]),
    seed=st.integers(0, 2**31),
)
def test_verify_chain_in_cpp_equals_the_oracle(counts, vocab_size, dtype, levels, special, layout, seed):
    device_for(all_ops()["verify_chain"], "cpp")
    g, rows = torch.Generator().manual_seed(seed), sum(counts)
    shape = (vocab_size, rows) if layout == "transposed" else (rows, vocab_size + 3 * (layout == "wider rows"))
    logits = ((torch.randint(levels, shape, generator=g) - levels // 2) / 8).to(dtype)
    logits = logits.T if layout == "transposed" else logits[:, :vocab_size]
    for value in special if rows else ():  # a few places each, so that not every row has all of them
        places = torch.randint(rows, (3,), generator=g), torch.randint(vocab_size, (3,), generator=g)
        logits[places] = value
    guess = torch.randint(0, vocab_size, (rows,), generator=g)
    token_ids = torch.where(torch.rand(rows, generator=g) < 0.7, logits.argmax(-1).roll(1), guess)
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
    got, want = (all_ops()["verify_chain"].load(b)(logits, token_ids, cu_seqlens) for b in ("cpp", "torch"))
    assert same_bits(got, want)


def test_named_backend_that_cannot_run_says_why(monkeypatch):
    broken = replace(BACKENDS["cpp"], why_unavailable=lambda: "the moon is full; wait for the new one")
    monkeypatch.setitem(registry.BACKENDS, "cpp", broken)
    with pytest.raises(BackendError, match=r"backend 'cpp' cannot serve .*the moon is full; wait for the new one"):
        resolve(CPU, "cpp")
    assert set(resolve(CPU, AUTO).chosen.values()) == {"torch"}, "auto falls back"
    reasons = {backend: reason for _, backend, reason in availability()}
    assert reasons["torch"] is None
    assert "the moon is full" in reasons["cpp"]


def test_auto_prefers_the_compiled_ops():
    device_for(all_ops()["verify_chain"], "cpp")
    assert set(resolve(CPU).chosen.values()) == {"cpp"}


def test_backend_without_the_op_says_which_have_it():
    op = replace(all_ops()["verify_chain"], implementations={"torch": "nowhere:nothing"})
    with pytest.raises(BackendError, match=r"no implementation of this op \(there are: torch\)"):
        op.load("cpp")


def test_backend_of_another_device_is_refused():
    with pytest.raises(BackendError, match="serves cpu, not cuda"):
        resolve(torch.device("cuda"), "cpp")


def test_unknown_backend_lists_the_known():
    with pytest.raises(ConfigError, match=f"backend='abacus': expected one of {', '.join([AUTO, *BACKENDS])}"):
        resolve(CPU, "abacus")
