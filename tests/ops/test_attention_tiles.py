"""Attention on tiles (AMX) adds in the order that is documented for TDPBF16PS, on portable arithmetic and on AMX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch
from specdec_fast.ops import all_ops
from support.grids import each_value_once, grid
from support.op_checks import assert_agrees, assert_rows_independent, long_prefill
from support.tile_arithmetic import by_the_manual, cancelling, one_chain

_C = pytest.importorskip("specdec_fast._C", reason="built without C++")
OP = all_ops()["paged_attention"]
attention = OP.load("cpp")
PORTABLE = "amx-bf16-portable"
TILES = [version for version in (PORTABLE, "amx-bf16") if version in _C.attention_versions()]


@pytest.fixture(autouse=True, params=TILES)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    _C.choose_attention_version(request.param)
    yield
    _C.choose_attention_version(_C.attention_versions()[-1])


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Rows [T, heads, dim] that see all entries [positions, dim] and are a sequence each; one KV head."""
    num_rows, context = len(query), len(key)
    batch = PagedBatch(
        cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32),
        seqused_k=torch.full((num_rows,), context, dtype=torch.int32),
        block_table=torch.zeros(num_rows, 1, dtype=torch.int32),
        max_seqlen_q=1,
        max_seqlen_k=context,
    )
    return attention(query, (key[None, :, None], value[None, :, None]), batch, AttentionParams(scale=scale))


# A scale of 0 gives every position the weight 1, so that an output is the sum of values by their number. The positions
# are one step, one and a part, and a tile; the columns one tile, three, and four.
@pytest.mark.parametrize(("context", "value_dim", "heads"), [(32, 16, 1), (42, 48, 3), (64, 64, 40)], ids=str)
def test_values_are_added_in_the_order_of_the_manual(context: int, value_dim: int, heads: int) -> None:
    value, _ = cancelling(value_dim, context, 1)
    half, ones = context // 2, torch.ones(heads, context)
    value[:, half:] = -value[:, :half].flip(1)
    expected = (by_the_manual(ones, value) / context).bfloat16()
    out = attend(torch.ones(1, heads, 32).bfloat16(), torch.ones(context, 32).bfloat16(), value.T.contiguous(), 0.0)
    assert torch.equal(out[0], expected)
    assert not torch.equal((one_chain(ones, value) / context).bfloat16(), expected), (
        "another order would not be noticed"
    )


# Exact scores are 0, so a score is rounding, which the scale makes visible. Entry 0 has the score 0 and the value 0,
# entry 1 the score of the product and the value 1.
@pytest.mark.parametrize(("head_dim", "heads"), [(32, 1), (64, 19), (256, 40)], ids=str)
def test_scores_are_added_in_the_order_of_the_manual(head_dim: int, heads: int) -> None:
    query, key = cancelling(heads, head_dim, 1)
    scores, others = by_the_manual(query, key), one_chain(query, key)
    scale = 1.0 / float(scores.abs().max())

    def expected(scores: Tensor) -> Tensor:
        return torch.sigmoid(scores.double() * scale)

    entries = torch.cat([torch.zeros_like(key), key])
    value = torch.tensor([0.0, 1.0]).bfloat16()[:, None].expand(2, 16).contiguous()
    out = attend(query[None], entries, value, scale)[0, :, :1].double()
    rounding = 2.0**-8  # of a weight, and of the output
    assert (out - expected(scores)).abs().max() <= rounding
    assert (expected(others) - expected(scores)).abs().max() > 4 * rounding, "another order would not be noticed"


def prompts(head_dim: int, value_dim: int, heads: int, **params: Any) -> dict[str, Any]:
    """Two prompts of 203 and 70 rows; 2 KV heads."""
    generator = torch.Generator().manual_seed(head_dim)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    return long_prefill(torch.bfloat16) | {
        "query": randn(273, heads, head_dim),
        "kv": (randn(40, 8, 2, head_dim), randn(40, 8, 2, value_dim)),
        "params": AttentionParams(head_dim**-0.5, **params),
    }


# Groups of 1, 3 and 20 heads: rows end within a tile of rows, at its end, and fill several. Windows that end within a
# tile of positions and beyond one. Values of one tile of columns, of three, and of a size that no tile has.
@pytest.mark.parametrize(
    "case",
    grid(
        {
            "softcap": prompts(32, 16, 2, softcap=2.0),
            "short_window": prompts(96, 48, 6, sliding_window=5),
            "large_group_with_sinks": prompts(64, 64, 40, sliding_window=70, sinks=torch.linspace(-2, 2, 40)),
            "no_whole_tiles": prompts(64, 24, 6, sliding_window=70),
            "short_chunks": prompts(96, 48, 6, attention_chunk=5),
            "chunks": prompts(64, 64, 40, attention_chunk=70),
        },
        keep=["softcap", "short_window", "no_whole_tiles", "short_chunks"],
    ),
)
@each_value_once
def test_a_row_has_the_same_bits_beside_any_others(case: dict[str, Any]) -> None:
    assert_agrees(OP, attention(**case), OP.load("torch")(**case), case)
    for chunk in (1, 6, 17):
        assert_rows_independent(attention, case, chunk)


def test_portable_tiles_are_never_the_choice_of_a_machine() -> None:
    assert PORTABLE in _C.attention_versions()
    assert _C.attention_versions()[-1] != PORTABLE
