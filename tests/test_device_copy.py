"""Numbers on their way to a device and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_fast import device_copy
from specdec_fast.device_copy import (
    HostCopy,
    Joined,
    PackedArrays,
    all_to_device,
    all_to_host,
    joined,
    to_device,
    to_host,
)

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
    in_one = joined(results)
    assert in_one.values.dtype == torch.int64, "int32 beside int64 is joined as int64"
    assert to_host(in_one) == expected
    assert to_host(HostCopy(results)) == expected


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


def test_tensors_come_to_the_host_in_one_copy_and_keep_bits_dtypes_and_shapes():
    tensors = [torch.from_numpy(array.copy()) for array in ARRAYS]
    tensors += [torch.arange(6).view(2, 3).T, torch.tensor([[7]]).expand(1, 1)]
    for arrays in (all_to_host(tensors), device_copy._in_one_copy_to_host(tensors)):
        for array, tensor in zip(arrays, tensors, strict=True):
            assert array.dtype == tensor.numpy().dtype
            assert array.shape == tuple(tensor.shape)
            assert array.flags.aligned
            assert array.tobytes() == tensor.numpy().tobytes()
    assert all_to_host([]) == []


def test_arrays_travel_in_one_copy_and_keep_bits_dtypes_and_shapes(copies):
    tensors = all_to_device(ARRAYS, torch.device("cuda"))
    assert len(copies) == 1
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.copy()))
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.is_contiguous()
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0


def test_arrays_without_numbers_travel(copies):
    """A batch that fills its bucket has no padding; views of an empty tensor failed on a GPU."""
    empty = [np.zeros(0, np.int64), np.zeros((2, 0), np.int32)]
    tensors = all_to_device(empty, torch.device("cuda"))
    assert [(tensor.dtype, tensor.shape) for tensor in tensors] == [(torch.int64, (0,)), (torch.int32, (2, 0))]


def test_nothing_is_packed_on_a_cpu(copies):
    tensors = all_to_device(ARRAYS, CPU)
    assert copies == []
    assert all(torch.equal(t, torch.from_numpy(a.copy())) for t, a in zip(tensors, ARRAYS, strict=True))


def test_pieces_of_one_copy_do_not_overlap(copies):
    first, second = all_to_device([np.zeros(3, np.int32), np.ones(3, np.int64)], torch.device("cuda"))
    first.fill_(-1)
    assert second.tolist() == [1, 1, 1]


SHAPES = {"a": (np.int64, (3,)), "b": (np.int32, (2, 3)), "c": (np.float64, (1,))}


def test_packed_arrays_arrive_and_nothing_else_of_the_device_moves():
    packed = PackedArrays(SHAPES, CPU)
    seen = {name: tensor.data_ptr() for name, tensor in packed.on_device.items()}
    assert all(address % 16 == packed.on_device["a"].data_ptr() % 16 for address in seen.values())
    for turn in range(3):
        arrays = packed.arrays()
        arrays["a"][:], arrays["b"][1], arrays["c"][0] = turn, turn + 10, turn / 4
        assert packed.on_device["a"].tolist() == [max(turn - 1, 0)] * 3, "not sent yet"
        packed.send()
        assert packed.on_device["a"].tolist() == [turn] * 3
        assert packed.on_device["b"].tolist() == [[0] * 3, [turn + 10] * 3]
        assert packed.on_device["c"].tolist() == [turn / 4]
    assert {name: tensor.data_ptr() for name, tensor in packed.on_device.items()} == seen
    assert [tensor.dtype for tensor in packed.on_device.values()] == [torch.int64, torch.int32, torch.float64]


class Event:
    """A CUDA event that has passed only if it was waited for."""

    def __init__(self):
        self.noted, self.passed = [], True

    def query(self):
        return self.passed

    def synchronize(self):
        self.noted.append("wait")
        self.passed = True

    def record(self, stream):
        assert stream == ("the stream of", CPU), "not that of the current device, which may be another one"
        self.noted.append("record")
        self.passed = False


def test_the_host_writes_no_buffer_whose_transfer_still_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("the stream of", device))
    packed = PackedArrays(SHAPES, CPU)
    packed._sent = [Event(), Event()]
    buffers = []
    for _ in range(5):
        buffers.append(packed.arrays()["a"].ctypes.data)
        packed.send()
    assert buffers[0] != buffers[1]
    assert buffers == [buffers[0], buffers[1]] * 2 + [buffers[0]]
    assert [event.noted for event in packed._sent] == [
        ["record", "wait", "record", "wait", "record"],
        ["record", "wait", "record"],
    ]


def test_joined_results_are_read_at_once():
    values = torch.tensor([5, 6, 7, 1, 0, 9], dtype=torch.int64)
    assert to_host(Joined(values, (slice(0, 3), slice(3, 4), slice(5, 6)))) == [[5, 6, 7], [1], [9]]
