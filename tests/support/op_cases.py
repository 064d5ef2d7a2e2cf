"""The cases of every op by op and name, and attention computed one number at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.op_cases import OP_CASES, with_tensors
from specdec_fast.batch.ragged_batch import AttentionParams, PagedBatch

CPU = torch.device("cpu")
CASES = {(op, case.name): case for op, known in OP_CASES.items() for case in known.cases}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def each_case(op: str) -> pytest.MarkDecorator:
    """All declared cases of one op but those that are too large for a loop; a case names what it would catch."""
    return pytest.mark.parametrize("case", [c for name, c in CASES if name == op and c != "large_vocabulary"])


def make(op: str, case: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    return CASES[op, case].make(torch.Generator().manual_seed(seed), dtype, CPU)


def attention_by_hand(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Softmax attention in fp64, position by position, every KV entry looked up through the block table."""
    queries, keys, values = (x.cpu().double().numpy() for x in (query, *kv))
    out = torch.zeros(*query.shape[:2], values.shape[3], dtype=torch.float64)
    starts, pages, page_size = batch.cu_seqlens_q.tolist(), batch.block_table.tolist(), keys.shape[1]
    for b in range(len(starts) - 1):
        for row in range(starts[b], starts[b + 1]):
            seen = positions_seen(batch, b, row, params)
            for head in range(queries.shape[1]):
                kv_head = head // (queries.shape[1] // keys.shape[2])
                places = [(pages[b][i // page_size], i % page_size, kv_head) for i in seen]
                products = [queries[row, head] @ keys[place] * params.scale for place in places]
                if params.softcap is not None:
                    products = [params.softcap * math.tanh(product / params.softcap) for product in products]
                if params.sinks is not None:
                    products.append(float(params.sinks[head]))
                weights = [math.exp(product - max(products)) for product in products]
                for place, weight in zip(places, weights, strict=False):  # no place is the sink's
                    out[row, head] += torch.from_numpy(values[place]) * (weight / sum(weights))
    return out


def attention_in_fp64(query: Tensor, kv: tuple[Tensor, Tensor], batch: PagedBatch, params: AttentionParams) -> Tensor:
    """``attention_by_hand`` for all rows of a sequence at once: a hundred times faster, the same within rounding."""
    page_size, num_kv_heads = kv[0].shape[1:3]
    out = torch.empty(*query.shape[:2], kv[1].shape[3], dtype=torch.float64)
    for b, (start, stop) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        position = torch.arange(int(batch.seqused_k[b]))
        pages = batch.block_table[b].cpu()[position // page_size].long()
        keys, values = (cache.cpu()[pages, position % page_size].double() for cache in kv)  # [context, H_kv, D]
        queries = query[start:stop].cpu().double().unflatten(1, (num_kv_heads, -1))
        products = torch.einsum("rhgd,nhd->rhgn", queries, keys) * params.scale
        if params.softcap is not None:
            products = params.softcap * torch.tanh(products / params.softcap)
        visible = torch.zeros(stop - start, len(position), dtype=torch.bool)
        for row in range(start, stop):
            visible[row - start, positions_seen(batch, b, row, params)] = True
        products = products.masked_fill(~visible[:, None, None], -math.inf)
        if params.sinks is not None:
            column = params.sinks.cpu().double().view(1, num_kv_heads, -1, 1).expand(*products.shape[:3], 1)
            products = torch.cat([products, column], dim=-1)
        weights = products.softmax(dim=-1)[..., : len(position)]
        total = torch.einsum("rhgn,nhd->rhgd", weights, values.nan_to_num(0))
        spoiled = torch.einsum("rn,nhd->rhd", visible.double(), values.isnan().double()) > 0
        out[start:stop] = total.masked_fill(spoiled[:, :, None], math.nan).flatten(1, 2)
    return out


def positions_seen(batch: PagedBatch, b: int, row: int, params: AttentionParams) -> list[int]:
    """KV entries that one row sees, as the contract defines them."""
    start, stop = batch.cu_seqlens_q[b : b + 2].tolist()
    prefix = int(batch.seqused_k[b]) - (stop - start)
    before = list(range(prefix))
    if batch.tree_mask is None:
        own, position = list(range(row - start + 1)), prefix + row - start
    else:
        words = batch.tree_mask[row].tolist()
        own = [i for i in range(stop - start) if words[i // 32] >> (i % 32) & 1]
        position = prefix + len(own) - 1  # its depth
    window, chunk = params.sliding_window or position + 1, params.attention_chunk or position + 1

    def is_seen(other: int) -> bool:
        return other > position - window and other // chunk == position // chunk

    before = [i for i in before if is_seen(i)]
    own = [i for depth, i in enumerate(own) if is_seen(prefix + depth)]
    return before + [prefix + i for i in own]


def changed(args: dict[str, Any], path: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """``args`` with one argument, or one field of one (``batch.seqused_k``), replaced by ``change(what it was)``."""
    name, _, field = path.partition(".")
    if "." in field:
        new = replace(args[name], **changed(vars(args[name]), field, change))
    else:
        new = replace(args[name], **{field: change(getattr(args[name], field))}) if field else change(args[name])
    return {**args, name: new}


def named_tensors(value: Any) -> dict[str, Tensor]:
    """Every tensor in ``value``, by its path."""
    found: dict[str, Tensor] = {}

    def note(path: str, tensor: Tensor) -> Tensor:
        found[path] = tensor
        return tensor

    with_tensors(value, note)
    return found
