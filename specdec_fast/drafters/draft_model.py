"""The draft model: a small causal model with a paged KV cache of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch, Rows
from specdec_fast.batch.sampling_batch import Sampling, after, sampling_of
from specdec_fast.cuda_graphs.graphs import described
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import Draft, Drafter
from specdec_fast.kv_cache.forward_layout import decode_batches, lay_out, spans_of
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.hf_model import RaggedModel
from specdec_fast.models.prefill import prefill
from specdec_fast.models.profiling import forward_seconds
from specdec_fast.request.sequence import Sequence
from specdec_fast.sampling_params import SamplingParams

# PyTorch's argmax is called in less time, but reads logits a hundred times slower than the op.
_LARGE_VOCABULARY = 8192
_MEASURED_LENGTHS, _MEASURED_TIMES = (1, 4), 3  # of proposals
ROWS_EACH = 2  # of one sequence in one forward at most: after a full acceptance its KV lacks two tokens


class ModelDrafter(Drafter):
    """Proposes the draft model's own continuation, chosen as the request asks and with the noise the target will use.

    Its KV cache holds a prefix of every sequence's committed tokens (I3): after a step it lacks one token, two when
    all were accepted, all that was emitted since where it was not asked, and is fed those first. Rejection only lowers
    ``draft_kv_length`` (I4); a prompt is computed once.
    """

    def __init__(self, model: RaggedModel, target_vocab_size: int) -> None:
        self.model = model
        # Checkpoints of one family pad the same vocabulary to different widths; ids beyond the shorter are no words.
        self._vocab_size = min(model.vocab_size, target_vocab_size)
        self._is_narrower = model.vocab_size < target_vocab_size
        self.draft_kv_length: dict[Sequence, int] = {}
        self.pool: PagePool | None = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.model.name

    def describe(self) -> dict[str, Any]:
        """Return how its forwards run."""
        return {"forward_program": self.model.program is not None, **described(self.model.graphs)}

    def forward_seconds(self, row_counts: list[int]) -> dict[int, float] | None:
        """Measure the draft model's forward at so many rows, and by proposals of two lengths what they take besides."""
        found = forward_seconds(self.model, row_counts)
        short, long = (self._proposal_seconds(count) for count in _MEASURED_LENGTHS)
        each = max(0.0, long - short) / (_MEASURED_LENGTHS[1] - _MEASURED_LENGTHS[0])
        besides = max(0.0, found[1] - each)  # a forward by itself is a call from Python; in a proposal several are one
        found = {count: max(seconds - besides, seconds / 10) for count, seconds in found.items()}
        return found | {0: max(0.0, short - _MEASURED_LENGTHS[0] * found[1])}

    def _proposal_seconds(self, num_draft_tokens: int) -> float:
        """Return what a proposal for one short sequence takes, the least of some."""
        sequence = Sequence(0, [0, 0], 2, 2 + max(_MEASURED_LENGTHS) + 1, SamplingParams(), frozenset())
        self.prepare(sequence.max_length, self.model.page_size)
        self.admit([sequence])
        seconds = []
        for _ in range(_MEASURED_TIMES):
            started = perf_counter()
            self.propose([sequence], [num_draft_tokens]).token_ids.tolist()  # on a GPU it is only queued
            seconds.append(perf_counter() - started)
            self.commit([sequence])
        self.release(sequence)
        return min(seconds)

    def prepare(self, num_tokens: int, page_size: int) -> None:
        """Allocate the pool, or keep the one at hand if it is large enough and an interrupted call left nothing."""
        self.model.expect_same_weights()
        if self.pool is None or not self.pool.is_vacant or self.pool.num_pages * page_size < num_tokens:
            self.draft_kv_length.clear()
            self.pool = PagePool(self.model.layout, num_tokens, page_size, self.model.row_padding)

    def admit(self, sequences: list[Sequence]) -> None:
        """Prefill every prompt but for its last token."""
        pool = self._pool()
        served = [sequence for sequence in sequences if self._room(sequence) > 0]
        for sequence in sequences:
            pool.reserve(sequence, sequence.max_length - 1)
            self.draft_kv_length[sequence] = 0
        self._feed(served)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        """Run the draft model ``max(limits)`` times, each time on one row per sequence still drafting."""
        limits = [min(limit, self._room(s)) for s, limit in zip(sequences, limits, strict=True)]
        drafting = {sequence: limit for sequence, limit in zip(sequences, limits, strict=True) if limit}
        if not drafting:
            return Draft(torch.empty(0, dtype=torch.int64, device="cpu"), limits)
        if self.model.has_fused_step and all(s.params.repetition_penalty == 1 for s in drafting):
            token_ids = self._draft_in_one_call(drafting)
        else:
            with self.model.attached():
                token_ids = self._in_order(self._draft(sequences, limits), limits)
        for sequence, limit in drafting.items():
            self.draft_kv_length[sequence] = sequence.length - 1 + limit
        return Draft(token_ids, limits)

    def _draft_in_one_call(self, drafting: dict[Sequence, int]) -> Tensor:
        """Return the tokens of sequence after sequence, ``drafting[s]`` of each; nobody may have a penalty."""
        sequences, limits = list(drafting), list(drafting.values())
        sampling = sampling_of(sequences, self.model.layout.device)
        rows, token_ids = self._catch_up(sequences)
        spans = spans_of(self._pool(), rows, ahead=[limit - 1 for limit in limits])
        assert self.model.program is not None
        return self.model.program.draft(spans, token_ids, limits, (self._vocab_size, sampling))

    def _in_order(self, drafted: list[Tensor], limits: list[int]) -> Tensor:
        """Bring the tokens of forward after forward into the order of the sequences."""
        if len(drafted) == min(limits):  # as many from everybody
            return torch.stack(drafted, dim=1).flatten()
        return torch.cat(drafted)[to_device(_by_sequence(limits), self.model.layout.device)]

    def _draft(self, sequences: list[Sequence], limits: list[int]) -> list[Tensor]:
        """Return the tokens of each forward: one of every sequence that may draft so many, in batch order."""
        drafted: list[Tensor] = []
        before: list[int] = []  # who took part in the last forward
        for num_forwards, members in _stages(limits):
            drafting = [sequences[i] for i in members]
            # What earlier members drafted in this step is missing from a penalty's seen tokens: it costs acceptance.
            sampling = sampling_of(drafting, self.model.layout.device, ahead=len(drafted))
            if drafted:
                rows = [Rows(s, s.length - 1 + len(drafted), 1) for s in drafting]
                tokens = drafted[-1][to_device([before.index(i) for i in members], self.model.layout.device)]
            else:
                rows, token_ids = self._catch_up(drafting)
                tokens = to_device(token_ids, self.model.layout.device)
            drafted += self._run(rows, num_forwards, tokens, sampling)
            before = members
        return drafted

    def _run(self, rows: list[Rows], num_forwards: int, tokens: Tensor, sampling: Sampling | None) -> Iterable[Tensor]:
        """Compute ``[T]`` tokens, then one row more each on the tokens chosen before; return each forward's ``[B]``."""
        pool = self._pool()
        if self.model.graphs is not None and sampling is None:
            batch = lay_out(pool, rows, tokens, ahead=num_forwards - 1)
            of_graph = self.model.graphs.draft(batch, num_forwards, pool, self._likeliest)
            if of_graph is not None:
                return of_graph.unbind()
        drafted: list[Tensor] = []
        for batch_of in decode_batches(pool, rows, num_forwards):
            tokens = self._choose(batch_of(token_ids=tokens), sampling)
            drafted.append(tokens)
            sampling = sampling and after(sampling, tokens)
        return drafted

    def commit(self, sequences: list[Sequence]) -> None:
        """Keep the KV entries of accepted tokens, give up those of rejected ones."""
        for sequence in sequences:
            self.draft_kv_length[sequence] = min(self.draft_kv_length[sequence], sequence.length - 1)

    def release(self, sequence: Sequence) -> None:
        """Return the sequence's pages."""
        if self.draft_kv_length.pop(sequence, None) is not None:
            self._pool().free(sequence)

    def _pool(self) -> PagePool:
        if self.pool is None:
            raise RuntimeError("prepare() has not been called.")
        return self.pool

    def _room(self, sequence: Sequence) -> int:
        """Return how many tokens the draft model's own positions leave it to propose; the target may have more."""
        if self.model.max_positions is None:
            return sequence.max_length
        return max(0, self.model.max_positions - sequence.length + 1)

    def _known(self, token_ids: list[int]) -> list[int]:
        """Replace ids beyond the draft model's embedding: such a token costs acceptance, never correctness."""
        return [min(token, self.model.vocab_size - 1) for token in token_ids] if self._is_narrower else token_ids

    def _feed(self, sequences: list[Sequence]) -> None:
        """Compute the KV entries of all committed tokens but the last."""
        known: dict[Hashable, list[int]] = {s: self._known(s.token_ids[:-1]) for s in sequences}
        prefill(self.model, self._pool(), known, {s: self.draft_kv_length[s] for s in sequences})
        for sequence in sequences:
            self.draft_kv_length[sequence] = sequence.length - 1

    def _catch_up(self, sequences: list[Sequence]) -> tuple[list[Rows], list[int]]:
        """Return the committed tokens that each sequence's KV lacks: their spans, and their ids.

        If they are too many for one forward, because some have not been drafted for in a while, all but the last of
        each are computed first.
        """
        if sum(s.length - self.draft_kv_length[s] for s in sequences) > self.model.row_padding.largest:
            self._feed(sequences)
        rows: list[Rows] = []
        token_ids: list[int] = []
        for sequence in sequences:
            start = self.draft_kv_length[sequence]
            rows.append(Rows(sequence, start, sequence.length - start))
            token_ids += sequence.token_ids[start:]
        return rows, self._known(token_ids)

    def _choose(self, batch: RaggedBatch, sampling: Sampling | None) -> Tensor:
        """Compute the rows; return each sequence's next token ``[B]``, chosen as the target chooses its own."""
        last = batch.last_rows if batch.most_rows > 1 else None
        logits = self.model.forward(batch, self._pool(), last)
        return self._chosen(logits, batch.token_ids if last is None else batch.token_ids[last], sampling)

    def _likeliest(self, logits: Tensor) -> Tensor:
        """Return each row's likeliest token ``[N]``; what was fed makes no difference to it."""
        return self._chosen(logits, logits.new_zeros(len(logits), dtype=torch.int64), None)

    def _chosen(self, logits: Tensor, fed: Tensor, sampling: Sampling | None) -> Tensor:
        """Return each row's token ``[N]``, every row being the only one of its sequence and fed one of ``fed``."""
        if self._vocab_size < logits.shape[1]:
            logits = logits[:, : self._vocab_size]
        if sampling is None and logits.shape[1] < _LARGE_VOCABULARY:
            return logits.argmax(dim=-1)
        # Made here, because this may be recorded in a graph: what is shared may be gone when that is replayed.
        one_each = torch.arange(len(logits) + 1, dtype=torch.int32, device=logits.device)
        ops = self.model.ops.unchecked or self.model.ops
        tokens = ops.verify_chain(logits, fed, one_each, sampling)[0]
        return tokens.clamp_(min=0)  # NaN logits have no token; any other is as wrong, and can be fed


def _stages(limits: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield (number of forwards, members): successive forwards in which the same sequences draft."""
    start = 0
    for stop in sorted(set(limits) - {0}):
        yield stop - start, [i for i, limit in enumerate(limits) if limit >= stop]
        start = stop


def _by_sequence(limits: list[int]) -> list[int]:
    """Return the places that bring the tokens of one forward after the other into the order of the sequences."""
    places: list[list[int]] = [[] for _ in limits]
    place = 0
    for forward in range(max(limits)):
        for i, limit in enumerate(limits):
            if limit > forward:
                places[i].append(place)
                place += 1
    return [place for own in places for place in own]
