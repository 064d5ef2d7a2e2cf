"""The noise of sampling has the values of its definition, on every backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec_fast.ops import all_ops
from specdec_fast.ops import sampling as oracle_sampling
from support.op_checks import device_for
from support.sampling_by_hand import noise_by_hand, philox_by_hand

OP = all_ops()["verify_chain"]
BACKENDS = list(OP.implementations)
# The known answers of the paper's own code (Random123, kat_vectors).
VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_of(backend: str) -> Callable[..., list[int]]:
    if backend == "hand":
        return philox_by_hand
    device_for(OP, backend)
    if backend == "cpp":
        from specdec_fast import _C

        return _C.philox4x32
    if backend == "triton":
        from specdec_fast.triton_kernels.sampling import philox4x32
    else:
        philox4x32 = oracle_sampling.philox4x32
    device = device_for(OP, backend)
    return lambda c, k: [int(w) for w in philox4x32(tuple(torch.tensor([x], device=device) for x in c), k)]


@pytest.mark.parametrize("backend", ["hand", *BACKENDS])
@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_has_the_published_values(backend, counter, key, words):
    assert tuple(philox_of(backend)(counter, key)) == words


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 2**32 + 5), (2**63 - 1, 17)])
def test_noise(seed, position):
    noise = oracle_sampling.gumbel_noise(11, seed, position, torch.device("cpu"))
    torch.testing.assert_close(noise, torch.tensor(noise_by_hand(11, seed, position), dtype=torch.float64))
