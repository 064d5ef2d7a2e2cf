"""A program asks for huge pages for its weights: their contents and addresses stay, in every kind of memory.

Whether Linux moves them depends on the machine and its free memory, so no test checks that.
"""

from __future__ import annotations

import mmap

import pytest
import torch

from support.programs import needs_programs

pytestmark = needs_programs

_ROW = 512  # features; a weight has _NUM_ROWS of them, 8 MiB in fp32
_NUM_ROWS = 4096
_OFFSET = 1000  # numbers before a weight, so that it begins within a page


def _of_a_tensor(contents: torch.Tensor) -> torch.Tensor:
    memory = torch.zeros(_OFFSET + contents.numel())
    memory[_OFFSET:] = contents
    return memory


def _of_a_file(contents: torch.Tensor, path) -> torch.Tensor:
    path.write_bytes(_of_a_tensor(contents).numpy().tobytes())
    return torch.from_file(str(path), shared=False, size=_OFFSET + contents.numel())


def _of_a_mapping(contents: torch.Tensor) -> torch.Tensor:
    """Return memory after which nothing is mapped for sure, unlike that of an allocator."""
    memory = torch.frombuffer(mmap.mmap(-1, 4 * (_OFFSET + contents.numel())), dtype=torch.float32)
    memory[_OFFSET:] = contents
    return memory


@pytest.mark.parametrize("kind", ["tensor", "file", "mapping"])
def test_weights_keep_their_contents_and_addresses(kind, tmp_path):
    from specdec_fast import _C

    contents = torch.randn(_NUM_ROWS * _ROW, generator=torch.Generator().manual_seed(0))
    make = {"tensor": _of_a_tensor, "file": lambda c: _of_a_file(c, tmp_path / "weights"), "mapping": _of_a_mapping}
    memory = make[kind](contents)
    address = memory.data_ptr() + 4 * _OFFSET
    program = _C.Program(0, [], [0, 0, 0])
    program.add_linear(0, 0, 0, 0, [1, _ROW, _NUM_ROWS], address, 0, False)
    assert memory.data_ptr() + 4 * _OFFSET == address
    assert torch.equal(memory[_OFFSET:], contents)
    assert not memory[:_OFFSET].any()
    memory[_OFFSET:].mul_(2)
    assert torch.equal(memory[_OFFSET:], 2 * contents)
