"""The engine: plan -> draft -> verify -> commit, on ragged rows and a paged KV cache.

Nothing is padded and nothing is realigned. A step feeds every sequence its last committed token and its draft
tokens; the target's own choice at each row decides how many are accepted; rejecting only lowers a length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from os import PathLike
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_fast.config import EngineConfig, as_config
from specdec_fast.cuda_graphs.buckets import Limits
from specdec_fast.cuda_graphs.graphs import described
from specdec_fast.drafters import Drafter, make_drafter, wanted_draft
from specdec_fast.engine.commit import commit, logprobs_of
from specdec_fast.engine.input import RequestBuilder, as_params_list, as_prompt_list
from specdec_fast.engine.output import Steps, chunks_of, output_of
from specdec_fast.engine.progress import Progress
from specdec_fast.engine.step import Step, propose
from specdec_fast.engine.turns import Turn
from specdec_fast.errors import KVCacheTooSmallError
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.batch_invariance import make_deterministic
from specdec_fast.models.loading import load_model
from specdec_fast.models.prefill import prefill
from specdec_fast.models.probe_errors import named_failures
from specdec_fast.models.profiling import forward_seconds
from specdec_fast.models.ragged_model import RaggedModel
from specdec_fast.ops import resolve
from specdec_fast.request.detokenizer import expect_tokenizer, load_tokenizer
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import GenerationOutput, RunStats, StreamChunk
from specdec_fast.schedulers import make_scheduler
from specdec_fast.speculation_length import Profiler, make_length_policy


class Engine:
    """A target, a drafter and their KV pools, loaded once and used for any number of calls.

    One call at a time: an engine is not shared between threads, and a stream must be finished or closed before the
    next call. The models are the caller's and may be used elsewhere between calls.

    Args:
        target: name, folder or loaded Hugging Face causal model.
        draft: the same for a draft model; the name of a drafter, such as ``"ngram"``; a Drafter; or None (or
            ``"none"``) for plain decoding.
        config: an EngineConfig; its fields may be given as keywords instead.
        tokenizer: the target's; None loads the one beside the model, if there is one. Or an object of your own, with
            ``__call__(text).input_ids`` and ``decode(ids, skip_special_tokens=True)``: more ids may only add text.

    Raises:
        ConfigError: unknown method, keyword or backend, or a value out of range.
        UnsupportedModelError, VocabularyMismatchError: a model cannot be paged; the draft's tokens are others.
        BackendError: the backend asked for cannot run here.
        ForkedProcessError: this process was forked from one that has made an engine, and has several threads.
        DeterminismError: ``deterministic=True``, and a model's bits depend on the batch even one row at a time.

    """

    def __init__(
        self,
        target: str | PathLike[str] | PreTrainedModel,
        draft: str | PathLike[str] | PreTrainedModel | Drafter | None,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any | None = None,
        **keywords: Any,
    ) -> None:
        self.config = as_config(config, keywords)
        self.scheduler = make_scheduler(self.config)
        wanted = wanted_draft(draft, self.config)
        expect_tokenizer(tokenizer)
        self._turn = Turn()
        model = load_model(target, self.config.dtype, self.config.device)  # type: ignore[arg-type]
        self._ops = resolve(next(model.parameters()).device, self.config.backend)
        with named_failures(model):
            self.target = RaggedModel(model, self._ops, self.config.page_size, self.config.enforce_eager)
            if self.config.deterministic:
                make_deterministic(self.target)
            self.target.use_graphs(Limits(self.config.max_batch_size, self.config.most_draft_tokens + 1))
        self.tokenizer = load_tokenizer(self.target.path) if tokenizer is None else tokenizer
        self.drafter = make_drafter(wanted, self.target, self.config, self._ops, self.tokenizer)
        self.length_policy = make_length_policy(0 if wanted is None else self.config.num_draft_tokens)
        verify_seconds = partial(forward_seconds, self.target, most_sequences=self.config.max_batch_size)
        self.length_policy.prepare(
            Profiler(self.config.max_batch_size, self._overlap, verify_seconds, self.drafter.forward_seconds)
        )
        self.pool: PagePool | None = None
        self.last_run = RunStats()

    def generate(self, prompts: Any, params: Any = None, *, progress: bool | None = None) -> list[GenerationOutput]:
        """Decode every prompt.

        Args:
            prompts: strings or lists of token ids (or one of them).
            params: SamplingParams or a transformers GenerationConfig, one for all or one each; None is greedy.
            progress: show a progress bar; None shows it on a terminal.

        Returns:
            One output per prompt, in input order. A request that could not be served has ``finish_reason="error"``
            and the typed error in ``.error``; the others are not touched.

        Raises:
            InvalidParamsError, NotYetSupportedError, ConfigError: before any work, for arguments that are wrong as
                a whole.
            EngineBusyError: a stream of this engine is still open, or another thread is in a call of it.
            ForkedProcessError: the engine was made in the process that this one was forked from.

        """
        sequences = self._build(prompts, params)
        with Progress(len(sequences), progress) as bar:
            for sequence, tokens in self._decode(sequences):
                bar.update(len(tokens), sequence.finish_reason is not None)
        return [output_of(sequence, self.tokenizer) for sequence in sequences]

    def stream(self, prompts: Any, params: Any = None) -> Iterator[StreamChunk]:
        """Decode every prompt and yield tokens as steps emit them.

        Takes and raises what ``generate`` does. Chunks of different prompts interleave; the chunks of one prompt add
        up to its ``generate`` output. Close the iterator to stop early: its KV pages return at once.
        """
        sequences = self._build(prompts, params)
        return chunks_of(sequences, self.tokenizer, self._decode(sequences))

    def describe(self) -> dict[str, Any]:
        """Return what this engine runs: models, scheduler, backends, KV pool."""
        return {
            "target": self.target.name,
            "drafter": self.drafter.name,
            "method": self.config.method,
            "max_batch_size": self.config.max_batch_size,
            "num_draft_tokens": self.config.num_draft_tokens,
            "dtype": str(self.target.layout.dtype).removeprefix("torch."),
            "device": str(self.target.layout.device),
            "deterministic": self.config.deterministic,
            "row_multiple": self.target.row_padding.multiple,
            "own_linears": len(self.target.hf.linears.served(self.target.row_padding.multiple > 1)),
            "forward_program": self.target.program is not None,
            "why_no_program": self.target.why_no_program,
            "attend_per_row": self.target.row_padding.attend_per_row,
            "rows_one_by_one": self.target.row_padding.one_by_one,
            "why_one_by_one": self.target.why_one_by_one,
            **described(self.target.graphs),
            "draft": self.drafter.describe(),
            "ops": dict(self._ops.chosen),
            "kv_bytes_per_token": self.target.layout.bytes_per_token,
            "kv_pages": self.pool.num_pages if self.pool else 0,
        }

    def _build(self, prompts: Any, params: Any) -> list[Sequence]:
        self._turn.expect_free()
        items = as_prompt_list(prompts)
        builder = RequestBuilder(self.target, self.tokenizer)
        pairs = zip(items, as_params_list(params, len(items)), strict=True)
        return [builder.build(index, prompt, p) for index, (prompt, p) in enumerate(pairs)]

    @property
    def _overlap(self) -> bool:
        """Whether a step's outputs are returned when the next step has been launched.

        A GPU then computes while the caller handles them. On a CPU launches are synchronous, so outputs are returned
        first.
        """
        return self.target.layout.device.type != "cpu"

    def _decode(self, sequences: list[Sequence]) -> Steps:
        """Run to the end; yield (sequence, tokens) for each sequence that a step served or that failed."""
        with self._turn.taken():  # another call may have begun since this generator was made
            self.last_run, started = RunStats(), perf_counter()
            resident: list[Sequence] = []
            try:
                self._prepare([s for s in sequences if s.finish_reason is None])
                waiting = deque(s for s in sequences if s.finish_reason is None)
                pending_outputs: list[tuple[Sequence, list[int]]] = [
                    (s, []) for s in sequences if s.finish_reason is not None
                ]
                while waiting or resident:
                    if not self._overlap:
                        yield from pending_outputs
                        pending_outputs = []
                    try:
                        self._admit(waiting, resident)
                        batch = self.scheduler.plan(resident)
                        is_refilled = waiting and self.scheduler.num_to_admit(len(resident) - 1)
                        step = self._launch(batch, len(batch) == len(resident) and not is_refilled)
                    except Exception:
                        yield from pending_outputs  # it was emitted before
                        raise
                    yield from pending_outputs
                    pending_outputs = self._finish(step)
                    for sequence in [s for s, _ in pending_outputs if s.finish_reason is not None]:
                        resident.remove(sequence)
                        self._release([sequence])
                    self.last_run.seconds = perf_counter() - started
                yield from pending_outputs
            finally:
                self._release(resident)

    def _prepare(self, sequences: list[Sequence]) -> None:
        """Make room for a full window of the largest sequences, or for what the user allowed."""
        self.target.expect_same_weights()
        page_size = self.config.page_size
        needs = sorted((-(-(s.max_length - 1) // page_size) * page_size for s in sequences), reverse=True)
        num_tokens = self.config.kv_cache_tokens or sum(needs[: self.scheduler.max_resident])
        if self.pool is None or not self.pool.is_vacant or self.pool.num_pages * page_size < num_tokens:
            self.pool = None  # give the old one back before asking for more
            self.pool = PagePool(self.target.layout, num_tokens, page_size, self.target.row_padding)
        self.drafter.prepare(self.pool.num_pages * page_size, page_size)
        for sequence in sequences:
            if not self.pool.can_ever_fit(sequence.max_length - 1):
                sequence.fail(
                    KVCacheTooSmallError(
                        f"the request needs {sequence.max_length - 1} KV positions (prompt {sequence.prompt_length}, "
                        f"the rest new tokens), the whole pool has {self.pool.num_pages * page_size}; raise "
                        "kv_cache_tokens, or lower max_new_tokens."
                    )
                )

    def _admit(self, waiting: deque[Sequence], resident: list[Sequence]) -> None:
        """Let the queue's first sequences join, as many as the scheduler wants and the pool can promise pages to."""
        pool = self._pool()
        joining: list[Sequence] = []
        places = self.scheduler.num_to_admit(len(resident))
        while waiting and len(joining) < places and pool.fits(waiting[0].max_length - 1):
            sequence = waiting.popleft()
            pool.reserve(sequence, sequence.max_length - 1)
            joining.append(sequence)
        if not joining:
            return
        resident += joining
        with self.last_run.timer("prefill"):
            # The last prompt token is left for the first verification, as in every later step (I3).
            prefill(self.target, pool, {s: s.token_ids[:-1] for s in joining})
            for sequence in joining:
                sequence.target_kv_length = sequence.length - 1

    @torch.inference_mode()
    def _launch(self, batch: list[Sequence], no_refill: bool) -> Step:
        """Draft and verify for one batch; on a GPU this waits for nothing."""
        timer = self.last_run.timer
        limits = self.length_policy.checked_limits(batch, no_refill)
        self._admit_to_drafter([s for s, limit in zip(batch, limits, strict=True) if limit and not s.is_admitted])
        started = perf_counter()
        with timer("draft"):
            draft = propose(self.drafter, batch, limits, self.target.layout.device)
        drafted = perf_counter()
        with timer("verify"):
            verification = self.target.verify_step(self._pool(), batch, draft.token_ids, draft.num_draft_tokens)
        timer.move(verification.accept_seconds, "verify", "accept")
        return Step(batch, limits, draft.num_draft_tokens, verification, started, drafted)

    @torch.inference_mode()
    def _finish(self, step: Step) -> list[tuple[Sequence, list[int]]]:
        """Accept and commit what ``_launch`` began; return what each sequence emitted."""
        timer, batch, verification = self.last_run.timer, step.batch, step.verification
        with timer("accept"):
            emissions = verification.emissions()
            logprobs = logprobs_of(batch, verification.counts, emissions, verification.logits)
        with timer("commit"):
            emitted = [
                (sequence, commit(sequence, num_draft_tokens, emission, values))
                for sequence, num_draft_tokens, emission, values in zip(
                    batch, step.num_draft_tokens, emissions, logprobs, strict=True
                )
            ]
            self.drafter.commit([s for s in batch if s.is_admitted and s.finish_reason is None])
        self.length_policy.observe(step.observation([len(emission) - 1 for emission in emissions]))
        self.last_run.num_steps += 1
        self.last_run.num_sequence_steps += len(batch)
        return emitted

    def _admit_to_drafter(self, sequences: list[Sequence]) -> None:
        """Let the drafter take in what it is about to draft for; where nothing is drafted, no prompt is prefilled."""
        if sequences:
            with self.last_run.timer("prefill"):
                self.drafter.admit(sequences)
            for sequence in sequences:
                sequence.is_admitted = True

    def _release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:  # all pages first: a drafter may fail
            self._pool().free(sequence)
            self.last_run.decoding.add(sequence.stats)
            self.length_policy.forget(sequence)
        for sequence in sequences:
            self.drafter.release(sequence)

    def _pool(self) -> PagePool:
        if self.pool is None:
            raise RuntimeError("the engine has no page pool before its first call.")
        return self.pool
