"""Whether a model computes with what its KV cache answers, found by answering otherwise.

A paged cache holds sequences of many lengths, so it cannot say how long "the" sequence is. Most models ask only
to make up positions that they are given, or a mask that they do not need; some compute with the answer (Llama-4 scales
its queries by it), and their outputs would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache import KVLayout, PagePool
from specdec_fast.paged_cache import PagedCache
from specdec_fast.rows import RaggedBatch, Rows

# Beyond any length at which a model might begin to behave otherwise, and no multiple of anything.
_OTHER_LENGTH = 2**20 + 3
# Two sequences at once and one row of one of them: decoding may be a branch of its own.
_FORWARDS = ([Rows("a", 0, 5), Rows("b", 0, 3)], [Rows("a", 5, 1)])

MakeCache = Callable[[PagePool, RaggedBatch], PagedCache]
Forward = Callable[[Tensor, Tensor, PagedCache, None], Tensor]


@torch.inference_mode()
def check_ignores_answers(name: str, forward: Forward, layout: KVLayout, make_cache: MakeCache, page_size: int) -> None:
    """Compute the same rows with caches that claim different lengths.

    Args:
        name: of the model, for the message.
        forward: runs it: from ``[1, T]`` token ids and positions, a cache and no rows to logits ``[1, T, vocab_size]``.
        layout: of its KV cache.
        make_cache: from a pool and a batch.
        page_size: of the pages that the model will be served with.

    Raises:
        UnsupportedModelError: the logits depend on the length that the cache claims.

    """
    expected, questions = _logits(forward, layout, make_cache, 0, page_size)
    if not questions:
        return
    asked = ", ".join(sorted(questions))
    try:
        got, _ = _logits(forward, layout, make_cache, _OTHER_LENGTH, page_size)
    except UnsupportedModelError:
        raise
    except Exception as error:  # an index beyond a table, for example
        raise UnsupportedModelError(_message(name, asked, f"{type(error).__name__}: {error}")) from error
    if not _equal(got, expected) and _equal(_logits(forward, layout, make_cache, 0, page_size)[0], expected):
        raise UnsupportedModelError(_message(name, asked, "its logits depend on the answer"))


def _message(name: str, asked: str, what: str) -> str:
    return (
        f"{name} asks its KV cache for {asked} and computes with the answer ({what}); a paged cache holds sequences of "
        "many lengths and has none to give. Only models that take their positions from position_ids can be served."
    )


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _logits(
    forward: Forward, layout: KVLayout, make_cache: MakeCache, claimed_length: int, page_size: int
) -> tuple[list[Tensor], set[str]]:
    """Return the logits of every forward, and what the model asked its cache for."""
    pool = PagePool(layout, 2 * (8 + page_size), page_size)
    for owner in "ab":
        pool.open(owner, 8)
    found, questions = [], set()
    for rows in _FORWARDS:
        token_ids = torch.arange(sum(each.count for each in rows), device=layout.device) % 2  # any tokens will do
        batch = pool.batch(rows, token_ids)
        cache = make_cache(pool, batch)
        cache.claimed_length = claimed_length
        found.append(forward(batch.token_ids[None], batch.positions[None], cache, None).clone())
        questions |= cache.questions
    return found, questions
