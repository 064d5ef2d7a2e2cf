"""FlashAttention's launcher, with the oracle in the place of the kernels that only a GPU can run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from test_ops import same_bits
from test_oracle_ops import changed
from torch.nn.attention import varlen

from specdec_fast.errors import BackendError
from specdec_fast.ops import all_ops, flash
from specdec_fast.ragged import PagedBatch, Scores

ORACLE = all_ops()["paged_attention"].load("torch")
CONTEXTS, ROWS = (300, 9, 512, 40), (6, 6, 3, 1)  # ragged; one context fills its pages, one is nearly all new rows


def arguments(window: int | None = None, softcap: float | None = None, heads: int = 4) -> dict:
    g = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 8, 256, 2, 32, generator=g).half()
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, *ROWS]).cumsum(0).int(),
        seqused_k=torch.tensor(CONTEXTS).int(),
        block_table=torch.tensor([[3, 5], [1, 0], [7, 2], [4, 0]]).int(),
        max_seqlen_q=max(ROWS),
        max_seqlen_k=max(CONTEXTS),
    )
    query = torch.randn(heads, sum(ROWS), 32, generator=g).half().transpose(0, 1)
    return {"query": query, "kv": (kv[0], kv[1]), "batch": batch, "scores": Scores(0.2, window, softcap)}


def with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, window_size, **options):
    """What flash_attn_with_kvcache computes: the same number of rows, the last ones, of every sequence."""
    softcap = options.pop("softcap")
    assert (window_size[1], options) == (0, {"causal": True})
    window = None if window_size[0] == -1 else window_size[0] + 1
    out = torch.full_like(q, float("nan"))
    for b, context in enumerate(cache_seqlens.tolist()):
        rows = min(q.shape[1], context)  # rows before the first position see nothing
        batch = PagedBatch(
            cu_seqlens_q=torch.tensor([0, rows]).int(),
            seqused_k=cache_seqlens[b : b + 1],
            block_table=block_table[b : b + 1],
            max_seqlen_q=rows,
            max_seqlen_k=context,
        )
        scores = Scores(softmax_scale, window, softcap or None)
        out[b, -rows:] = ORACLE(q[b, -rows:], (k_cache, v_cache), batch, scores)
    return out


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """What torch's varlen_attn computes on pages."""
    assert (cu_seq_k, options.pop("num_splits"), options.pop("enable_gqa")) == (None, 1, query.shape[1] != key.shape[2])
    left, right = options.pop("window_size")
    assert right == 0
    lengths = {"seqused_k": options.pop("seqused_k"), "block_table": options.pop("block_table")}
    batch = PagedBatch(cu_seqlens_q=cu_seq_q, max_seqlen_q=max_q, max_seqlen_k=max_k, **lengths)
    scores = Scores(options.pop("scale"), None if left == -1 else left + 1)
    assert not options
    return ORACLE(query, (key, value), batch, scores)


@pytest.fixture(params=["package", "torch"])
def by(request, monkeypatch) -> str:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=with_kvcache))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    chosen = {"package": flash._by_package, "torch": flash._by_torch}[request.param]
    monkeypatch.setattr(flash, "_implementation", lambda: chosen)
    return request.param


@pytest.mark.parametrize("window", [None, 1, 8], ids=["all", "itself", "window"])
@pytest.mark.parametrize("heads", [2, 4], ids=["multi_head", "grouped"])
def test_rows_reach_the_kernel_and_return(by, window, heads):
    args = arguments(window=window, heads=heads)
    torch.testing.assert_close(flash.paged_attention(**args), ORACLE(**args))
    wrong = ORACLE(**changed(args, "scores.sliding_window", lambda was: (was or 100) + 1))
    assert not same_bits(flash.paged_attention(**args), wrong)


def test_soft_cap_reaches_the_package_only(by):
    args = arguments(softcap=2.0)
    if by == "package":
        torch.testing.assert_close(flash.paged_attention(**args), ORACLE(**args))
    else:
        with pytest.raises(BackendError, match="no soft cap; install flash-attn"):
            flash.paged_attention(**args)


def test_no_rows_need_no_kernel():
    args = arguments()
    batch = args["batch"]
    empty = PagedBatch(
        cu_seqlens_q=batch.cu_seqlens_q[:1],
        seqused_k=batch.seqused_k[:0],
        block_table=batch.block_table[:0],
        max_seqlen_q=0,
        max_seqlen_k=0,
    )
    assert flash.paged_attention(args["query"][:0], args["kv"], empty, args["scores"]).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("query", torch.Tensor.float, "float16 and bfloat16, not float32"),
        ("batch.tree_mask", lambda _: torch.ones(16, 1).int(), "chains of draft tokens, not trees"),
        ("kv", lambda kv: tuple(x.view(-1, 16, 2, 32) for x in kv), "not of 16; set page_size=256"),
    ],
)
def test_what_is_not_served_is_refused(path, change, message):
    with pytest.raises(BackendError, match=message):
        flash.paged_attention(**changed(arguments(), path, change))
