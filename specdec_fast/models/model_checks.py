"""Checks whether a model can be served: its config, and whether it computes with answers of its KV cache.

A paged cache holds sequences of many lengths, so it has no single length to return. Most models ask for the length only
to compute positions that they receive anyway, or a mask that they do not need. Some compute with the answer. Those that
add it to the numbers of the forward's rows, as Llama-4 does to scale queries by their positions, get a length for each
row: ``takes_length_of_each_row`` finds them. ``check_ignores_answers`` finds the others, whose outputs would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.hf_cache import PagedCache
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.probe import PROBE_LENGTH
from specdec_fast.models.recurrent_functions import RECURRENT_LAYER_TYPES

_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}  # transformers 5.17 has the latter name
_SERVED_LAYER_TYPES = {
    *("chunked_attention", "full_attention", "sliding_attention"),
    *(*_INDEXED, *RECURRENT_LAYER_TYPES, "mlp", "moe"),
}
# Not in models of more than text, which no test has served.
_SERVED_IN_TEXT_ALONE = {"chunked_attention", *_INDEXED}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Beyond any length at which a model might behave differently, and no multiple of a size.
_OTHER_LENGTH = 2**20 + 3
# Two sequences at once, then one row of one of them, because models may treat decoding differently.
_FORWARDS = ([Rows("a", 0, 5), Rows("b", 0, 3)], [Rows("a", 5, 1)])
# In the last forward, two rows that do not see each other, but entries before them.
_APART = ([Rows("a", 0, 3), Rows("b", 0, 3)], [Rows("a", 3, 1), Rows("b", 3, 1)])

MakeCache = Callable[[PagePool, RaggedBatch], PagedCache]
ProbeForward = Callable[[Tensor, Tensor, PagedCache, None], Tensor]


def check_decoder(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for no decoder, layers that pages do not serve, or too few positions to check."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a Hugging Face model; pass one, or its name.")
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder; only decoders are supported.")
    if reason := _why_no_adapter(model):
        raise UnsupportedModelError(f"{type(model).__name__} has an adapter that {reason}.")
    text = config.get_text_config(decoder=True)
    served = _SERVED_LAYER_TYPES if text is config else _SERVED_LAYER_TYPES - _SERVED_IN_TEXT_ALONE
    exotic = sorted(set(getattr(text, "layer_types", None) or []) - served)
    if exotic:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type {', '.join(exotic)}; "
            f"only {', '.join(sorted(served))} can be served."
        )
    recurrent = sorted(set(getattr(text, "layer_types", None) or []) & RECURRENT_LAYER_TYPES)
    if recurrent and indexed_layers(text):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type indexed_attention and {', '.join(recurrent)}; models can be "
            "served that have one of the two kinds."
        )
    positions = max_positions(text)
    if positions is not None and positions < PROBE_LENGTH:
        raise UnsupportedModelError(
            f"{type(model).__name__} can serve {positions} positions; at least {PROBE_LENGTH} are needed, because "
            "every model is checked with a text of that many tokens."
        )


def _why_no_adapter(model: Any) -> str | None:
    """Return why the active adapter of PEFT's class around a model is not served; None if it is, or there is none."""
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        return (
            "puts virtual tokens before every text (prefix or prompt tuning), for which a paged KV cache has no "
            "positions; LoRA and other adapters of weights are served"
        )
    if getattr(adapter, "alora_invocation_tokens", None):
        return (
            "begins at certain tokens of a text (activated LoRA), which generate() of PEFT finds and tells the layers; "
            "LoRA without alora_invocation_tokens is served"
        )
    return None


