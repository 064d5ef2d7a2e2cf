"""The exchanges of a sharded model as operations of PyTorch, so that a recorder sees them (``program/record/``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec_fast.ranks.exchange import Ranks

# Operations take integers: the places here. Few, because a process group has one; None: they have been closed.
_known: list[Ranks | None] = []


class ExchangingModule(nn.Module):
    """A module whose forward exchanges numbers with the other ranks, which must run it too."""


def mesh_of(model: nn.Module) -> Any:
    """Return the mesh of processes over which a model's weights, DTensors, are sharded; None if they are not."""
    return next((each.device_mesh for each in model.parameters() if hasattr(each, "device_mesh")), None)


_LIBRARY = torch.library.Library("specdec_fast", "FRAGMENT")
_LIBRARY.define("rank_sum(Tensor rows, int ranks) -> Tensor")
_LIBRARY.define("rank_concatenate(Tensor rows, int ranks, int[] widths) -> Tensor")
_LIBRARY.define("embedding_part(Tensor token_ids, Tensor table, int first) -> Tensor")


def number_of(ranks: Ranks) -> int:
    """Return the number by which the operations know ``ranks``."""
    if ranks not in _known:
        _known.append(ranks)
    return _known.index(ranks)


def ranks_of(number: int) -> Ranks:
    """Return the ranks with a number from ``number_of``."""
    ranks = _known[number]
    assert ranks is not None, "they have been forgotten"
    return ranks


def forget(ranks: Ranks) -> None:
    """Let ranks have no number any more: their model computes nothing from now on."""
    if ranks in _known:
        _known[_known.index(ranks)] = None


def _sum(rows: Tensor, ranks: int) -> Tensor:
    return ranks_of(ranks).sum(rows)


def _concatenate(rows: Tensor, ranks: int, widths: list[int]) -> Tensor:
    return ranks_of(ranks).concatenate(rows, list(widths))


def _embedding_part(token_ids: Tensor, table: Tensor, first: int) -> Tensor:
    places = token_ids - first
    is_here = (places >= 0) & (places < len(table))
    rows = torch.nn.functional.embedding(torch.where(is_here, places, 0), table)
    return torch.where(is_here[..., None], rows, 0)


_LIBRARY.impl("rank_sum", _sum, "CompositeExplicitAutograd")
_LIBRARY.impl("rank_concatenate", _concatenate, "CompositeExplicitAutograd")
_LIBRARY.impl("embedding_part", _embedding_part, "CompositeExplicitAutograd")


def rank_sum(rows: Tensor, ranks: int) -> Tensor:
    """Return the sum of ``rows``, of any shape, over the ranks, in their order; see ``Ranks.sum``."""
    result: Tensor = torch.ops.specdec_fast.rank_sum(rows, ranks)
    return result


def rank_concatenate(rows: Tensor, ranks: int, widths: list[int]) -> Tensor:
    """Return the ``[..., widths[rank]]`` of all ranks one after the other; see ``Ranks.concatenate``."""
    result: Tensor = torch.ops.specdec_fast.rank_concatenate(rows, ranks, widths)
    return result


def embedding_part(token_ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Return ``[..., H]`` rows of a table that has the ids from ``first`` on; zeros for ids that it does not have."""
    result: Tensor = torch.ops.specdec_fast.embedding_part(token_ids, table, first)
    return result
