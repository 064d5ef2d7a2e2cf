"""The core: a caller adds requests at any time, and every step returns the tokens that it emitted.

The core pads nothing and realigns nothing. A step computes the last committed token and the draft tokens of every
sequence. The target's own choice at each row decides how many are accepted. Rejecting only lowers a length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from time import perf_counter
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import Drafter
from specdec_fast.engine.drafting import StepDrafting, may_draft
from specdec_fast.engine.prefilling import Prefilling
from specdec_fast.engine.prefixes import PrefixCache
from specdec_fast.engine.residents import Pools, Residents, Room
from specdec_fast.engine.row_limit import RowLimit, memory_error
from specdec_fast.engine.scores import emission_scores
from specdec_fast.engine.step import Step, StepOutput, commit_emissions, step_error
from specdec_fast.errors import EngineBusyError, KVCacheAllocationError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import RunStats
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.schedulers import Scheduler
from specdec_fast.speculation_length import LengthPolicy

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outermost(
    method: Callable[Concatenate[EngineCore, _P], _R],
) -> Callable[Concatenate[EngineCore, _P], _R]:
    """Let a method of the core raise an EngineBusyError if a drafter, a policy, a scheduler or a hook calls it.

    Such a call would change the sequences that the core is working on.
    """

    @wraps(method)
    def guarded(core: EngineCore, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if core.is_called:
            raise EngineBusyError(
                f"core.{method.__name__} was called by code that the engine's core was calling: a drafter, a policy "
                "for K, a scheduler or a hook may not call the engine; call it when the step has ended."
            )
        core.is_called = True
        try:
            return method(core, *args, **kwargs)
        finally:
            core.is_called = False

    return guarded


class EngineCore:
    """Waiting sequences, resident sequences, and the KV pool that they share.

    Only one thread at a time may use it (``Engine`` guards its own calls), and no code that it calls (``outermost``,
    which sets ``is_called``).

    Args:
        target: the model that decides every token.
        drafter: proposes tokens.
        scheduler: decides which sequences join, and which take part in a step.
        length_policy: decides how many draft tokens each sequence of a step gets.
        config: page size, and the size of the KV pool if it is fixed.
        max_nodes: largest number of nodes of a tree; where it is less than K, trees have K nodes.

    Attributes:
        waiting: sequences that hold no pages (any more), in the order of their turns (``Sequence.turn``).
        resident: sequences that hold pages, in the same order.
        ended: sequences that ended outside of a verification: those that are only scored, and those that failed alone.
            The next step returns them.
        drafting: asks the drafter and the K policy.
        prefilling: the resident sequences that lack KV entries of their prompts.
        prefixes: the prefix cache.
        row_limit: the largest number of rows of a forward after memory ran out.
        stats: counts and times of the steps; the caller may replace it between two steps.

    """

    def __init__(
        self,
        target: RaggedModel,
        drafter: Drafter,
        scheduler: Scheduler,
        length_policy: LengthPolicy,
        config: EngineConfig,
        max_nodes: int,
    ) -> None:
        self.target = target
        self.scheduler = scheduler
        self.stats = RunStats()
        self.is_called = False
        self.row_limit = RowLimit()
        self.drafting = StepDrafting(drafter, length_policy, self.row_limit)
        self.prefixes = PrefixCache(target, drafter, config)
        self._pools = Pools(target, drafter, config, self.prefixes)
        self._most_rows = most_logit_rows = None
        if config.memory_bytes is not None:  # for which the budget has memory
            self._most_rows = config.max_prefill_tokens
            most_logit_rows = config.max_batch_size * (max(max_nodes, config.most_draft_tokens) + 1)
        self.prefilling = Prefilling(
            target, self.drafting, self.prefixes, config.max_prefill_tokens, self.row_limit, most_logit_rows
        )
        self._residents = Residents(
            self._pools, self.prefixes, self.prefilling, scheduler, self.drafting, config, max_nodes
        )
        self.waiting = self._residents.waiting
        self.resident = self._residents.resident
        self._in_step: list[Sequence] = []  # the sequences of the present step, for drop_failed
        self.ended: list[Sequence] = []
        self._requests: dict[int, Sequence] = {}
        self._num_added = 0
        self._finished = 0.0  # when the last step ended; 0.0 if the next one has more work to do
        self._launched: Step | None = None
        self._launch_error: Exception | None = None

    @property
    def pool(self) -> PagePool | None:
        """The target's KV pages; None before the first step."""
        return self._pools.target_pool

    @pool.setter
    def pool(self, pool: PagePool) -> None:
        """Let the next steps use another pool; nothing may be resident."""
        self._pools.use(pool)

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or no step has returned its end yet."""
        return bool(self.waiting or self.resident or self.ended)

    @property
    def launches_ahead(self) -> bool:
        """Whether ``step`` launches the next step before it returns, which a CPU would compute at once."""
        return self.target.layout.device.type != "cpu"

    def expect_room(self, request: Sequence) -> None:
        """Raise the error with which ``add`` would refuse the request; any thread may call this."""
        self._pools.expect_room(request)

    @outermost
    def add(self, request: Sequence) -> int:
        """Put an unfinished sequence into the queue; return a number for ``cancel``, different for every request.

        Raises:
            KVCacheTooSmallError: the request can never fit into the KV pool that the configuration allows.

        """
        self._pools.expect_room(request)
        self._num_added += 1
        self._requests[self._num_added] = request
        request.request_id = self._num_added
        self.prefixes.begin(request)
        self._residents.enqueue(request)
        self._pools.is_sized = False
        self._finished = 0.0
        return self._num_added

    @outermost
    def cancel(self, request_id: int) -> bool:
        """Drop a request. No later step returns it.

        Its pages are freed at once, or at the end of the next step if the core has already launched a step with it.
        Returns False if the request had already ended, or the id is unknown.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if self._launched is None or request not in self._launched.batch:
            self._leave([request])
        return True  # step() releases a request of the launched step when it finishes that step

    @outermost
    def cancel_all(self) -> None:
        """Drop every request, and the launched step."""
        self._requests.clear()
        self.ended.clear()
        self._launched = self._launch_error = None
        self._leave([*self.resident, *self.waiting])

    @outermost
    def step(self) -> list[StepOutput]:
        """Run one step: plan, draft, verify, accept, commit.

        After an exception the caller must call ``drop_failed`` or ``cancel_all``.

        On a GPU the core launches the next step before this one returns, so the device computes while the caller
        handles the tokens; a plain step even before the tokens of this one are read (``_can_be_followed``). On a CPU
        launches are synchronous, so the core launches nothing early.

        A step that runs out of memory is repeated with fewer rows: fewer sequences, draft tokens, or prompt tokens. A
        sequence for which one row is too much ends with a RequestMemoryError.

        Returns:
            One output per sequence of the step, and per sequence that has ended outside of one; an empty list if there
            is no work, or if the step only prefilled.

        Raises:
            UnsupportedModelError: the target's weights or modules have changed since it was loaded.
            KVCacheAllocationError: there is no memory for a KV pool of ``kv_cache_tokens``.
            DrafterError, LengthPolicyError, SchedulerError: the one that the error names broke its contract.

        """
        if self._launch_error is not None:  # from launching early: the previous call still returned its outputs
            error = self._launch_error
            self._launch_error = None
            raise error
        if not self.has_work:
            return []
        step = self._launched or self._launch_next()
        self._launched = None
        may_launch = step is not None and self.launches_ahead
        outputs: list[StepOutput] = []
        if step is not None:
            step, next_tokens = self._fetched(step) if may_launch else (step, None)
            outputs = self._outputs_of(step) if next_tokens is None else self._outputs_of_followed(step, next_tokens)
        del step  # it keeps the logits of its rows, and the next launch allocates
        while self.ended:
            alone = self.ended.pop()
            outputs.append(StepOutput(alone, [], alone.finish_reason))
        if may_launch and self._launched is None and self._launch_error is None:
            try:
                self._launched = self._launch_next()
            except Exception as error:
                self._launch_error = error
        return outputs

    @outermost
    def drop_failed(self, error: BaseException) -> None:
        """Drop the sequences of a step that raised; the other sequences go on.

        An interrupt (KeyboardInterrupt, for example) may leave pools half changed, so it drops every sequence that has
        pages. An error before the scheduler has chosen sequences drops all sequences, waiting ones included. ``error``,
        the exception of ``step``, becomes the cause of the ``StepError`` of every dropped sequence.
        """
        in_step = self._in_step or [*self.resident, *self.waiting]
        for sequence in in_step if isinstance(error, Exception) else self.resident:
            if self._requests.pop(sequence.request_id, None) is not None:
                sequence.fail(step_error(error))  # if it has ended, ``step`` has not returned that
        self._launched = None
        self._launch_error = None
        self._in_step = []
        self._pools.is_sized = False  # the next step checks the pools again
        self._leave([s for s in (*self.resident, *self.waiting) if s.request_id not in self._requests])
        if not isinstance(error, Exception):
            self.prefixes.forget(self.pool, self.waiting)

    def _launch_next(self) -> Step | None:
        """Launch the next step, with fewer rows if memory runs out; return None if no sequence can decode yet."""
        while self.waiting or self.resident:
            try:
                return self._try_to_launch()
            except Exception as error:
                self._prepare_retry(error)  # raises it, if there is nothing to retry
        return None

    def _try_to_launch(self) -> Step | None:
        self._in_step = []
        self._residents.admit()
        if self.prefilling.sequences:
            self._prefill()
        ready = self.prefilling.ready(self.resident) if self.prefilling.sequences else self.resident
        if not ready:
            self.prefilling.passed()
            return None
        self._in_step = self.scheduler.plan(ready)
        batch = self._in_step
        limits = self.drafting.limits(batch)
        may_branch = self.drafting.length_policy.may_branch
        if self.row_limit.most is not None:
            batch, limits = self.row_limit.fit(batch, limits)
            may_branch = False
        room = self._residents.make_room(batch, limits, may_branch)
        self._in_step = room.batch
        self.stats.num_preemptions += room.num_preempted
        return self._launch(room) if room.batch else None

    def _prefill(self) -> None:
        """Prefill what a step may; in several chunks, if prompts wait for the pages of others that begin alike."""
        pool = self._pools.pool()
        self._finished = 0.0
        num_done = 0
        free_rows = self._free_rows()
        while chunk := self.prefilling.next_chunk(pool, num_done, free_rows):
            num_done += sum(stop - sequence.target_kv_length for sequence, stop in chunk.items())
            self._in_step = list(chunk)
            with self.stats.timer("prefill"):
                self.prefilling.compute(pool, chunk)
            self._end_prefilled(chunk)
            if self.row_limit.most is not None:
                break

    def _free_rows(self) -> int:
        """Return how many rows of prompts, beside their last ones, the verification of a step has room for.

        A policy that learns could not tell their cost from that of draft tokens. So with such a policy there is no room
        while a sequence may have draft tokens.
        """
        most = self.scheduler.max_batch_size
        num_drafting = min(most, sum(map(may_draft, self.resident)))
        policy = self.drafting.length_policy
        if policy.learns and num_drafting:
            return 0
        most_rows = min(filter(None, (self.target.row_padding.largest, self._most_rows)))
        num_verified = min(most, len(self.resident)) + num_drafting * policy.max_draft_tokens
        return max(0, most_rows - num_verified)

    @torch.inference_mode()
    def _launch(self, room: Room) -> Step:
        """Draft and verify for one batch; on a GPU this only queues the work."""
        batch = room.batch
        timer = self.stats.timer
        started = perf_counter()
        self.row_limit.num_rows = sum(s.num_uncomputed for s in batch) + sum(room.node_limits)
        draft, depths = self.drafting.draft(batch, room.limits, room.node_limits, timer)
        drafted = perf_counter()
        pool = self._pools.pool()
        with timer("prefill"):
            prompt_rows = self.prefilling.pass_on(pool, batch, has_trees=draft.parents is not None)
        stage = "prefill" if prompt_rows else "verify"
        with timer(stage):
            verification = self.target.verify_step(pool, batch, draft.token_ids, draft.num_draft_tokens, draft.parents)
        timer.move(verification.accept_seconds, stage, "accept")
        return Step(
            batch=batch,
            limits=room.limits,
            draft=draft,
            depths=depths,
            verification=verification,
            started=started,
            drafted=drafted,
            may_branch=room.node_limits != room.limits,
            prompt_rows=prompt_rows,
        )

    def _end_prefilled(self, chunk: Iterable[Sequence]) -> None:
        """Let the sequences of a chunk that end with their prompts leave, and those whose scores failed."""
        ended = []
        for sequence in chunk:
            if sequence.is_only_scored and sequence.target_kv_length == sequence.length - 1:
                sequence.finish_reason = sequence.finish_reason or "length"
            if sequence.finish_reason is not None:
                ended.append(sequence)
        if ended:
            self.ended += ended
            self._leave(ended)

    def _outputs_of(self, step: Step) -> list[StepOutput]:
        """Finish a step, and let the sequences that have ended leave."""
        resident = set(self.resident)
        self._in_step = [s for s in step.batch if s in resident]  # others may have ended after the launch
        self.row_limit.num_rows = step.num_rows
        outputs = [StepOutput(s, tokens, s.finish_reason) for s, tokens in self._finish(step)]
        self._leave([s for s in self.resident if s.finish_reason is not None or s.request_id not in self._requests])
        return outputs

    @torch.inference_mode()
    def _finish(self, step: Step) -> list[tuple[Sequence, list[int]]]:
        """Accept and commit the tokens of a launched step; return the tokens that each sequence emitted."""
        timer = self.stats.timer
        batch = step.batch
        verification = step.verification
        try:
            with timer("accept"):
                outcome = verification.outcome()
                rows = outcome.accepted_rows(verification.counts)
                scores = emission_scores(batch, rows, outcome.emissions, verification.logits)
                self.target.keep_paths(self._pools.pool(), batch, outcome.paths)
                if verification.prompt_hidden_states is not None:
                    self.prefilling.observe(step.prompt_rows, verification.prompt_hidden_states)
        except Exception as error:
            self._prepare_retry(error)
            return []
        with timer("commit"):
            emitted = commit_emissions(step, outcome.emissions, rows, scores, self._requests)
            self.prefixes.keep(self._pools.pool(), [sequence for sequence, _ in emitted])
            lost = self.drafting.commit(step, rows, emitted)
            if lost:
                self.prefilling.restart(self._pools.pool(), lost)
        # Rows of prompts take time too; or the policy has forgotten a sequence that has left.
        if not step.prompt_rows and len(emitted) == len(batch):
            self.drafting.length_policy.observe(step.observation(outcome, self._finished))
        self._finished = perf_counter()
        self.stats.add_step(len(emitted), bool(lost))
        return emitted

    def _fetched(self, step: Step) -> tuple[Step, Tensor | None]:
        """Begin to copy the tokens of a step to the host if the core may launch the next step before it reads them.

        Returns the step, which then has no logits any more, and its next tokens on the device; None if it may not.
        """
        # A scheduler's error, or a lack of memory, shows again in the next launch, after the outputs of this step.
        with suppress(Exception):
            if self._can_be_followed(step):
                next_tokens = step.verification.next_tokens
                return replace(step, verification=step.verification.on_its_way()), next_tokens
        return step, None

    def _can_be_followed(self, step: Step) -> bool:
        """Return whether the next step is one of the same sequences, all decoded plainly, and pages are free for it."""
        if self.drafting.length_policy.max_draft_tokens:
            return False
        if self.row_limit.most is not None or self.prefilling.sequences:
            return False
        if len(step.batch) < len(self.resident) or not step.can_be_followed(self._requests):
            return False
        may_grow = self.waiting and not self._pools.is_sized
        if may_grow or self._residents.may_admit() or not self._residents.have_room(step.batch, ahead=1):
            return False
        return len(self.scheduler.select(list(self.resident))) == len(step.batch)

    def _outputs_of_followed(self, step: Step, next_tokens: Tensor) -> list[StepOutput]:
        """Launch the next plain step on the tokens that ``step`` has chosen, then finish ``step``."""
        batch = step.batch
        lengths = [sequence.length for sequence in batch]
        following = failure = None
        try:
            following = self._launch_following(step, next_tokens)
        except Exception as error:
            failure = error
        outputs = self._outputs_of(step)
        if failure is not None:
            self._recover_launch(failure)
        resident = set(self.resident)
        goes_on = [s.length == length + 1 for s, length in zip(batch, lengths, strict=True) if s in resident]
        if goes_on and all(goes_on) and not self.prefilling.sequences:  # else all have ended, or some begin again
            self._launched = following
        return outputs

    @torch.inference_mode()
    def _launch_following(self, step: Step, next_tokens: Tensor) -> Step:
        started = perf_counter()
        pool = self._pools.pool()
        none = step.draft
        with self.stats.timer("verify"):
            verification = self.target.verify_step(
                pool, step.batch, none.token_ids, none.num_draft_tokens, unread=next_tokens
            )
        self.stats.timer.move(verification.accept_seconds, "verify", "accept")
        return replace(step, verification=verification, started=started, drafted=started)

    def _prepare_retry(self, error: Exception) -> None:
        """Recover from a lack of memory: a sequence that lacks it alone fails. Raise any other error."""
        is_of_pools = isinstance(error, KVCacheAllocationError) and not self._in_step
        if is_of_pools and not self._pools.has_fixed_size:
            alone = self.waiting[0]  # no pool can hold it
        else:
            may_retry = self.row_limit.recover(error, self._in_step)
            self.drafting.withdraw(self._in_step)
            if may_retry:
                self.prefilling.restart(self._pools.pool(), self._in_step)
                self.stats.num_out_of_memory += 1
                return
            alone = self._in_step[0]
        if alone.request_id in self._requests:  # else it was cancelled after the launch
            alone.fail(memory_error(error))
            self.ended.append(alone)
        self._leave([alone])

    def _recover_launch(self, error: Exception) -> None:
        """Recover from a failed launch of a following step, or let the next call raise the error.

        If all sequences of that step have ended, no one needs it.
        """
        self._in_step = [sequence for sequence in self._in_step if sequence in self.resident]
        try:
            if self._in_step:
                self._prepare_retry(error)
        except Exception as reason:
            self._launch_error = reason

    def _leave(self, sequences: list[Sequence]) -> None:
        """Remove sequences that wait or are resident, and release what they hold."""
        for sequence in sequences:
            self._requests.pop(sequence.request_id, None)
            self.stats.add_ended(sequence.stats, sequence.num_cached_tokens)
        self._residents.remove(sequences)  # all pages first, because what follows may raise
        self.drafting.release(sequences)
