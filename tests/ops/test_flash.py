"""The launcher of FlashAttention, with the oracle instead of the library, which no CPU can run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from bench.op_cases.paged_attention import PagedShape
from specdec_fast import Engine, SamplingParams
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.errors import BackendError
from specdec_fast.ops import all_ops, flash, resolve
from support.models import tiny_model, truncated_copy
from support.op_cases import CPU, changed

ORACLE = all_ops()["paged_attention"].load("torch")


def make(dtype: torch.dtype = torch.float16, **shape: Any) -> dict[str, Any]:
    given = {"contexts": (40, 300, 9), "rows": (6, 3, 1), "page_size": 256} | shape
    return PagedShape(**given).draw(torch.Generator().manual_seed(0), dtype)


def params_of(scale: float, window: tuple[int, int], softcap: float = 0.0) -> AttentionParams:
    """Convert the library's arguments back: a window counts the entries before the row's own, and -1 is none."""
    assert window[1] == 0, "causal"
    return AttentionParams(scale, None if window[0] < 0 else window[0] + 1, softcap or None)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Tensor:
    """Attend as the package does: rows are at the end of the context, and padding rows may hold anything."""
    assert set(given) == {
        *("cache_seqlens", "block_table", "softmax_scale", "causal", "window_size", "softcap", "num_splits"),
    }
    assert given["causal"]
    assert given["num_splits"] == 1
    assert k_cache.shape[1] % 256 == 0
    out = torch.full_like(q, float("nan"))
    for b, context in enumerate(given["cache_seqlens"].tolist()):
        count = min(q.shape[1], context)
        batch = PagedBatch(
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            seqused_k=given["cache_seqlens"][b : b + 1],
            block_table=given["block_table"][b : b + 1],
            max_seqlen_q=count,
            max_seqlen_k=context,
        )
        params = params_of(given["softmax_scale"], given["window_size"], given["softcap"])
        out[b, q.shape[1] - count :] = ORACLE(q[b, q.shape[1] - count :], (k_cache, v_cache), batch, params)
    return out


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None, max_q: int, max_k: int, **given: Any
) -> Tensor:
    assert set(given) == {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
    assert cu_seq_k is None
    assert given["num_splits"] == 1
    assert given["enable_gqa"] == (query.shape[1] != key.shape[2])
    batch = PagedBatch(
        cu_seqlens_q=cu_seq_q,
        seqused_k=given["seqused_k"],
        block_table=given["block_table"],
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
    )
    return ORACLE(query, (key, value), batch, params_of(given["scale"], given["window_size"]))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache))
    flash._package.cache_clear()
    yield
    flash._package.cache_clear()


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    flash._package.cache_clear()
    yield
    flash._package.cache_clear()


SERVED = {
    "ragged": {},
    "equal_rows": {"rows": (4, 4, 4)},
    "decode": {"rows": (1, 1, 1)},
    "no_rows": {"rows": (3, 0, 1)},
    "window": {"sliding_window": 5},
    "window_of_one": {"sliding_window": 1},
    "multi_head": {"heads": 2, "kv_heads": 2},
    "empty": {"contexts": (), "rows": ()},
}


def assert_is_the_oracle(args: dict[str, Any]) -> None:
    torch.testing.assert_close(flash.paged_attention(**args), ORACLE(**args))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("shape", [*SERVED.values(), {"softcap": 2.0}], ids=[*SERVED, "softcap"])
def test_package(shape):
    assert_is_the_oracle(make(**shape))


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("shape", SERVED.values(), ids=SERVED.keys())
def test_varlen(shape):
    assert_is_the_oracle(make(torch.bfloat16, **shape))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    "wrong",
    [lambda args: changed(args, "params.sliding_window", lambda window: window + 1),
     lambda args: {**args, "query": args["query"].flip(0)}],
    ids=["window", "rows"],
)  # fmt: skip
def test_comparison_rejects(wrong: Callable[[dict[str, Any]], dict[str, Any]]):
    args = make(sliding_window=5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(flash.paged_attention(**wrong(args)), ORACLE(**args))


LIMITS = {
    "fp32": ({"dtype": torch.float32}, r"torch.float32; it takes float16 and bfloat16"),
    "tree": ({"tree": True}, "a tree mask; it takes chains"),
    "page_size": ({"page_size": 16}, "pages of 16; it takes multiples of 256: pass page_size=256"),
    "value_dim": ({"value_dim": 64}, "values of 64 beside keys of 32; it takes one size"),
    "sinks": ({"sinks": True}, "attention sinks"),
    "chunk": ({"attention_chunk": 5}, r"chunks of positions \(attention_chunk\)"),
    "head_dim": ({"head_dim": 20}, "heads of 20; it takes multiples of 8 up to 256"),
}


@pytest.mark.parametrize("installed", ["package", "no_package"])
@pytest.mark.parametrize(("shape", "message"), LIMITS.values(), ids=LIMITS.keys())
def test_limits_say_what_to_do(shape, message, installed, request):
    request.getfixturevalue(installed)
    with pytest.raises(BackendError, match=f"FlashAttention does not serve {message}.*pass backend='triton'"):
        flash.paged_attention(**make(**shape))


@pytest.mark.usefixtures("no_package")
def test_soft_cap_needs_the_package():
    with pytest.raises(BackendError, match="a soft cap; only the flash-attn package has one: install it"):
        flash.paged_attention(**make(softcap=2.0))


@pytest.mark.usefixtures("no_package")
def test_another_implementation_takes_any_page(monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert_is_the_oracle(make(page_size=16))


@pytest.mark.usefixtures("no_package")
def test_an_error_of_torch_comes_with_what_to_do(monkeypatch):
    def refuse(*args: Any, **given: Any) -> Tensor:
        raise RuntimeError("paged attention is not built in")

    monkeypatch.setattr(varlen, "varlen_attn", refuse)
    with pytest.raises(BackendError, match=r"paged attention is not built in.*install flash-attn"):
        flash.paged_attention(**make())


def varlen_attn_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    raise AssertionError("it would read the pages as one long context")


@pytest.mark.usefixtures("no_package")
def test_a_varlen_attn_without_pages_is_refused(monkeypatch):
    """Its signature is checked first; otherwise a TypeError would come from inside a model."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn_of_2_11)
    message = r"has no seqused_k, block_table, num_splits, enable_gqa, so.*backend='triton'"
    with pytest.raises(BackendError, match=message):
        flash.paged_attention(**make())


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_model_is_probed_with_the_pages_it_will_have(deterministic, monkeypatch):
    """FlashAttention takes pages of 256; probes of a loaded model must not ask for others."""
    ops = resolve(CPU, "torch").replaced(paged_attention=flash.paged_attention)
    ops = replace(ops, unchecked=replace(ops, unchecked=None))
    monkeypatch.setattr("specdec_fast.runner.loading.resolve_all", lambda devices, backend, dtype: ops)
    settings = {"max_batch_size": 2, "num_draft_tokens": 2, "deterministic": deterministic}
    model = tiny_model("llama").to(torch.bfloat16)
    engine = Engine(model, truncated_copy(model, 1).to(torch.bfloat16), page_size=256, **settings)
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4), progress=False)
    assert len(output.raise_for_error().token_ids) == 4
    with pytest.raises(BackendError, match="pages of 16; it takes multiples of 256: pass page_size=256"):
        Engine(model, None, **settings)
