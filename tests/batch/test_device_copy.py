"""Numbers on their way to a device and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_fast import device_copy
from specdec_fast.device_copy import all_to_device, to_device, to_host

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


@pytest.fixture
def copies(monkeypatch):
    """The sizes of all copies; a stand-in device whose copies do not share the host's memory, which is then reused."""
    sizes = []

    def copied(tensor, device):
        sizes.append(tensor.nbytes)
        copy = tensor.clone()
        tensor.fill_(0x5A)
        return copy

    monkeypatch.setattr(device_copy, "_copied", copied)
    return sizes


ARRAYS = [
    np.arange(3, dtype=np.int32),
    np.array([[2**40, -1], [7, 8]], np.int64),
    np.zeros(0, np.int64),
    np.array([0.1, 1e-300, -np.inf]),
    np.arange(24, dtype=np.int32).reshape(4, 6)[::2, 1:4],  # not contiguous
    np.arange(4, dtype=np.int32).reshape(2, 2)[:, :0],
]


def test_arrays_travel_in_one_copy_and_keep_bits_dtypes_and_shapes(copies):
    tensors = all_to_device(ARRAYS, torch.device("cuda"))
    assert len(copies) == 1
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.copy()))
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.is_contiguous()
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0


def test_nothing_is_packed_on_a_cpu(copies):
    tensors = all_to_device(ARRAYS, CPU)
    assert copies == []
    assert all(torch.equal(t, torch.from_numpy(a.copy())) for t, a in zip(tensors, ARRAYS, strict=True))


def test_pieces_of_one_copy_do_not_overlap(copies):
    first, second = all_to_device([np.zeros(3, np.int32), np.ones(3, np.int64)], torch.device("cuda"))
    first.fill_(-1)
    assert second.tolist() == [1, 1, 1]