def expect_numbers(model: PreTrainedModel, logits: Tensor) -> None:
    """Raise UnsupportedModelError if a model's own ``[n, vocab_size]`` logits are NaN or +inf; -inf excludes an id."""
    if num_rows := int((logits.isnan() | logits.isposinf()).any(dim=-1).sum()):
        weights = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
        of_weights = f"weight {weights[0]} is not finite ({len(weights)} are not)" if weights else "weights are finite"
        raise UnsupportedModelError(
            f"the logits of {type(model).__name__} are NaN or infinite, without this library, at {num_rows} of "
            f"{len(logits)} tokens of a short text in {logits.dtype}; its {of_weights}. Repair the checkpoint, or load "
            "it in another dtype: float16 overflows above 65504."
        )


def max_positions(config: Any) -> int | None:
    """Return the number of positions that the model can serve.

    Two kinds of RoPE change their frequencies for the whole batch with its longest sequence, so outputs would depend on
    other sequences (I6). Such models are served up to their original length only.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # some have one per layer type
    batch_dependent = [parameters for parameters in each if parameters.get("rope_type") in _BATCH_DEPENDENT_ROPE]
    name = "original_max_position_embeddings"
    lengths = [parameters.get(name) or getattr(config, name, None) for parameters in batch_dependent]
    original = [int(length) for length in lengths if length]
    if original:
        return min(original)
    return getattr(config, "max_position_embeddings", None)


def why_fewer_positions(config: Any) -> str:
    """Return why the model can serve fewer positions than its config names, for a message; empty if it serves all."""
    named = getattr(config, "max_position_embeddings", None)
    if not named or named == max_positions(config):
        return ""
    return (
        f" of its {named}, because beyond them its RoPE changes for all texts of a batch with the longest one "
        f"({', '.join(sorted(_BATCH_DEPENDENT_ROPE))})"
    )


def sliding_layers(config: Any, num_layers: int) -> frozenset[int]:
    """Return the layers that must pass their window to the attention function.

    A layer whose window is only in its mask would see too much. The probe is too short to notice a window, so the
    config decides. A window of all positions that the model can serve hides nothing (Phi-3.5-MoE has one).
    """
    window = getattr(config, "sliding_window", None)
    positions = max_positions(config)
    if window and positions and window >= positions:
        return frozenset()
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return frozenset(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")
    slides = window and getattr(config, "use_sliding_window", True)
    return frozenset(range(num_layers) if slides else ())


def indexed_layers(config: Any) -> frozenset[int]:
    """Return the layers that must pass the positions that an indexer selects to the attention function."""
    layer_types = getattr(config, "layer_types", None) or ()
    return frozenset(i for i, kind in enumerate(layer_types) if kind in _INDEXED)


def masks(config: Any, device: torch.device) -> dict[str, Tensor | None] | None:
    """Return what a model with indexers receives in place of its masks, by layer type; None for other models.

    An indexer demands a mask. Each of its rows receives the keys that it sees, so the mask hides none.
    """
    if not indexed_layers(config):
        return None
    shown = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    return {kind: shown if kind in _INDEXED else None for kind in set(config.layer_types)}


def attention_chunks(config: Any, num_layers: int) -> dict[int, int]:
    """Return the number of positions of a chunk, for the layers whose rows see their own chunk alone.

    A model applies chunks by its mask, so the config decides, as it does for the caches of ``transformers``. Raises
    UnsupportedModelError if it names no size for such a layer.
    """
    size = getattr(config, "attention_chunk_size", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        chunked = [i for i, kind in enumerate(layer_types) if kind == "chunked_attention"]
    else:
        chunked = list(range(num_layers if size and not getattr(config, "sliding_window", None) else 0))
    if not chunked:
        return {}
    if not isinstance(size, int) or size <= 0:
        raise UnsupportedModelError(
            f"layer {chunked[0]} attends within chunks (chunked_attention), and attention_chunk_size is {size!r}; "
            "expected a positive number of positions in the model's config."
        )
    return dict.fromkeys(chunked, size)


@torch.inference_mode()
def takes_length_of_each_row(forward: ProbeForward, layout: KVLayout, make_cache: MakeCache, page_size: int) -> bool:
    """Return whether a model computes with the length that its cache returns, and would with one for each row.

    By the contract of ``transformers``, row i of a forward is at position ``length + i``. So a tensor of each row's
    position minus its number is the right answer for a model whose row i depends on element i of it as on a single
    length. This is tested with two rows that do not see one another. See ``check_ignores_answers`` for the arguments.
    """

    def last(answer: int | Tensor) -> Tensor:  # [2, vocab_size]
        return _logits(forward, layout, make_cache, (0, answer), page_size, _APART)[0][1][0]

    lengths = (1, _OTHER_LENGTH)
    try:
        of_each = [last(length) for length in lengths]
        of_both = last(torch.tensor(lengths, device=layout.device))
    except Exception:  # the model's own code may not take a tensor, or no length so large
        return False
    depends = all(not torch.equal(*logits) for logits in zip(*of_each, strict=True))
    return depends and _equal([*of_both], [logits[row] for row, logits in enumerate(of_each)])


@torch.inference_mode()
def check_ignores_answers(
    name: str, forward: ProbeForward, layout: KVLayout, make_cache: MakeCache, page_size: int
) -> None:
    """Raise UnsupportedModelError if the logits of the same rows depend on the length that the cache returns.

    Args:
        name: of the model, for the message.
        forward: from ``[1, T]`` token ids and positions, a cache and no rows to logits ``[1, T, vocab_size]``.
        layout: of its KV cache.
        make_cache: makes a cache from a pool and a batch.
        page_size: of the pages with which the model will be served.
    """
    expected, questions = _logits(forward, layout, make_cache, (0, 0), page_size)
    if not questions:
        return
    asked = ", ".join(sorted(questions))
    try:
        got, _ = _logits(forward, layout, make_cache, (_OTHER_LENGTH,) * 2, page_size)
    except UnsupportedModelError:
        raise
    except Exception as error:  # for example an index outside a table
        raise UnsupportedModelError(_message(name, asked, f"{type(error).__name__}: {error}")) from error
    if not _equal(got, expected) and _equal(_logits(forward, layout, make_cache, (0, 0), page_size)[0], expected):
        raise UnsupportedModelError(_message(name, asked, "its logits depend on the answer"))


def _message(name: str, asked: str, what: str) -> str:
    return (
        f"{name} asks its KV cache for {asked} and computes with the answer ({what}); a paged cache holds sequences of "
        "many lengths and has none to give. Only models that take their positions from position_ids, or from a tensor "
        "with a length for each row, can be served."
    )


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _logits(
    forward: ProbeForward,
    layout: KVLayout,
    make_cache: MakeCache,
    answers: Sequence[int | Tensor],
    page_size: int,
    forwards: Sequence[list[Rows]] = _FORWARDS,
) -> tuple[list[Tensor], set[str]]:
    """Return the logits of each forward, whose cache gives one of ``answers``, and the questions that it was asked."""
    pool = pool_of_two(layout, page_size)
    computed = []
    questions = set()
    for rows, answer in zip(forwards, answers, strict=True):
        token_ids = torch.arange(sum(each.count for each in rows), device=layout.device) % 2  # any tokens will do
        batch = lay_out(pool, rows, token_ids)
        cache = make_cache(pool, batch)
        if isinstance(answer, Tensor):
            cache.length_of_each_row = answer
        else:
            cache.claimed_length = answer
        computed.append(forward(batch.token_ids[None], batch.positions[None], cache, None).clone())
        questions |= cache.questions
    return computed, questions


def pool_of_two(layout: KVLayout, page_size: int) -> PagePool:
    """Return a pool for two sequences, ``a`` and ``b``, of up to ``PROBE_LENGTH`` tokens each."""
    pool = PagePool(layout, 2 * (PROBE_LENGTH + page_size), page_size)
    for owner in "ab":
        pool.add(owner)
    return pool
