"""A causal language model on ragged rows: one way to compute rows, one to draft, one to verify.

``RaggedModel`` chooses what runs them: a program in C++, graphs, or forwards one by one (``cpp.py``, ``graph.py``,
``eager.py``). When a model is loaded, it compares the model's ragged logits with its dense ones, and refuses a model
that it cannot serve.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec_fast.batch.ragged_batch import RaggedBatch, RowPadding, Rows
from specdec_fast.errors import NotYetSupportedError, UnsupportedModelError
from specdec_fast.kv_cache.accepted_paths import keep_paths
from specdec_fast.kv_cache.layer_layout import MOST_DRAFT_TOKENS
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.model_watch import Numbers, Watch, check_repeats, error_of_change
from specdec_fast.models import model_checks
from specdec_fast.models.hidden_states import checked_taps
from specdec_fast.models.loading import eos_token_ids, is_sharded
from specdec_fast.models.placement import devices_of
from specdec_fast.models.probe import named_failures, probe_of
from specdec_fast.models.sharded import sharded_copy
from specdec_fast.ops import Ops
from specdec_fast.program import NotLowerableError, compile_forward
from specdec_fast.program.executors import DeviceProgram, ForwardProgram, executor_for
from specdec_fast.ranks.exchange import Ranks
from specdec_fast.ranks.messages import UseGraphs, UseTaps
from specdec_fast.request.sequence import Sequence
from specdec_fast.runner.cpp import CppRunner
from specdec_fast.runner.drafting import DraftPlan, choices_of
from specdec_fast.runner.eager import EagerRunner, ModelParts
from specdec_fast.runner.graph import GraphRunner
from specdec_fast.runner.graphs.buckets import GraphLimits
from specdec_fast.runner.graphs.capture import Capture, capture_for
from specdec_fast.runner.graphs.graphs import Graphs
from specdec_fast.runner.hf_model import HFModel
from specdec_fast.runner.leader import Leader
from specdec_fast.runner.reproduction import check_reproduces, check_reproduces_taps
from specdec_fast.runner.verification import StepPlan, Verification

MAX_PREFILL_ROWS = 2048  # bounds the activations of a forward, whatever the prompts


class RaggedModel:
    """A causal language model that computes any rows of any sequences in one forward.

    Attributes:
        model: the Hugging Face model, as given; of a sharded one, a copy over this process's part of the weights.
        hf: runs its forwards by PyTorch.
        layout: of the KV entries of a position, and of a sequence's recurrent states, with ``most_draft_tokens``.
        vocab_size: width of its logits.
        max_positions: number of positions that it can serve; None if its config has no limit.
        eos_token_ids: ids that end a text, from its generation config.
        is_sharded: whether its weights are sharded over processes. All of them must then compute the same forwards.
        leader: lets the other processes compute what this one does; None: they make the same calls by themselves.
        program, device_program: runs its whole forward in one call, or as few launches; both None if PyTorch does.
        why_no_program: the reason why PyTorch runs it.
        graphs: graphs of its forwards of few rows; None before ``use_graphs``, and on a device without graphs.
        why_one_by_one: the operation that mixes rows, if that is why it computes rows one by one.
        page_size: page size of its probes; it must be that of the engine, because an op may refuse another one.
        verifies: set when ``verify_step`` begins. The core's caller may clear it before a step (``SharedCore.step``).

    """

    def __init__(
        self,
        model: PreTrainedModel,
        ops: Ops,
        page_size: int = 16,
        enforce_eager: bool = False,
        most_draft_tokens: int = MOST_DRAFT_TOKENS,
        ranks: Ranks | None = None,
    ) -> None:
        model_checks.check_decoder(model)
        if is_sharded(model):
            model, ranks = sharded_copy(model)
        self.is_sharded = ranks is not None
        self.leader: Leader | None = None
        self.model = model
        self.ops = ops
        self.page_size = page_size
        self._row_padding = RowPadding(largest=MAX_PREFILL_ROWS)
        self.verifies = Event()
        self.verifies.set()
        self.why_one_by_one: str | None = None
        self.program: ForwardProgram | None = None
        self.device_program: DeviceProgram | None = None
        self._watch: Watch | None = None
        self._numbers: Numbers | None = None
        self._structure: Watch | None = None
        devices = devices_of(model)
        self._executor, self.why_no_program = executor_for(ops, *devices)
        self._capture = capture_for(*devices)
        if enforce_eager:
            self._executor = None
            self.why_no_program = "enforce_eager=True"
            self._capture = None
        self.graphs: Graphs | None = None
        self.eos_token_ids = eos_token_ids(model)
        config = model.config.get_text_config(decoder=True)
        self.max_positions = model_checks.max_positions(config)
        probe = probe_of(config.vocab_size, devices[0])
        with named_failures(model):
            self.hf = HFModel(model, ops, probe, most_draft_tokens, devices)
            self._probe_logits = partial(self.hf.dense_logits, probe)
            logits = self._probe_logits()
            model_checks.expect_numbers(model, logits)
            self._in_training = check_repeats(model, self._probe_logits, frozenset())
            self.layout = self.hf.layout
            self.vocab_size = logits.shape[-1]
            self._runner = self._chosen_runner()
            self.hf.find_answers(page_size)
            self._make_program(probe, logits)
            if not self.has_program:
                self.check_logits(probe, logits)
            with self.hf.hooked():
                model_checks.check_ignores_answers(
                    type(model).__name__, self.hf.call, self.layout, self.hf.make_cache, page_size
                )

    @property
    def name(self) -> str:
        """The name or folder from which the model was loaded, or its class."""
        return self.path or type(self.model).__name__

    @property
    def path(self) -> str:
        """The name or folder from which the model was loaded; empty if it was made in memory."""
        return getattr(self.model.config, "_name_or_path", None) or ""

    @property
    def has_program(self) -> bool:
        """Whether a program runs its forwards."""
        return self.program is not None or self.device_program is not None

    @property
    def has_fused_step(self) -> bool:
        """Whether its program's ``draft`` and ``verify`` run its steps: it has a program, and rows need no padding.

        A leader sends the other ranks forwards, not steps.
        """
        return self.program is not None and self.row_padding.multiple == 1 and self.leader is None

    @property
    def needs_same_calls(self) -> bool:
        """Whether other processes must make the same calls: it is sharded over processes that its caller started."""
        return self.is_sharded and self.leader is None

    def lead(self, leader: Leader | None) -> None:
        """From now on let other processes compute what this one does; None: they do so by themselves."""
        self.leader = leader
        self.layout = self.hf.layout = replace(self.layout, copies=leader)
        self._runner = self._chosen_runner()

    def in_all_ranks(self, message: Any, compute: Callable[[], Any]) -> Any:
        """Return what ``compute`` returns, which is more than a forward; by ``message`` other processes do the same."""
        leader = self.leader
        if leader is None:
            return compute()
        self.lead(None)  # each computes its own forwards on pools of its own meanwhile
        try:
            return leader.together(message, compute)
        finally:
            self.lead(leader)

    @property
    def row_padding(self) -> RowPadding:
        """How rows are padded and cut, for its page pools; ``make_deterministic`` sets it."""
        return self._row_padding

    @row_padding.setter
    def row_padding(self, row_padding: RowPadding) -> None:
        self._row_padding = row_padding
        self._runner = self._chosen_runner()

    def keep_no_draft_rows(self) -> None:
        """From now on let state slots have no room for draft tokens: it will decode plainly."""
        self.layout = self.hf.layout = replace(self.layout, most_draft_tokens=0)

    def use_programs(self, program: ForwardProgram | None, device_program: DeviceProgram | None) -> None:
        """From now on let one of two programs run the forwards; PyTorch if both are None."""
        self.program = program
        self.device_program = device_program
        self._runner = self._chosen_runner()

    def _chosen_runner(self) -> EagerRunner:
        """Return what runs the steps, for the present program, graphs and row padding."""

        def forward(*batch: Any) -> Tensor:  # looked up in every call: a caller may have replaced it
            return self.forward(*batch)

        parts = ModelParts(self._compute, forward, self.attached, self.ops, self.vocab_size)
        if self.program is not None and self.has_fused_step:
            return CppRunner(parts, self.program)
        runner = EagerRunner(parts)
        if self.graphs is not None:
            runner = GraphRunner(parts, self.graphs, self.max_positions)
        if self.leader is not None:  # other ranks follow forwards, not steps
            runner = EagerRunner(replace(parts, compute=partial(self.leader.compute, runner.compute)))
        return runner

    def forward(
        self,
        batch: RaggedBatch,
        pool: PagePool,
        logit_rows: Tensor | None = None,
        hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Compute the batch's rows, and write their KV entries into ``pool``.

        Args:
            batch: ``T`` rows.
            pool: this model's pages.
            logit_rows: ``[R]`` int64, the rows whose logits the caller needs; None: all.
            hidden_states: memory from ``empty_hidden_states(T)`` for the taps of every row; None if the caller needs
                none.

        Returns:
            Logits ``[R, vocab_size]`` (``[T, vocab_size]`` without ``logit_rows``) in the model's dtype. Read them
            before the model's next forward, because a graph always writes them to the same memory.

        """
        return self._runner.compute(batch, pool, logit_rows, hidden_states)

    def _compute(
        self, batch: RaggedBatch, pool: PagePool, logit_rows: Tensor | None, hidden_states: Tensor | None
    ) -> Tensor:
        if self.program is not None:
            return self.program(batch.token_ids, batch, pool.pages, logit_rows, hidden_states)
        forward = self.hf.forward if self.device_program is None else self.device_program
        return forward(batch, pool, logit_rows, hidden_states)

    def empty_hidden_states(self, num_rows: int) -> Tensor | None:
        """Return memory for the taps of ``num_rows`` rows, ``[num_rows, taps, H]``; None before ``use_taps``."""
        return None if self.hf.taps is None else self.hf.taps.empty(num_rows, self.layout.device)

    def verify_step(
        self,
        pool: PagePool,
        sequences: list[Sequence],
        draft_tokens: Tensor,
        num_draft_tokens: list[int],
        parents: Tensor | None = None,
        unread: Tensor | None = None,
    ) -> Verification:
        """Compute logits at every sequence's last committed token and its draft tokens, and verify the draft tokens.

        After trees the caller must call ``keep_paths`` before it computes further rows of these sequences.

        Args:
            pool: this model's pages.
            sequences: ``B`` sequences; the pool has the KV entries of their first ``target_kv_length`` tokens (with
                ``unread``, of all). The forward computes the others too; with trees, that may only be the last one.
            draft_tokens: ``[sum(num_draft_tokens)]`` int64 on any device, sequence after sequence.
            num_draft_tokens: number of draft tokens per sequence; 0 is allowed.
            parents: see ``Draft.parents``; None for chains. A model that verifies no trees raises NotYetSupportedError.
            unread: ``Verification.next_tokens`` of these sequences' last step, which the host has not read: each
                sequence has one row, that of this token. None: the sequences have the tokens of their last step.

        """
        self.verifies.set()
        if parents is not None:
            self.expect_trees()
            parents = parents.cpu().contiguous()
        draft_tokens = draft_tokens.to(self.layout.device, non_blocking=True)
        plan = StepPlan(
            sequences=sequences,
            draft_tokens=draft_tokens,
            num_draft_tokens=num_draft_tokens,
            parents=parents,
            vocab_size=self.vocab_size,
            empty_hidden_states=self.empty_hidden_states,
            unread=unread,
        )
        return self._runner.verify(pool, plan)

    def why_no_trees(self) -> str | None:
        """Return why a row of a tree could have other bits than in the chain of its path; None if it cannot."""
        if not self.ops.has_trees("paged_attention"):
            return f"attention by {self.ops.chosen.get('paged_attention')!r} computes them with other bits than chains"
        if self.layout.states:
            return "its recurrent layers keep one state of a sequence, and the branches of a tree need several"
        if self.layout.indexers:
            return "its indexers select positions for rows of chains only"
        return "it computes rows one by one" if self.row_padding.one_by_one else None

    def expect_trees(self) -> None:
        """Check that the model verifies trees.

        Raises:
            NotYetSupportedError: a row's bits could differ from those of the chain of its path.

        """
        if (reason := self.why_no_trees()) is not None:
            raise NotYetSupportedError(
                f"{self.name} verifies no trees of draft tokens: {reason}; use a drafter of chains "
                "(Draft.parents=None), such as 'ngram'."
            )

    def keep_paths(self, pool: PagePool, sequences: list[Sequence], paths: list[list[int]] | None) -> None:
        """Move the KV entries of accepted draft tokens to the slots of their positions, if trees were verified.

        ``paths`` come from the outcome; None for chains. The sequences have the tokens that they had before.
        """
        if paths is not None:
            keep_paths(pool, self.ops, [(s, s.target_kv_length) for s in sequences], paths)

    def draft_step(
        self,
        pool: PagePool,
        sequences: list[Sequence],
        kv_lengths: list[int],
        num_draft_tokens: list[int],
        vocab_size: int,
    ) -> Tensor:
        """Continue every sequence by the model's own choice, with the noise that the target will use.

        Args:
            pool: this model's pages, with enough free ones for all positions of the step.
            sequences: ``B`` sequences.
            kv_lengths: per sequence, the number of positions that have KV entries, fewer than its length. The step
                computes the other committed tokens first; ids beyond this model's vocabulary are clamped.
            num_draft_tokens: number of tokens to draft per sequence, at least 1.
            vocab_size: the model chooses ids below it.

        Returns:
            ``[sum(num_draft_tokens)]`` int64, sequence after sequence.

        """
        rows = [Rows(s, start, s.length - start) for s, start in zip(sequences, kv_lengths, strict=True)]
        largest = self.vocab_size - 1
        token_ids = [
            min(token, largest) for s, start in zip(sequences, kv_lengths, strict=True) for token in s.token_ids[start:]
        ]
        return self.draft(pool, DraftPlan(rows, token_ids, num_draft_tokens, vocab_size))

    def draft(self, pool: PagePool, plan: DraftPlan) -> Tensor:
        """Draft as ``draft_step`` does, behind rows that need not be tokens of the target; see ``DraftPlan``."""
        return self._runner.draft(pool, plan)

    def use_graphs(self, limits: GraphLimits) -> None:
        """From now on replay forwards within ``limits`` as graphs, on a device that has graphs."""
        if self.program is None and self._capture is not None:
            self.in_all_ranks(UseGraphs(limits), partial(self._use_graphs, limits, self._capture))

    def _use_graphs(self, limits: GraphLimits, capture: Capture) -> None:
        choices = choices_of(self.ops, self.vocab_size)
        why = "its indexers wait for the device" if self.layout.indexers else None
        self.use_these_graphs(Graphs(self.model, self._compute, capture, limits, choices, why, self.is_sharded))

    def use_these_graphs(self, graphs: Graphs | None) -> None:
        """From now on replay these graphs; None: none."""
        self.graphs = graphs
        self._runner = self._chosen_runner()

    def use_taps(self, taps: tuple[int | str, ...]) -> None:
        """From now on compute hidden states for a drafter: its program is made again; () computes none any more.

        Args:
            taps: ``Drafter.taps``.

        Raises:
            DrafterError: an id is wrong or given twice.
            UnsupportedModelError: the model has no such hidden states, or does not reproduce its own dense ones.

        """
        ids = checked_taps(taps, self.hf.num_layers)
        if ids or self.hf.taps is not None:
            self.in_all_ranks(UseTaps(ids), partial(self._use_taps, ids))

    def _use_taps(self, ids: tuple[int | str, ...]) -> None:
        with named_failures(self.model):
            self.hf.use_taps(ids)
            if self.has_program:
                try:
                    self._compile()
                except NotLowerableError as error:
                    raise UnsupportedModelError(f"the program of {self.name} has no taps {ids}: {error}") from error
            if ids:
                probe = probe_of(self.vocab_size, self.layout.device)
                reference = self.hf.forward if self._compares_every_row else None
                check_reproduces_taps(self.hf, self.forward, self.page_size, probe, reference)
        self.release_memory()

    def release_memory(self) -> None:
        """Free what the program has kept since the probes; its next forward allocates as much as it needs."""
        if self.program is not None:
            self.program.release()

    def attached(self) -> AbstractContextManager[None]:
        """Replace functions and linears once for several forwards of PyTorch: see ``HFModel.attached``."""
        return nullcontext() if self.has_program else self.hf.attached()

    def _make_program(self, token_ids: Tensor, dense_logits: Tensor) -> None:
        """Compile the forward to a program, if it can be compiled and reproduces the model's own logits."""
        if self._executor is None:
            return
        try:
            self._compile()
            return self.check_logits(token_ids, dense_logits)
        except (NotLowerableError, UnsupportedModelError) as error:
            why = str(error)
        except Exception as error:  # a model's own code may raise anything here; PyTorch can still run it
            why = f"recording it failed: {type(error).__name__}: {error}"
        self.use_programs(None, None)
        self.why_no_program = why

    def _compile(self) -> None:
        assert self._executor is not None
        hf = self.hf
        tapped = None if hf.taps is None else hf.taps.collected
        with hf.hooked():  # not `attached`: the tracer must see the linears as ATen operations
            plan = compile_forward(
                self.model, hf.call, self.layout, self.ops, hf.rules, tapped, self.max_positions, hf.cache_class
            )
        self.use_programs(*self._executor(plan))
        self._watch = Watch(self.model, plan.baked)

    def check_logits(self, token_ids: Tensor, expected: Tensor) -> None:
        """Compare the model's ragged logits with its dense ones; see ``check_reproduces``."""
        reference = self.hf.forward if self._compares_every_row else None
        check_reproduces(self.hf, self.forward, self.page_size, token_ids, expected, reference=reference)

    @property
    def _compares_every_row(self) -> bool:
        """Whether a program's every row must be that of PyTorch's operations, in 16 bits as well.

        On a GPU it takes the first of equal scores of a router, where PyTorch may take another one.
        """
        return self.program is not None or (self.device_program is not None and not self.hf.has_experts)

    def expect_same_weights(self) -> None:
        """Check that the model is as it was when it was loaded. If it is not, its graphs are destroyed.

        Raises:
            UnsupportedModelError: its program or other ranks would not see a change, or it would train.

        """
        if not self.has_program and self.leader is None:  # other ranks would not compute its forwards
            self._in_training = check_repeats(self.model, self._probe_logits, self._in_training)
        if self.graphs is not None and (change := self.graphs.change()) is not None:
            if self.leader is not None:  # the other ranks would keep theirs
                raise error_of_change(self.name, change)
            self.graphs.record_again()
        self.expect_program_of_weights()

    def expect_program_of_weights(self) -> None:
        """Check that its program, if it has one, would see all changes of the model; any thread may call.

        Raises:
            UnsupportedModelError: a change that it would not see.

        """
        if self.has_program and self._watch is not None and (change := self._watch.change()) is not None:
            raise error_of_change(self.name, change)

    def has_changed(self) -> bool:
        """Return whether it may compute other KV entries than at the last call of this method; True at the first.

        Without a program its modules may have been replaced too; with one, ``expect_same_weights`` refuses that.
        """
        model = self.model
        numbers = Numbers([*model.parameters(), *model.buffers()])
        has_changed = numbers != self._numbers
        self._numbers = numbers
        if not self.has_program and (self._structure is None or self._structure.change() is not None):
            self._structure = Watch(model, ())
            has_changed = True
        return has_changed
