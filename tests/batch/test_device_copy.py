"""Numbers on their way to a device and back."""

from __future__ import annotations

import numpy as np
import torch

from specdec_fast import device_copy
from specdec_fast.device_copy import to_device, to_host

CPU = torch.device("cpu")


def test_arrays_keep_their_dtype_and_numbers_get_one():
    assert to_device(np.array([[1, 2]], np.int32), CPU).dtype == torch.int32
    assert torch.equal(to_device([1, 2], CPU), torch.tensor([1, 2]))
    assert to_device([0.5], CPU, torch.float64).dtype == torch.float64
    assert to_device([], CPU).shape == (0,)


def test_what_comes_in_one_piece_is_taken_apart():
    results = [torch.arange(5), torch.tensor([2**31 - 1, -1], dtype=torch.int32), torch.empty(0, dtype=torch.int64)]
    expected = [[0, 1, 2, 3, 4], [2**31 - 1, -1], []]
    assert to_host(results) == expected
    joined = torch.cat(results)
    assert joined.dtype == torch.int64, "int32 beside int64 is joined as int64"
    assert device_copy._split(joined.tolist(), [5, 2, 0]) == expected
