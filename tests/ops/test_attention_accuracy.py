"""How much an fp32 output of the C++ ``paged_attention`` loses to rounding, for every instruction set."""

from __future__ import annotations

import pytest
import torch
from ops.test_fuzz_attention import VERSIONS, in_cpp

from specdec_fast.batch.ragged_batch import AttentionParams
from support.op_cases import CPU, attention_in_fp64
from support.strategies_attention import AttentionCall

ROUNDING = 2.0**-24  # of one fp32 number, relative


# The bounds lie between the present error and that of a simpler kernel: 7.7 with one sum over a head_dim of 64 instead
# of two, 9.4 with tanh as (1 - e) / (1 + e). PyTorch's own errors were 7.7 and 5.6 on an EPYC (Zen 4).
@pytest.mark.parametrize(
    ("head_dim", "params", "bound"),
    [
        pytest.param(64, AttentionParams(0.25), 6.5, id="long sums"),
        pytest.param(16, AttentionParams(4.0, softcap=16.0), 7.5, id="scores near the soft cap"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_root_mean_square_of_the_rounding_errors(version, head_dim, params, bound):
    squares = torch.zeros(2, dtype=torch.float64, device="cpu")
    for seed in range(4):
        call = AttentionCall(
            sequences=((200, 9), (130, 2), (67, 5), (199, 1)),
            page_size=16,
            kv_heads=2,
            group=2,
            head_dim=head_dim,
            params=params,
            reach=None,
            layout="contiguous",
            spare=0,
            dtype=torch.float32,
            seed=seed,
            value_dim=64,
            sinks=None,
        )
        truth = attention_in_fp64(**call.make(CPU))
        error = in_cpp(version)(**call.make(CPU)) - truth
        squares += torch.stack([error.square().sum(), truth.square().sum()])
    assert (squares[0] / squares[1]).sqrt() <= bound * ROUNDING
