"""How each method of ``bench.engine`` decodes all prompts: transformers, the oracle, the engine.

``autoregressive`` is the engine without a draft, in fixed batches like those of eqspec and transformers;
``autoregressive-exspec`` is the same with exspec's refilling. transformers runs as its users run it: ``generate()`` on
a left-padded batch, and with ``assistant_model=``, which it serves at batch 1 only, so other batches are left out.
``bench/engine_/peers.py`` has the other libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from time import perf_counter

import torch
from transformers import PreTrainedModel

from bench.common.device import ForwardMeter, synchronize
from bench.common.measurement import Measurement, MethodSetting, Tokens, equal_length_steps, grouping_rate
from bench.common.replay import ReplayDrafter
from bench.common.workload import Workload
from bench.engine_.peers import PEERS
from specdec_fast import DecodingStats, Drafter, Engine, SamplingParams, oracle
from specdec_fast.drafters.draft_model.drafter import ModelDrafter
from specdec_fast.drafters.shared.pooled import PooledDrafter
from specdec_fast.equivalence.compare import transformers_greedy_batch
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.loading import eos_token_ids
from specdec_fast.oracle.dense import Repad, repad_in_python

PLAIN, TRANSFORMERS, ASSISTED = "autoregressive", "transformers", "transformers-assisted"
PLAIN_METHODS = {PLAIN: "eqspec", "autoregressive-exspec": "exspec"}  # methods of plain decoding, with their schedulers
SPECULATIVE_METHODS = ("eqspec", "exspec")
ENGINE_METHODS = (*PLAIN_METHODS, *SPECULATIVE_METHODS)
ORACLE_METHODS = ("oracle-eqspec", "oracle-exspec")
DEFAULT_METHODS = (PLAIN, *SPECULATIVE_METHODS, *ORACLE_METHODS, TRANSFORMERS, ASSISTED)
METHODS = (*ENGINE_METHODS, *ORACLE_METHODS, TRANSFORMERS, ASSISTED, *PEERS)
DRAFTING_PEERS = tuple(name for name, peer in PEERS.items() if peer.drafts)
NOT_REPLAYED = (*ORACLE_METHODS, ASSISTED, *DRAFTING_PEERS)  # these methods call the draft model themselves
TRANSCRIPT_BATCH_SIZE = 8  # any other batch size gives the same tokens (I6)


class EngineRunner:
    """An engine with one drafter, ready to decode all prompts; it frees its KV pools between runs.

    Many engines are measured in turn, and together their pools would not fit on a GPU. The pools are made before a
    measured run, as a kept engine has them. Only the first run, which is not measured, makes them itself.
    """

    def __init__(self, engine: Engine, drafter: Drafter, workload: Workload) -> None:
        self.engine, self.drafter, self.workload = engine, drafter, workload
        self._params = SamplingParams(max_new_tokens=workload.max_new_tokens)
        inner = drafter.inner if isinstance(drafter, ReplayDrafter) else drafter
        self._pooled = inner if isinstance(inner, PooledDrafter) else None
        self._draft = inner if isinstance(inner, ModelDrafter) else None
        self._pool_tokens = 0

    def __call__(self) -> Measurement:
        """Decode all prompts."""
        self.engine.core.drafting.drafter = self.drafter  # all acceptances of a replayed draft share one engine
        self.engine.tokenizer = None  # ids in and out, as with the other methods: detokenizing is not measured
        self._make_pools()
        prompts = self.workload.prompts
        lengths, outputs = [len(prompt) for prompt in prompts], [[] for _ in prompts]
        latencies, steps = [0.0] * len(prompts), {}
        device = self.engine.target.layout.device
        models = [self.engine.target, *([self._draft.model] if self._draft else [])]
        synchronize(device)
        with ForwardMeter(models, device) as meter:
            started = perf_counter()
            for chunk in self.engine.stream(prompts, self._params):
                seconds = perf_counter() - started
                if chunk.error:
                    raise chunk.error
                steps.setdefault(self.engine.last_run.num_steps, []).append(lengths[chunk.index])
                lengths[chunk.index] += len(chunk.token_ids)
                outputs[chunk.index] += chunk.token_ids
                latencies[chunk.index] = seconds  # the last chunk sets the final value
        stats = self.engine.last_run
        return Measurement(
            outputs,
            seconds,
            stats.timer.seconds,
            moved_bytes=0,
            num_steps=stats.num_steps,
            decoding=stats.decoding,
            latencies=latencies,
            outside_forwards=(seconds - meter.seconds()) / (seconds - stats.timer.seconds["prefill"]),
            kv_bytes=self._release_pools(),
            grouping_rate=grouping_rate(steps.values()),
            equal_length_steps=equal_length_steps(steps.values()),
        )

    def _make_pools(self) -> None:
        if self._pool_tokens:
            engine, page_size = self.engine, self.engine.config.page_size
            engine.core.pool = PagePool(engine.target.layout, self._pool_tokens, page_size, engine.target.row_padding)
            self.drafter.prepare(self._pool_tokens, page_size)

    def _release_pools(self) -> int:
        """Free the pools; return their bytes."""
        engine, num_bytes = self.engine, 0
        self._pool_tokens = engine.core.pool.num_pages * engine.config.page_size
        for owner in (engine.core, self._pooled):
            if owner is not None and owner.pool is not None:
                num_bytes += owner.pool.num_pages * owner.pool.page_size * owner.pool.layout.bytes_per_token
                owner.pool = None
        return num_bytes


class Bench:
    """The models and prompts of one benchmark, and every method to decode them. All methods share the models.

    Args:
        workload: the models, the prompts and how many tokens to decode.
        deterministic: whether the engine pads its forwards.
        peer_models: folder with the models of other libraries.
        drafter: what the engine drafts with, if not with the draft model: ``"kind:FOLDER"``.

    """

    def __init__(
        self,
        workload: Workload,
        deterministic: bool = True,
        peer_models: Path | None = None,
        drafter: str | None = None,
    ) -> None:
        self.workload, self.deterministic = workload, deterministic
        self._drafter = drafter
        self.target, self.draft, self.prompts = workload.target, workload.draft, workload.prompts
        self.limits = oracle.StopRule(workload.max_new_tokens, eos_token_ids(self.target))
        self.engine = cache(self._engine)
        self.peer = cache(lambda name: PEERS[name].make(workload, peer_models))

    def method_settings(
        self,
        methods: list[str],
        batch_sizes: list[int],
        num_draft_tokens: list[int | str],
        acceptances: list[float | None],
    ) -> Iterator[MethodSetting]:
        """Yield every method at every batch size, with every K and acceptance that it serves."""
        for batch_size in batch_sizes:
            for method in methods:
                for k in self._settings(method, batch_size, num_draft_tokens):
                    for acceptance in acceptances if method in SPECULATIVE_METHODS else [None]:
                        yield self.method_setting(method, batch_size, k, acceptance)

    def reference(self, settings: list[MethodSetting]) -> MethodSetting:
        """Return the reference of outputs: ``transformers`` at batch 1, in half precision the engine's plain decoding.

        In half precision, two logits are often equal up to rounding, so two correct programs diverge. The engine's
        settings must then equal its plain decoding; for other settings, the share of equal outputs is reported.
        """
        method = TRANSFORMERS if self.target.dtype == torch.float32 else PLAIN
        measured = (c for c in settings if (c.name, c.batch_size) == (method, 1))
        return next(measured, None) or self.method_setting(method, 1)

    def method_setting(
        self, method: str, batch_size: int, num_draft_tokens: int | str | None = None, acceptance: float | None = None
    ) -> MethodSetting:
        """Make one setting; a setting that cannot run raises here, not in its turn."""
        run = self._runner(method, batch_size, num_draft_tokens, acceptance)
        padded = method == TRANSFORMERS and batch_size > 1
        gated = method in ENGINE_METHODS
        gated |= self.target.dtype == torch.float32 and not padded and method not in PEERS
        return MethodSetting(method, batch_size, run, num_draft_tokens, acceptance, gated)

    @staticmethod
    def _settings(method: str, batch_size: int, num_draft_tokens: list[int | str]) -> list[int | str | None]:
        if method in PLAIN_METHODS or method == TRANSFORMERS or (method in PEERS and not PEERS[method].drafts):
            return [None]
        if method == ASSISTED and batch_size > 1:
            return []
        if method in SPECULATIVE_METHODS:
            return list(num_draft_tokens)
        return [k for k in num_draft_tokens if isinstance(k, int) and k > 0]  # only the engine serves K 0 and auto

    def _runner(
        self, method: str, batch_size: int, num_draft_tokens: int | str | None, acceptance: float | None
    ) -> Callable[[], Measurement]:
        if method in PEERS:
            return partial(self.peer(method), batch_size, num_draft_tokens)
        if method in ENGINE_METHODS:
            return self.engine_runner(batch_size, method, num_draft_tokens, acceptance)
        if method == TRANSFORMERS:
            return partial(self.run_transformers, batch_size)
        if method == ASSISTED:
            return partial(self.run_assisted, num_draft_tokens)
        run = {"oracle-eqspec": self.run_oracle_eqspec, "oracle-exspec": self.run_oracle_exspec}[method]
        return partial(run, batch_size, num_draft_tokens)

    def _batches(self, batch_size: int) -> list[Tokens]:
        return [self.prompts[start : start + batch_size] for start in range(0, len(self.prompts), batch_size)]

    def run_transformers(self, batch_size: int = 1, assistant: PreTrainedModel | None = None) -> Measurement:
        """Run ``generate()`` on one left-padded batch after the other."""
        outputs, latencies, started = [], [], perf_counter()
        options = {"assistant_model": assistant} if assistant else {}
        for batch in self._batches(batch_size):
            outputs += transformers_greedy_batch(self.target, batch, self.workload.max_new_tokens, **options)
            latencies += [perf_counter() - started] * len(batch)
        return Measurement(outputs, latencies[-1], {}, 0, sum(map(len, outputs)), latencies=latencies)

    def run_assisted(self, num_draft_tokens: int) -> Measurement:
        """Run ``generate(assistant_model=...)`` with K and otherwise default settings, one prompt at a time."""
        self.draft.generation_config.num_assistant_tokens = num_draft_tokens
        return self.run_transformers(1, self.draft)

    def run_oracle_eqspec(self, batch_size: int, num_draft_tokens: int, repad: Repad = repad_in_python) -> Measurement:
        """Run the oracle's eqspec on fixed batches of prompts, one after the other."""
        runs, latencies, started = [], [], perf_counter()
        for batch in self._batches(batch_size):
            runs.append(oracle.eqspec(self.target, self.draft, batch, self.limits, num_draft_tokens, repad))
            latencies += [perf_counter() - started] * len(batch)
        return self._oracle_measurement(runs, latencies[-1], latencies)

    def run_oracle_exspec(self, batch_size: int, num_draft_tokens: int, repad: Repad = repad_in_python) -> Measurement:
        """Run the oracle's exspec on all prompts; it does not report when each has ended."""
        started = perf_counter()
        models, options = (self.target, self.draft), {"batch_size": batch_size, "repad": repad}
        run = oracle.exspec(*models, self.prompts, self.limits, num_draft_tokens, **options)
        return self._oracle_measurement([run], perf_counter() - started, None)

    def _oracle_measurement(
        self, runs: list[oracle.OracleRun], seconds: float, latencies: list[float] | None
    ) -> Measurement:
        stages: dict[str, float] = {}
        decoding = DecodingStats()
        for run in runs:
            for stage, spent in run.timer.seconds.items():
                stages[stage] = stages.get(stage, 0.0) + spent
            decoding.add(run.decoding)
        steps = [step for run in runs for step in run.steps]
        return Measurement(
            [tokens for run in runs for tokens in run.outputs],
            seconds,
            stages,
            moved_bytes=sum(run.moved_bytes for run in runs),
            num_steps=len(steps),
            decoding=decoding,
            latencies=latencies,
            equal_length_steps=sum(step.equal_length for step in steps) / max(1, len(steps)),
        )

    def engine_runner(
        self, batch_size: int, method: str, num_draft_tokens: int | str | None = None, acceptance: float | None = None
    ) -> EngineRunner:
        """Make a run of the engine over all prompts, with the draft model or with a replayed ``acceptance``."""
        engine, drafter = self.engine(batch_size, method, num_draft_tokens)
        if acceptance is not None:
            layout = engine.target.layout
            drafter = ReplayDrafter(drafter, self.transcripts, acceptance, engine.target.vocab_size, layout.device)
        return EngineRunner(engine, drafter, self.workload)

    def _engine(self, batch_size: int, method: str, num_draft_tokens: int | str | None) -> tuple[Engine, Drafter]:
        own = self.draft if self._drafter is None else self._drafter
        draft, k = (None, {}) if method in PLAIN_METHODS else (own, {"num_draft_tokens": num_draft_tokens})
        scheduler = PLAIN_METHODS.get(method, method)
        options = {"max_batch_size": batch_size, "deterministic": self.deterministic, **k}
        engine = Engine(self.target, draft, method=scheduler, **options)
        return engine, engine.drafter

    @cached_property
    def transcripts(self) -> Tokens:
        """The tokens that the target emits for every prompt in plain decoding."""
        return self.engine_runner(TRANSCRIPT_BATCH_SIZE, PLAIN)().outputs
