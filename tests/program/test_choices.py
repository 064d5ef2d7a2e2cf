"""Which of equal numbers, and which of numbers that are none, a program chooses: topk, max and argmax."""

from __future__ import annotations

import pytest
import torch

from support.models import VOCAB_SIZE
from support.programs import WIDTH, Function, compiled, needs_programs

pytestmark = needs_programs


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(("size", "count"), [(8, 2), (24, 5), (24, 24), (256, 3), (256, 8)])
@torch.inference_mode()
def test_topk_chooses_among_equal_numbers_as_pytorch_does(size, count, is_sorted):
    """Scores of 16 bits tie; a program and PyTorch should then choose the same experts. NaN counts as the largest."""
    model = Function(lambda x, p: x.topk(count, sorted=is_sorted).indices.float())
    scores = torch.randint(6, (VOCAB_SIZE, size), generator=torch.Generator().manual_seed(size)).float()
    scores[7, 5] = scores[7, 3] = float("nan")
    scores[8] = 0.0
    model.embedding = torch.nn.Embedding.from_pretrained(scores)
    assert torch.equal(compiled(model)(torch.arange(97)), model(torch.arange(97)[None], None)[0])


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 1), (8, 2), (24, 5), (24, 24), (256, 8)])
@torch.inference_mode()
def test_kernels_choose_the_first_of_equal_numbers(size, count):
    """PyTorch's own choice among equal numbers differs between CPUs and GPUs. NaN counts as the largest."""
    pytest.importorskip("triton")
    from support.device_programs import launched

    model = Function(lambda x, p: x.topk(count).indices.float())
    scores = torch.randint(6, (VOCAB_SIZE, size), generator=torch.Generator().manual_seed(size)).float()
    scores[1, size // 2] = scores[2, 0] = float("nan")
    scores[3], scores[4, : size - 1], scores[5, ::2] = 0.0, float("-inf"), -0.0
    model.embedding = torch.nn.Embedding.from_pretrained(scores)
    order = scores[:9].nan_to_num(nan=float("inf"), neginf=float("-inf"), posinf=9.0)
    expected = order.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert launched(model)(torch.arange(9)).tolist() == expected.float().tolist()


@pytest.mark.parametrize("is_kernel", [False, True], ids=["cpp", "triton"])
@pytest.mark.parametrize("size", [1, 2, 8, 24])
@torch.inference_mode()
def test_the_first_of_equal_numbers_is_the_largest(size, is_kernel):
    """As PyTorch chooses on a CPU. NaN counts as the largest."""
    function = lambda x, p: torch.cat((*(y.float() for y in x.max(-1, keepdim=True)), x.argmax(-1, True).float()), -1)  # noqa: E731
    model, token_ids = Function(function), torch.arange(9)
    scores = torch.randint(4, (VOCAB_SIZE, size), generator=torch.Generator().manual_seed(size)).float()
    scores[1, size // 2 :] = scores[2, 0] = float("nan")
    scores[3], scores[4, : size - 1], scores[5, ::2] = 0.0, float("-inf"), -0.0
    model.embedding = torch.nn.Embedding.from_pretrained(scores)
    if is_kernel:
        pytest.importorskip("triton")
        from support.device_programs import launched as compiled_for
    else:
        compiled_for = compiled
    got, expected = compiled_for(model)(token_ids), model(token_ids[None], None)[0]
    assert torch.equal(got[:, 1:], expected[:, 1:])
    assert torch.equal(got.nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))


@torch.inference_mode()
def test_kernels_choose_from_vectors_as_long_as_the_choice():
    """The index and the vector then have axes of one size, which must not become one."""
    pytest.importorskip("triton")
    from support.device_programs import launched

    def sorted_and_back(x, p):
        values, places = x.float().topk(WIDTH)
        return torch.cat((values, x.gather(-1, places), torch.zeros_like(x).scatter(-1, places, values)), dim=-1)

    model, token_ids = Function(sorted_and_back), torch.arange(5)
    assert torch.equal(launched(model)(token_ids), model(token_ids[None], None)[0])
