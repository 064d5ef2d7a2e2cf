"""Requests that begin alike, and the bits of the KV entries that an engine has of them."""

from __future__ import annotations

import torch

import specdec_fast as sd
from specdec_fast.engine.input import RequestBuilder
from support.models import VOCAB_SIZE

PAGE = 4
PREFIX = [(7 * i + i * i) % VOCAB_SIZE for i in range(50)]
# Prompts that differ in the middle of a page, at its beginning and at its end; one that is a prefix of others, with a
# full last page and with one token more; and one that shares nothing.
PROMPTS = [
    [*PREFIX, 3],
    [*PREFIX[:30], 5, 6],
    [*PREFIX[:32], 7, 8, 9],
    PREFIX[:32],
    PREFIX[:33],
    [*PREFIX, 3],
    [*PREFIX[:31], 1],
    [9],
    [11, *PREFIX[:20]],
]
PARAMS = [
    sd.SamplingParams(
        max_new_tokens=14 + i,
        ignore_eos=True,
        logprobs=True,
        temperature=0.8 * (i % 2),
        seed=i,
        repetition_penalty=1.2 if i == 3 else 1.0,
    )
    for i in range(len(PROMPTS))
]


def results(outputs):
    return [(output.raise_for_error().token_ids, output.logprobs) for output in outputs]


def plain_results(target, **config):
    """What plain decoding makes of each request by itself, without a prefix cache."""
    return results(sd.Engine(target, None, max_batch_size=1, page_size=PAGE, **config).generate(PROMPTS, PARAMS))


def engine_of(target, draft, **config):
    return sd.Engine(target, draft, **{"page_size": PAGE, "max_batch_size": 4, "prefix_cache": True, **config})


def assert_vacant(engine):
    for pool in (engine.core.pool, getattr(engine.drafter, "pool", None)):
        assert pool is None or pool.is_vacant


def request_of(engine, prompt, params=None, index=0):
    return RequestBuilder(engine.target, None, 5).build(
        index, prompt, params or sd.SamplingParams(max_new_tokens=30, ignore_eos=True)
    )


def entries(pool, owner, num_positions):
    """The bits of an owner's first entries, of every tensor of the pool."""
    table = pool.block_table(owner)[: pool.num_pages_for(num_positions)]
    found = [tensor[:, :, table].flatten(2, 3)[:, :, :num_positions] for tensor in pool.tensors]
    return [each.contiguous().view(torch.uint8).clone() for each in found]


def same_bits(ones, others):
    return len(ones) == len(others) and all(map(torch.equal, ones, others))
