"""Arguments that are not plain tensors: an op reads memory, so it refuses what its memory does not hold."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.op_cases import with_tensors
from specdec_fast.ops import all_ops
from support.grids import each_value_once
from support.lazy_signs import negative_view
from support.op_cases import CASES, make, named_tensors
from support.op_checks import assert_implementation_agrees, device_for, same_bits

# Their tensors take long to make, or are many of a kind that other cases have.
LEFT_OUT = ("large_vocabulary", "many_layers")


def places_of(name: str) -> dict[str, str]:
    """The path of every tensor that an op may get, with a case in which it has numbers."""
    places: dict[str, str] = {}
    for op, case in CASES:
        if op == name and case not in LEFT_OUT:
            for path, tensor in named_tensors(make(op, case)).items():
                if tensor.numel():
                    places.setdefault(path, case)
    return places


PLACES = {name: places_of(name) for name in all_ops()}
each_place = pytest.mark.parametrize(
    ("name", "path"), [pytest.param(name, path, id=f"{name}-{path}") for name in PLACES for path in PLACES[name]]
)


made = cache(make)  # drawing the arguments takes longer than the calls


def with_one(name: str, path: str, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    args = deepcopy(made(name, PLACES[name][path]))
    return with_tensors(args, lambda own, tensor: change(tensor) if own == path else tensor)


@each_place
def test_negative_views_are_refused(name, path):
    """Resolving one would cost a copy per call; and an op in place would write to the copy."""
    for backend in all_ops()[name].implementations:
        if all_ops()[name].why_unavailable(backend) is not None:
            continue
        args, before = (with_one(name, path, negative_view) for _ in range(2))
        with pytest.raises(ValueError, match=r"is a lazy negative view: .* pass its resolve_neg"):
            all_ops()[name].load(backend)(**args)
        assert same_bits(args, before)


def fake(tensor: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(tensor)


def zero(tensor: Tensor) -> Tensor:
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("without_memory", [fake, pytest.param(zero, marks=pytest.mark.grid)])
@each_place
def test_tensors_without_memory_are_refused(name, path, without_memory):
    """A kernel would get the address 0. ``test_ops.py`` has those on the meta device."""
    device_for(all_ops()[name], "cpp")
    with pytest.raises(ValueError, match=r"has no memory|has other strides"):
        all_ops()[name].load("cpp")(**with_one(name, path, without_memory))


@pytest.mark.parametrize("name", PLACES)
def test_tensors_of_functorch_are_refused(name):
    """PyTorch raises where their address is read; an op has no rule for another axis."""
    device_for(all_ops()[name], "cpp")
    path, case = next(iter(PLACES[name].items()))
    args, run = make(name, case), all_ops()[name].load("cpp")

    def call(tensor: Tensor) -> Tensor:
        run(**with_tensors(args, lambda own, other: tensor if own == path else other))
        return tensor

    with pytest.raises(RuntimeError, match="data pointer"):
        torch.func.vmap(call)(named_tensors(args)[path][None])


def test_an_expanded_cache_is_refused_in_place():
    args = make("realign_kv_", "step")
    layers = [tuple(each[:1].expand_as(each) for each in layer) for layer in args["layers"]]
    with pytest.raises(ValueError, match="the cache is expanded"):
        all_ops()["realign_kv_"].load("torch")(**{**args, "layers": layers})


class OwnParameter(torch.nn.Parameter):
    """A subclass that computes nothing of its own."""


def moved(tensor: Tensor) -> Tensor:
    """Three numbers into other memory, which is aligned to nothing then."""
    memory = torch.full((tensor.untyped_storage().nbytes() // tensor.itemsize + 7,), 99, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), 3).copy_(tensor)


def learned(tensor: Tensor) -> Tensor:
    return OwnParameter(tensor, requires_grad=tensor.is_floating_point())


@each_value_once
@pytest.mark.parametrize("change", [moved, learned])
@each_place
def test_tensors_with_memory_are_read(name, path, change):
    device_for(all_ops()[name], "cpp")
    args, plain = with_one(name, path, change), with_one(name, path, lambda tensor: tensor)
    run = all_ops()[name].load("cpp")
    assert same_bits(run(**args), run(**plain))
    assert same_bits(args, plain), "an op in place wrote somewhere else"


@each_place
def test_expanded_tensors_are_read_or_refused(name, path):
    """With a stride of 0, a tensor has less memory than numbers."""
    device_for(all_ops()[name], "cpp")
    op = all_ops()[name]
    make_args = partial(with_one, name, path, lambda tensor: tensor[:1].expand_as(tensor))
    make_plain = partial(with_one, name, path, lambda tensor: torch.cat([tensor[:1]] * len(tensor)))
    try:
        op.check(**make_args())
    except ValueError:
        return
    assert_implementation_agrees(op, op.load("cpp"), make_args, make_plain)
