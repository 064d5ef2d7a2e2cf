"""Forward programs in C++: from a plan to ``csrc/program/program.cpp``, and from a batch to its addresses."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specdec_fast import _C  # after torch, whose OpenMP runtime it shares
from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.batch.sampling_batch import Sampling, addresses_of
from specdec_fast.kv_cache.page_pool import KVPages, Spans
from specdec_fast.ops.cpp import DTYPE_CODES
from specdec_fast.program.cpp.builder import built
from specdec_fast.program.executors import DraftedTrees, ForwardProgram, Projection, TokenChoice, TreeRules
from specdec_fast.program.plan.ir import Plan
from specdec_fast.program.plan.working_memory import working_bytes
from specdec_fast.quantization.packed_weight import PackedWeight

_NO_TAPS = torch.empty(0, device="cpu")


class Program(ForwardProgram):
    """A model's forward as one call. It keeps the plan's constants, such as weights, alive, and reads them in place."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._logits_code = DTYPE_CODES[plan.logits_dtype]
        self._program = built(plan)
        self._every_row: dict[int, Tensor] = {}

    def __call__(
        self,
        token_ids: Tensor,
        batch: RaggedBatch,
        pages: KVPages,
        logit_rows: Tensor | None,
        hidden_states: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits ``[R, vocab_size]`` of a batch.

        Args:
            token_ids: ``[T]`` int64, padding included.
            batch: ``T`` rows, laid out by the pool that ``pages`` belong to.
            pages: of a pool that has the layout for which the program was made.
            logit_rows: ``[R]`` int64 rows whose logits are wanted; None: all rows.
            hidden_states: ``[T, taps, H]``, into which the program writes the taps of its plan; None: not wanted.
            inputs: ``[T, input_size]``, contiguous, what the rows take besides their tokens; None if they take nothing.

        Raises:
            IndexError: an index of the batch lies outside its rows or pages, or a token outside the vocabulary.
            ValueError: there are inputs and the program takes none, or the other way round; or they have another size.
        """
        if logit_rows is None:
            logit_rows = self._all_rows(token_ids.shape[0])
        logits = torch.empty(logit_rows.shape[0], self._plan.vocab_size, dtype=self._plan.logits_dtype, device="cpu")
        hidden_states = self._memory_of_taps(len(token_ids), hidden_states)
        memory = (logits.data_ptr(), hidden_states.data_ptr(), self._address_of(inputs, len(token_ids)))
        self._program.run(*_forward(token_ids, batch, pages, logit_rows, memory))
        return logits

    @property
    def held_bytes(self) -> int:
        return int(self._program.held_bytes)

    def bytes_for(self, num_rows: int, num_logit_rows: int) -> int:
        return int(self._program.bytes_for(num_rows, num_logit_rows, torch.get_num_threads()))

    def working_bytes(self, num_rows: int, num_logit_rows: int) -> int:
        linear_bytes = partial(_C.linear_bytes, DTYPE_CODES[self._plan.dtype])
        threads = torch.get_num_threads()
        return working_bytes(self._plan, num_rows, num_logit_rows, threads, linear_bytes, _packed_linear_bytes)

    def release(self) -> None:
        self._program.release()

    @property
    def seconds(self) -> float:
        return float(self._program.seconds)

    def draft(
        self,
        spans: Spans,
        token_ids: list[int],
        num_draft_tokens: list[int],
        choice: TokenChoice,
        inputs: Tensor | Projection | None = None,
    ) -> Tensor:
        """Run a draft model's forwards, each on the tokens chosen after the one before it; errors as in ``__call__``.

        If the rows take inputs, the hidden state of a sequence's last row is the input of its next one.

        Args:
            spans: the rows of the first forward, of ``B`` sequences; pages of later rows are allocated.
            token_ids: of the first forward's rows.
            num_draft_tokens: draft tokens per sequence, at least 1. Forward i has a row for those that get more than i.
            choice: how tokens are chosen. Logits with a NaN choose token 0.
            inputs: of the first forward's rows, as in ``__call__``; or how to compute them.

        Returns:
            ``[sum(num_draft_tokens)]`` int64, sequence after sequence: ids of the target.
        """
        chosen = torch.empty(sum(num_draft_tokens), dtype=torch.int64, device="cpu")
        self._program.draft(
            _pages(spans),
            spans.spans,
            token_ids,
            num_draft_tokens,
            self._carried(inputs, len(token_ids)),
            self._sizes_of(choice),
            addresses_of(choice.sampling),
            torch.get_num_threads(),
            chosen.data_ptr(),
        )
        return chosen

    def draft_trees(
        self, spans: Spans, token_ids: list[int], rules: TreeRules, choice: TokenChoice, inputs: Tensor | Projection
    ) -> DraftedTrees:
        """Run the forwards of a drafter whose hidden states are its inputs: one for the spans, then one per level.

        Errors are those of ``__call__``, and a ValueError if the arguments do not fit together.

        Args:
            spans: the rows of the first forward, of ``B`` sequences, the last of which is the root of the sequence's
                tree; pages of as many further positions as the tree may have nodes are allocated.
            token_ids, inputs: of these rows, as in ``draft``.
            rules: how the trees grow.
            choice: how the target will choose tokens. Rows whose logits have a NaN or infinity get no children.

        Returns:
            The trees, each depth first, the best child first.
        """
        depths, num_nodes, width, parents, ranks, temperature = rules
        tokens, above, scores = (
            torch.empty(sum(num_nodes), dtype=dtype, device="cpu")
            for dtype in (torch.int64, torch.int32, torch.float32)
        )
        counts = self._program.draft_trees(
            _pages(spans),
            spans.spans,
            token_ids,
            depths,
            self._carried(inputs, len(token_ids)),
            (num_nodes, width, parents, ranks, temperature),
            self._sizes_of(choice),
            addresses_of(choice.sampling),
            torch.get_num_threads(),
            (tokens.data_ptr(), above.data_ptr(), scores.data_ptr()),
        )
        num_drafted = sum(counts)
        return DraftedTrees(tokens[:num_drafted], above[:num_drafted], scores[:num_drafted], counts)

    def verify(
        self,
        spans: Spans,
        last_tokens: list[int],
        draft_tokens: Tensor,
        sampling: Sampling | None,
        hidden_states: Tensor | None = None,
    ) -> tuple[Tensor, list[list[int]], list[list[int]] | None, float]:
        """Run the target's forward over every sequence's last token and draft tokens, and choose a token at each row.

        Errors are those of ``__call__``; a ValueError also if arguments do not fit, or a child precedes its parent.

        Args:
            spans: the rows of ``B`` sequences, ``T`` in all.
            last_tokens: the last committed token of each sequence, for its first row.
            draft_tokens: ``[T - B]`` int64, for the other rows, sequence after sequence. Ids outside the vocabulary are
                clamped: they are rejected anyway, but would index past the embedding.
            sampling: how tokens are chosen; None: greedily.
            hidden_states: ``[T, taps, H]``, as in ``__call__``.

        Returns:
            Logits ``[T, vocab_size]``; the accepted draft tokens and the next token of each sequence, which is
            ``INVALID_TOKEN`` after NaN logits; if the spans are trees, the rows of each sequence's accepted draft
            tokens, counted from its first row, else None; the seconds that choosing took.
        """
        width = self._plan.vocab_size
        draft_tokens = draft_tokens.contiguous()
        parents = spans.parents
        logits = torch.empty(len(last_tokens) + len(draft_tokens), width, dtype=self._plan.logits_dtype, device="cpu")
        hidden_states = self._memory_of_taps(len(logits), hidden_states)
        emissions, paths, seconds = self._program.verify(
            _pages(spans),
            spans.spans,
            last_tokens,
            (draft_tokens.data_ptr(), len(draft_tokens), 0 if parents is None else parents.data_ptr()),
            (self._logits_code, width, width, 0, 0, 0, 0),
            addresses_of(sampling),
            torch.get_num_threads(),
            (logits.data_ptr(), hidden_states.data_ptr()),
        )
        return logits, emissions, None if parents is None else paths, seconds

    def _memory_of_taps(self, num_rows: int, hidden_states: Tensor | None) -> Tensor:
        """Return where the program writes the taps of ``num_rows`` rows; memory of its own if the caller wants none."""
        num_bytes = num_rows * self._plan.tap_bytes
        if hidden_states is None:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu") if num_bytes else _NO_TAPS
        if hidden_states.nbytes != num_bytes or not hidden_states.is_contiguous():
            raise ValueError(f"hidden states have {hidden_states.nbytes} bytes; expected {num_bytes}, contiguous.")
        return hidden_states

    def _address_of(self, inputs: Tensor | None, num_rows: int) -> int:
        if (0 if inputs is None else inputs.nbytes) != num_rows * self._plan.input_bytes:
            shape = None if inputs is None else list(inputs.shape)
            raise ValueError(f"{num_rows} rows take {self._plan.input_bytes} bytes each; got inputs of shape {shape}.")
        if inputs is None:
            return 0
        if not inputs.is_contiguous() or inputs.is_neg():
            raise ValueError("inputs are not contiguous, or a lazy negative view, whose memory holds the other sign.")
        return inputs.data_ptr()

    def _carried(self, inputs: Tensor | Projection | None, num_rows: int) -> tuple[object, ...]:
        size = self._plan.input_bytes
        if inputs is not None and self._plan.tap_bytes != size:
            raise ValueError("the hidden states of this program are no inputs of its rows.")
        if not isinstance(inputs, Projection):
            return self._address_of(inputs, num_rows), size, None, 0, []
        projection, hidden_states = inputs
        assert isinstance(projection, Program)
        plan = projection._plan
        if plan.vocab_size * plan.logits_dtype.itemsize != size or plan.kv_shapes:
            raise ValueError("a projection computes rows of another size than the program takes, or has KV entries.")
        pieces = [(projection._address_of(piece, len(piece)), len(piece)) for piece in hidden_states]
        return 0, size, projection._program, plan.input_bytes, pieces

    def _sizes_of(self, choice: TokenChoice) -> tuple[int, ...]:
        ids = choice.target_ids
        sizes = (self._plan.vocab_size, choice.vocab_size, 0 if ids is None else ids.data_ptr())
        back = (0 if choice.drafter_ids is None else choice.drafter_ids.data_ptr(), choice.num_choosable)
        return self._logits_code, *sizes, choice.num_target_ids, *back

    def _all_rows(self, num_rows: int) -> Tensor:
        if num_rows not in self._every_row:
            self._every_row[num_rows] = torch.arange(num_rows, device="cpu")
        return self._every_row[num_rows]


def _packed_linear_bytes(num_rows: int, weight: PackedWeight, num_threads: int) -> int:
    num_bytes = _C.quantized_linear_bytes(
        num_rows, weight.in_features, weight.block_size, weight.rounds_rows, num_threads
    )
    return int(num_bytes)


def _forward(
    token_ids: Tensor, batch: RaggedBatch, pages: KVPages, logit_rows: Tensor, memory: tuple[int, int, int]
) -> tuple[tuple[int, ...], ...]:
    tree_mask = batch.tree_mask
    table = batch.block_table
    addresses = (
        token_ids.data_ptr(),
        batch.positions.data_ptr(),
        logit_rows.data_ptr(),
        batch.slot_mapping.data_ptr(),
        table.data_ptr(),
        batch.cu_seqlens_q.data_ptr(),
        batch.seqused_k.data_ptr(),
        0 if tree_mask is None else tree_mask.data_ptr(),
        pages.addresses.data_ptr(),
        *memory,
    )
    tree_words = 0 if tree_mask is None else tree_mask.shape[1]
    counts = (token_ids.shape[0], logit_rows.shape[0], *table.shape, tree_words)
    sizes = (*counts, pages.num_pages, pages.page_size, torch.get_num_threads())
    return addresses, sizes, _states(pages), _recurrent(batch.recurrent)


def _pages(spans: Spans) -> tuple[int, ...]:
    """Return addresses and sizes, in the order of csrc/bind_program.cpp, as ``_forward`` and ``_carried`` do."""
    tables = spans.tables
    pages = spans.pages
    sizes = (pages.num_pages, pages.page_size)
    return tables.data_ptr(), *tables.shape, pages.addresses.data_ptr(), *sizes, *_states(pages)


def _states(pages: KVPages) -> tuple[int, ...]:
    states = pages.states
    if states is None:
        return (0, 0, 0, 0)
    return states.addresses.data_ptr(), len(states.addresses), states.num_slots, states.most_draft_tokens


def _recurrent(batch: RecurrentBatch | None) -> tuple[int, ...]:
    if batch is None:
        return (0, 0, 0, 0, 0)
    return tuple(array.data_ptr() for array in batch.arrays)
