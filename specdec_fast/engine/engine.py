"""The synchronous engine: it loads its models once, and every call decodes prompts to their end."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from os import PathLike
from typing import Any

from transformers import PreTrainedModel

from specdec_fast.config import EngineConfig, as_config
from specdec_fast.drafters import (
    AUTO_DRAFT,
    DraftChoice,
    Drafter,
    checked_draft,
    choose_draft,
    expect_settings_read,
    make_drafter,
)
from specdec_fast.engine.core import EngineCore
from specdec_fast.engine.input import RequestBuilder, as_params_list
from specdec_fast.engine.memory import MemoryPlan, affordable_draft, plan_memory
from specdec_fast.engine.output import Outputs, Progress, chunks_of, output_of, outputs_of, score_of
from specdec_fast.engine.processes import OwnProcess
from specdec_fast.engine.shared_core import Call, SharedCore
from specdec_fast.engine.step import StepOutput, raise_cause
from specdec_fast.errors import (
    ConfigError,
    EngineClosedError,
    MemoryBudgetError,
    NotYetSupportedError,
    RequestError,
)
from specdec_fast.freed_memory import return_freed_memory
from specdec_fast.models.quantized_linears import bytes_by_kind
from specdec_fast.request.detokenizer import expect_tokenizers, load_tokenizer
from specdec_fast.request.prompt_options import PromptOptions
from specdec_fast.request.prompts import as_prompt_list
from specdec_fast.request.sequence import Sequence
from specdec_fast.results import GenerationOutput, RunStats, ScoreOutput, StreamChunk
from specdec_fast.runner.graphs.buckets import MOST_PROMPT_ROWS, GraphLimits
from specdec_fast.runner.graphs.graphs import described
from specdec_fast.runner.loading import load_sharded, load_target
from specdec_fast.runner.profiling import forward_seconds
from specdec_fast.sampling_params import scoring_params
from specdec_fast.schedulers import make_scheduler
from specdec_fast.speculation_length import Profiler, make_length_policy
from specdec_fast.structured_outputs.compiling import Grammars
from specdec_fast.torch_autocast import without_autocast

_AHEAD = 2  # times the sequences that may be resident, for which `as_completed` has encoded prompts


class Engine:
    """A target, a drafter and their KV pools, loaded once and used for any number of calls.

    Any number of threads may call it at the same time, also while streams are open. One of the threads runs the steps,
    in which the requests of all calls are decoded in one batch. The caller may use the models elsewhere between calls.

    Args:
        target: name, folder or loaded Hugging Face causal model.
        draft: the same for a draft model; the name of a drafter, such as ``"ngram"``; ``"auto"``, which chooses between
            ``"self"`` and ``"ngram"``; a Drafter; or None (or ``"none"``) for plain decoding.
        config: an EngineConfig; its fields may be given as keywords instead.
        tokenizer: the target's; None loads the one beside the model, if there is one. Or an object of your own, with
            ``__call__(text).input_ids`` and ``decode(ids, skip_special_tokens=True)``; the text of a list of ids must
            begin with the text of any first part of the list.
        draft_tokenizer: the draft model's, which may be another one; None loads the one beside that model.

    Raises:
        ConfigError: unknown method, keyword or backend, or a value out of range.
        MemoryBudgetError: ``memory_bytes`` is too small for the models and one short sequence.
        UnsupportedModelError: a model does not run over a paged KV cache.
        DrafterError: the drafter's ``taps`` or ``max_nodes`` are wrong.
        NotYetSupportedError: the drafter proposes trees, and the target verifies none: with ``backend="flash"``.
        VocabularyMismatchError: the draft model has another vocabulary than the target, and a tokenizer is missing, or
            of a kind that is not translated.
        BackendError: the requested backend cannot run here.
        ForkedProcessError: this process was forked from one that has made an engine, and uses several threads.
        DeterminismError: ``deterministic=True``, and a model's bits depend on the batch even one row at a time.
        RankError: a process of ``tp_size`` has failed or ended. Calls raise it too, when a process has ended.
    """

    _load_sharded = staticmethod(load_sharded)  # a check on one GPU replaces it

    @without_autocast
    def __init__(
        self,
        target: str | PathLike[str] | PreTrainedModel,
        draft: str | PathLike[str] | PreTrainedModel | Drafter | None,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any | None = None,
        draft_tokenizer: Any | None = None,
        **keywords: Any,
    ) -> None:
        self.process = OwnProcess()  # first, so that it is also the first to refuse a copy
        self.config = as_config(config, keywords)
        make_scheduler(self.config)  # refuses an unknown method before a model is loaded
        expect_tokenizers(tokenizer=tokenizer, draft_tokenizer=draft_tokenizer)
        draft = checked_draft(draft, self.config, draft_tokenizer)
        draft = affordable_draft(target, draft, self.config)
        most_draft_tokens = 0 if draft is None else self.config.most_draft_tokens
        load = load_target if self.config.tp_size == 1 else self._load_sharded
        self.target = load(target, self.config, most_draft_tokens)
        self._expect_same_steps()
        self.tokenizer = load_tokenizer(self.target.path) if tokenizer is None else tokenizer
        self._grammars = Grammars(self.tokenizer, self.target.vocab_size, self.target.eos_token_ids)
        self.draft_choice: DraftChoice | None = None
        drafter = self._make_drafter(draft, draft_tokenizer)
        if draft is not None:
            expect_settings_read(drafter, self.config)
        self.target.use_taps(drafter.taps)
        if drafter.checked_max_nodes():
            self.target.expect_trees()
        most = self.config.most_draft_tokens
        self._asked_draft_tokens = most
        tree_rows = max(most, drafter.max_nodes) + 1 if drafter.max_nodes else 0
        self.target.use_graphs(
            GraphLimits(self.config.max_batch_size, most + 1, tree_rows=tree_rows, prompt_rows=MOST_PROMPT_ROWS)
        )
        max_nodes = drafter.max_nodes
        self.memory_plan = self._planned(drafter, draft is not None)
        if self.memory_plan is not None:
            self.config = self.memory_plan.config
            max_nodes = self.memory_plan.max_nodes
            drafter.limit_prefill(self.config.max_prefill_tokens)
            if not self.memory_plan.has_drafter:
                draft = None
                drafter = self._make_drafter(None)
                self.target.use_taps(())
        length_policy = make_length_policy(0 if draft is None else self.config.num_draft_tokens)
        self.profiler = Profiler(
            max_batch_size=self.config.max_batch_size,
            is_asynchronous=self.target.layout.device.type != "cpu",
            verify_seconds=partial(forward_seconds, self.target, most_sequences=self.config.max_batch_size),
            draft_seconds=drafter.checked_forward_seconds,
            max_nodes=max_nodes,
            has_scores=drafter.has_scores,
        )
        length_policy.prepare(self.profiler)
        if self.memory_plan is not None:
            return_freed_memory()
        scheduler = make_scheduler(self.config)
        self.core = EngineCore(self.target, drafter, scheduler, length_policy, self.config, max_nodes)
        self.shared = SharedCore(self.core, self.process)

    def _make_drafter(self, draft: Any, draft_tokenizer: Any | None = None) -> Drafter:
        def make(chosen: Any) -> Drafter:
            return make_drafter(chosen, self.target, self.config, self.tokenizer, draft_tokenizer)

        if draft == AUTO_DRAFT:
            self.draft_choice = choose_draft(self.target, self.config, self._can_afford, make)
            draft = self.draft_choice.draft
        return make(draft)

    def _can_afford(self, draft: str) -> bool:
        return affordable_draft(self.target.model, draft, self.config) is not None

    def _planned(self, drafter: Drafter, drafts: bool) -> MemoryPlan | None:
        """Plan the memory; if state slots with room for draft tokens do not fit, with those of plain decoding."""
        try:
            return plan_memory(self.target, drafter, self.config, drafts=drafts)
        except MemoryBudgetError:
            if not self.target.layout.states or not self.target.layout.most_draft_tokens:
                raise
        self.target.keep_no_draft_rows()
        return plan_memory(self.target, drafter, self.config, drafts=False)

    def close(self) -> None:
        """End the processes that ``tp_size`` has started; further calls raise EngineClosedError. Any thread may call.

        The end of a ``with`` block does it, the garbage collector, and the end of this process. Requests that are
        running end with that error. Without ``tp_size`` there is nothing to close, and the engine can still be used.
        """
        if self.target.leader is not None:
            self.target.leader.workers.close(EngineClosedError("the engine has been closed; make a new one."))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def failure(self) -> Exception | None:
        """Why no request can be served any more: with ``tp_size``, a process that has ended. None: it serves."""
        return None if self.target.leader is None else self.target.leader.workers.failure

    @property
    def drafter(self) -> Drafter:
        """The drafter that proposes tokens."""
        return self.core.drafting.drafter

    @property
    def last_run(self) -> RunStats:
        """Counts and times of the latest call, or of all calls that overlapped with it."""
        return self.shared.run

    def generate(
        self, prompts: Any, params: Any = None, *, progress: bool | None = None, **prompt_options: Any
    ) -> list[GenerationOutput]:
        """Decode every prompt.

        Args:
            prompts: a prompt, or a list of prompts of any kinds: strings, token ids, messages, results of a tokenizer.
            params: SamplingParams or a transformers GenerationConfig for all, or a list with one each; None is greedy.
            progress: show a progress bar; None shows it on a terminal.
            **prompt_options: fields of PromptOptions, such as ``add_special_tokens`` and ``chat_template_kwargs``.

        Returns:
            One output per prompt, in input order; with ``n`` of its parameters, as many outputs in a row. A request
            that could not be served has ``finish_reason="error"`` and the typed error in ``.error``; the other requests
            are unaffected.

        Raises:
            InvalidParamsError, NotYetSupportedError, ConfigError: an argument is wrong; raised before any work.
            EngineBusyError: a step of this engine made the call (in a drafter, for example), or requests that were
                added to ``core`` directly have not ended.
            ForkedProcessError: the engine was made in the process that this one was forked from.
        """
        sequences = list(self._build(prompts, params, prompt_options))
        call = self.shared.call()
        with Progress(len(sequences), progress) as bar, closing(self.decode(sequences, call)) as outputs:
            call.ends_only = not bar.is_shown
            for output in outputs:
                bar.update(len(output.token_ids), output.finish_reason is not None)
        return [output_of(sequence, self.tokenizer) for sequence in sequences]

    def as_completed(
        self, prompts: Any, params: Any = None, **prompt_options: Any
    ) -> Generator[GenerationOutput, None, None]:
        """Decode every prompt and yield each output as soon as it has ended, with its ``index`` and ``choice``.

        Arguments and errors are those of ``generate``. A prompt is encoded shortly before its turn, so many prompts
        neither delay the first output nor need the memory of all token ids. To stop early, close the iterator.
        """
        sequences = self._build(prompts, params, prompt_options)
        call = self.shared.call(returns=False, ends_only=True)
        most_open = _AHEAD * self.core.scheduler.checked_max_resident()
        return outputs_of(self.tokenizer, self.decode(sequences, call, most_open))

    def stream(self, prompts: Any, params: Any = None, **prompt_options: Any) -> Generator[StreamChunk, None, None]:
        """Decode every prompt and yield tokens as steps emit them.

        Arguments and errors are those of ``generate``. Chunks of different prompts interleave; those of one prompt add
        up to its ``generate`` output. To stop early, close the iterator: its requests then free their KV pages at once.
        """
        sequences = list(self._build(prompts, params, prompt_options))
        return chunks_of(sequences, self.tokenizer, self.decode(sequences, self.shared.call(returns=False)))

    def score(
        self,
        prompts: Any,
        *,
        top_logprobs: int = 0,
        priority: int = 0,
        progress: bool | None = None,
        **prompt_options: Any,
    ) -> list[ScoreOutput]:
        """Return the log-probability of every token of given texts, each after the tokens before it.

        Nothing is sampled and nothing is drafted: the texts are prefilled, in batches and chunks as prompts are. The
        log-probabilities have the bits that decoding the same tokens returns, plainly or with any drafter.

        Args:
            prompts: the texts, as ``generate`` takes prompts.
            top_logprobs: how many of the most likely tokens to return at every place.
            priority: as in ``SamplingParams``.
            progress: as in ``generate``.
            **prompt_options: fields of PromptOptions.

        Returns:
            One output per text, in input order. A text that could not be scored has the typed error in ``.error``; the
            others are unaffected.

        Raises:
            InvalidParamsError, ConfigError, EngineBusyError, ForkedProcessError: as ``generate``.
        """
        params = scoring_params(top_logprobs, priority)
        return [score_of(output) for output in self.generate(prompts, params, progress=progress, **prompt_options)]

    def encode(self, prompt: Any, **prompt_options: Any) -> list[int]:
        """Return the token ids that ``generate`` would decode for one prompt.

        Args:
            prompt: a string, a list of token ids, a list of messages, or the result of a tokenizer for one text.
            **prompt_options: fields of PromptOptions.

        Raises:
            RequestError: a subclass says what is wrong with the prompt.
            ConfigError: a keyword is unknown, or an option is invalid.
        """
        return self.request_builder().encode(prompt, PromptOptions.from_keywords(prompt_options))

    def reset_prefix_cache(self) -> None:
        """Give no request that begins after this call KV entries that have been computed before; any thread may call.

        The engine does this itself if it sees, while no request is running, that the weights of the target have
        changed. Call it after changes that PyTorch does not count, such as writes of single weights through NumPy, and
        after changes while requests run.
        """
        self.core.prefixes.is_stale = True

    @without_autocast
    def sync_weights(self) -> None:
        """Take notice that the weights of the target have been updated in place, as by an optimizer.

        Weights are shared, so the update itself needs no copy. What was computed with the former weights is dropped:
        the prefix cache, and the codes of ``draft="self"``, which are rounded again. The engine does this itself if it
        sees, while no request is running, that weights have changed; see ``reset_prefix_cache``. Any thread may call.
        Requests that are running go on with the new weights over the KV entries of their former tokens.

        Raises:
            UnsupportedModelError: tensors or modules of the target have been replaced, or numbers that its program has
                copied (sums like 1 + w) have changed; make a new Engine.
            NotYetSupportedError: ``tp_size`` shards the target.
        """
        if self.target.leader is not None:
            raise NotYetSupportedError(
                f"tp_size={self.config.tp_size}: the processes of the target take no updates of its weights; make a "
                "new Engine from the new checkpoint."
            )
        self.target.expect_program_of_weights()
        self.reset_prefix_cache()
        self.drafter.sync_weights()

    def prepare_structured_outputs(self) -> None:
        """Start the process that compiles grammars, so that no request waits for that; takes some seconds.

        Any thread may call, beside other calls. Without the package ``xgrammar``, or a tokenizer that it can read, this
        does nothing.
        """
        self._grammars.prepare()

    def describe(self) -> dict[str, Any]:
        """Return the names of this engine's models, method and backends, and how its forwards run."""
        return {
            "target": self.target.name,
            "drafter": self.drafter.name,
            "why_drafter": None if self.draft_choice is None else self.draft_choice.why,
            "method": self.config.method,
            "max_batch_size": self.config.max_batch_size,
            "num_draft_tokens": self.config.num_draft_tokens,
            "dtype": str(self.target.layout.dtype).removeprefix("torch."),
            "device": str(self.target.layout.device),
            "devices": [str(device) for device in self.target.layout.all_devices],
            "tp_size": self.config.tp_size,
            "deterministic": self.config.deterministic,
            "row_multiple": self.target.row_padding.multiple,
            "linear_bytes": bytes_by_kind(self.target.model),
            "own_linears": len(self.target.hf.linears.served(self.target.row_padding.multiple > 1)),
            "forward_program": self.target.has_program,
            "why_no_program": self.target.why_no_program,
            "attend_per_row": self.target.row_padding.attend_per_row,
            "rows_one_by_one": self.target.row_padding.one_by_one,
            "why_one_by_one": self.target.why_one_by_one,
            **described(self.target.graphs),
            "draft": self.drafter.describe(),
            "ops": dict(self.target.ops.chosen),
            "kv_bytes_per_token": self.target.layout.bytes_per_token,
            "state_bytes_per_sequence": self.target.layout.bytes_per_sequence,
            "kv_pages": self.core.pool.num_pages if self.core.pool else 0,
            "prefix_cache": self.core.prefixes.describe(self.core.pool),
            "memory": None if self.memory_plan is None else self.memory_plan.describe(),
        }

    def _expect_same_steps(self) -> None:
        """Refuse a K that depends on times if other processes must run the same steps."""
        if self.target.needs_same_calls and not isinstance(self.config.num_draft_tokens, int):
            raise ConfigError(
                f"num_draft_tokens={self.config.num_draft_tokens!r}, but the target is sharded over processes, each of "
                "which would choose K by its own measurements; pass an integer."
            )

    def request_builder(self) -> RequestBuilder:
        """Return what makes sequences of prompts for this engine.

        A request may name the K that was configured: whether ``memory_bytes`` has lowered it, no caller can know.
        """
        most = self._asked_draft_tokens if self.core.drafting.length_policy.max_draft_tokens else 0
        return RequestBuilder(self.target, self.tokenizer, most, self._grammars)

    def _build(self, prompts: Any, params: Any, keywords: dict[str, Any]) -> Iterator[Sequence]:
        """Check the arguments and draw the seeds; return the sequences, whose prompts are encoded as they are read."""
        self.process.expect_this()
        options = PromptOptions.from_keywords(keywords)
        items = as_prompt_list(prompts)
        builder = self.request_builder()
        each = as_params_list(params, len(items))
        seeds = [builder.seeds(request_params) for request_params in each]

        def sequences() -> Iterator[Sequence]:
            for index, prompt in enumerate(items):
                yield from builder.build_choices(index, prompt, each[index], options, seeds[index])

        return sequences()

    def decode(self, sequences: Iterable[Sequence], call: Call, most_open: int | None = None) -> Outputs:
        """Run to the end; yield an output for each sequence that a step served or that failed.

        For callers that make their sequences themselves, with ``request_builder``; ``call`` is from ``shared.call``,
        and ends here. Sequences are read as there is room. At most ``most_open`` of them wait or are resident at once,
        more than can end in one step; None: all.
        """
        with closing(call):
            sequences = iter(sequences)
            is_first = True
            while True:
                new = list(islice(sequences, None if most_open is None else most_open - len(call.open)))
                for sequence in new:
                    if sequence.finish_reason is None:
                        self._expect_room(sequence)
                if new or is_first:
                    call.add([sequence for sequence in new if sequence.finish_reason is None])
                    is_first = False
                yield from (StepOutput(s, [], s.finish_reason) for s in new if s.finish_reason is not None)
                if not call.open and not new:
                    return
                for output in call.take() if call.open else ():
                    raise_cause(output.request.error)
                    yield output

    def _expect_room(self, sequence: Sequence) -> None:
        """Fail a sequence that the KV pool will never hold, and no other."""
        try:
            self.core.expect_room(sequence)
        except RequestError as error:
            sequence.fail(error)
