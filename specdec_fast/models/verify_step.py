"""One verification: the target's forward over last committed tokens and draft tokens, and what it accepts."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.batch.sampling_batch import sampling_columns, sampling_of
from specdec_fast.batch.trees import TreeRows, rows_of_trees
from specdec_fast.device_copy import Joined, to_device
from specdec_fast.errors import NotYetSupportedError
from specdec_fast.kv_cache.forward_layout import lay_out, lay_out_on_host, spans_of
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.verification import Outcome, Verification, interleaved
from specdec_fast.request.sequence import Sequence

if TYPE_CHECKING:
    from specdec_fast.models.ragged_model import RaggedModel


def verify_step(
    model: RaggedModel, pool: PagePool, sequences: list[Sequence], draft: tuple[Tensor, list[int], Tensor | None]
) -> Verification:
    """Verify the draft tokens of several sequences; see ``RaggedModel.verify_step``.

    Args:
        model: the target.
        pool: its pages.
        sequences: ``B`` sequences.
        draft: the draft tokens, their number per sequence, and their parents; None for chains.

    """
    draft_tokens, num_draft_tokens, parents = draft
    if parents is not None:
        expect_trees(model)
        parents = parents.cpu().contiguous()
    counts = [count + 1 for count in num_draft_tokens]
    rows = [Rows(s, s.target_kv_length, count) for s, count in zip(sequences, counts, strict=True)]
    last = [s.token_ids[-1] for s in sequences]
    draft_tokens = draft_tokens.to(model.layout.device, non_blocking=True)
    hidden = model.empty_hidden_states(sum(counts))
    if model.has_fused_step:
        assert model.program is not None
        before, sampling = model.program.seconds, sampling_of(sequences, model.layout.device)
        spans = spans_of(pool, rows)
        spans = spans if parents is None else spans._replace(parents=parents)
        logits, emissions, paths, seconds = model.program.verify(spans, last, draft_tokens, sampling, hidden)
        outcome = Outcome(emissions, paths)
        return Verification(counts, logits, outcome, model.program.seconds - before, seconds, hidden)
    started = perf_counter()
    trees = None if parents is None else rows_of_trees(parents.tolist(), num_draft_tokens)
    found = _by_graph(model, pool, rows, (last, draft_tokens, trees), hidden)
    if found is not None:
        return Verification(counts, *found, perf_counter() - started, 0.0, hidden)
    sampling = sampling_of(sequences, model.layout.device)
    token_ids = interleaved(last, draft_tokens, num_draft_tokens, model.vocab_size)
    batch = lay_out(pool, rows, token_ids, trees=trees)
    started = perf_counter()
    logits = model.forward(batch, pool, None, hidden)
    computed = perf_counter()
    above = None if trees is None else to_device(trees.parents, model.layout.device)
    results = (model.ops.unchecked or model.ops).verify_chain(logits, token_ids, batch.cu_seqlens, sampling, above)
    return Verification(counts, logits, results, computed - started, perf_counter() - computed, hidden)


def _by_graph(
    model: RaggedModel,
    pool: PagePool,
    rows: list[Rows],
    fed: tuple[list[int], Tensor, TreeRows | None],
    hidden_states: Tensor | None,
) -> tuple[Tensor, Joined] | None:
    """Return logits and results of a graph of the whole verification; None if there is none for these sequences."""
    sequences: list[Sequence] = [row.owner for row in rows]  # type: ignore[misc]
    if model.graphs is None or any(s.params.repetition_penalty != 1 for s in sequences):
        return None
    columns = sampling_columns(sequences) if any(s.samples for s in sequences) else {}
    last, draft_tokens, trees = fed
    layout = lay_out_on_host(pool, rows)
    return model.graphs.verify(layout, last, draft_tokens, columns, pool, hidden_states, trees)


def why_no_trees(model: RaggedModel) -> str | None:
    """Return why a row of a tree could have other bits than in the chain of its path; None if it cannot."""
    if not model.ops.has_trees("paged_attention"):
        return f"attention by {model.ops.chosen.get('paged_attention')!r} computes them with other bits than chains"
    return "it computes rows one by one" if model.row_padding.one_by_one else None


def expect_trees(model: RaggedModel) -> None:
    """Check that a model verifies trees.

    Raises:
        NotYetSupportedError: a row's bits could differ from those of the chain of its path.

    """
    if (reason := why_no_trees(model)) is None:
        return
    raise NotYetSupportedError(
        f"{model.name} verifies no trees of draft tokens: {reason}; use a drafter of chains (Draft.parents=None), such "
        "as 'ngram'."
    )
