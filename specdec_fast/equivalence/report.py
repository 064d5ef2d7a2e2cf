"""The equivalence report: every combination of dtype, sampling, method, drafter, K and batch against plain decoding.

The reference is the engine's own plain decoding, one prompt at a time. The report also compares the reference with
``generate()`` of ``transformers`` at batch 1. Two more figures show what the promise is worth: how far plain *batched*
decoding in ``transformers`` is from its own batch 1 (the noise floor), and the engine with determinism off (the
negative control). A forward program computes row by row, so its bits are the same with determinism off. So the control
and its own reference run in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import checked_draft, configs_for, draft_tokenizers_for, is_draft_model
from specdec_fast.engine.engine import Engine
from specdec_fast.equivalence.compare import (
    Comparison,
    Setting,
    compare,
    transformers_greedy,
    transformers_greedy_batch,
)
from specdec_fast.equivalence.quality import Quality, quality_of
from specdec_fast.models.loading import eos_token_ids, load_model
from specdec_fast.request.stopping import cut_emission
from specdec_fast.results import GenerationOutput
from specdec_fast.sampling_params import SamplingParams

PLAIN = "autoregressive"
GREEDY = "greedy"


@dataclass(frozen=True)
class Matrix:
    """What to compare: all combinations."""

    target: str  # name or folder of the target
    drafts: tuple[str, ...]  # names or folders of draft models, names of drafters
    config: EngineConfig  # device and backend; every combination sets the rest
    dtypes: tuple[str, ...]  # names of dtypes
    # sampling parameters of the first prompt, by name; prompt i (from 0) has the seed plus i
    samplings: dict[str, SamplingParams]
    methods: tuple[str, ...]  # names of schedulers, and "autoregressive"
    batch_sizes: tuple[int, ...]  # sequences per step
    # K of the schedulers, or the name of a length policy; 0: plain decoding by that scheduler
    num_draft_tokens: tuple[int | str, ...]
    # largest number of batches that a setting decodes, because small batches take long; None: all prompts
    rounds: int | None = None
    draft_tokenizer: Any | None = None  # of the draft models; None: those in their folders

    def settings(self) -> Iterator[Setting]:
        """Yield every way to decode, without dtype and sampling."""
        for method in self.methods:
            for batch_size in self.batch_sizes:
                if method == PLAIN:
                    yield Setting(PLAIN, batch_size)
                    continue
                for k in self.num_draft_tokens:
                    yield from (Setting(method, batch_size, k, drafter) for drafter in self.drafts if k)
                    if k == 0:
                        yield Setting(method, batch_size, 0)


@dataclass
class Report:
    """The results."""

    # every combination, compared with the engine's plain decoding at batch 1
    comparisons: list[Comparison] = field(default_factory=list)
    # greedy plain decoding at batch 1, compared with ``generate()`` at batch 1
    against_transformers: list[Comparison] = field(default_factory=list)
    # plain batched ``generate()``, compared with its own batch 1
    noise_floor: list[Comparison] = field(default_factory=list)
    # the engine with ``deterministic=False``, compared with plain decoding, both with ``enforce_eager``
    control: list[Comparison] = field(default_factory=list)
    # a quantised target, compared with the target as loaded on the prompts and the texts of plain greedy decoding
    quality: list[Quality] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every combination equals the reference, and in fp32 the reference equals ``transformers``."""
        proofs = [c for c in self.against_transformers if c.setting.dtype == "float32"]
        same_bits = all(c.equal_logprobs == 1 for c in self.comparisons)
        return same_bits and all(c.exact_match == 1 for c in self.comparisons + proofs)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: [comparison.as_dict() for comparison in comparisons] for name, comparisons in vars(self).items()}


class Models:
    """The models of one dtype, and the prompts."""

    def __init__(self, matrix: Matrix, dtype: str, prompts: list[list[int]]) -> None:
        self.matrix = matrix
        self.dtype = dtype
        self.prompts = prompts
        _expect_drafts(matrix)
        # Target and drafts are quantised when they are loaded here: the engines get them as they are.
        self._config = replace(matrix.config, quantization=None, draft_quantization=None)
        alone = replace(self._config, dtype=dtype, max_batch_size=1, window_size=None, method="eqspec")
        self.alone = Engine(matrix.target, None, replace(alone, quantization=matrix.config.quantization))
        self._alone_config = alone
        self.target: PreTrainedModel = self.alone.target.model
        device = self.alone.target.layout.device
        self.drafts: dict[str, Any] = {
            name: load_model(name, alone.dtype, device, "draft", matrix.config.draft_quantization)  # type: ignore[arg-type]
            if is_draft_model(name)
            else name
            for name in matrix.drafts
        }
        self._configs = dict(zip(matrix.drafts, configs_for(matrix.drafts, self._config), strict=True))
        tokenizers = draft_tokenizers_for(matrix.drafts, matrix.draft_tokenizer)
        self._draft_tokenizers = dict(zip(matrix.drafts, tokenizers, strict=True))
        self._by_transformers: dict[int, list[list[int]]] = {}
        self.expected = {name: self._decode(self.alone, name) for name in matrix.samplings}
        self._expected_eagerly: dict[str, list[GenerationOutput]] = {}

    def compare_all(self, setting: Setting) -> Iterator[Comparison]:
        """Decode with every sampling in one setting, and compare."""
        plain = setting.method == PLAIN
        config = replace(
            self._configs.get(setting.drafter, self._config),
            dtype=self.dtype,
            method="eqspec" if plain else setting.method,
            max_batch_size=setting.batch_size,
            num_draft_tokens=setting.num_draft_tokens or 0,
            deterministic=setting.deterministic,
            enforce_eager=setting.enforce_eager or self.matrix.config.enforce_eager,
        )
        draft = self.drafts.get(setting.drafter)
        draft_tokenizer = self._draft_tokenizers.get(setting.drafter)
        engine = Engine(self.target, draft, config, tokenizer=self.alone.tokenizer, draft_tokenizer=draft_tokenizer)
        for name in self.matrix.samplings:
            # the name of the folder, without its path on this machine
            named = replace(setting, dtype=self.dtype, sampling=name, drafter=Path(setting.drafter).name)
            rounds = self.matrix.rounds
            limit = None if rounds is None else rounds * setting.batch_size
            got = self._decode(engine, name, limit)
            want = self._reference(name, setting.enforce_eager)[:limit]
            logprobs = (_logprobs(got), _logprobs(want))
            yield compare(named, self.target, self.prompts[:limit], _tokens(got), _tokens(want), logprobs)

    def against_transformers(self) -> Comparison:
        """Compare the greedy reference with ``generate()`` at batch 1, each text up to its EOS."""
        stop_ids = eos_token_ids(self.target)
        ours = [cut_emission(tokens, stop_ids, len(tokens))[0] for tokens in _tokens(self.expected[GREEDY])]
        setting = Setting(PLAIN, 1, dtype=self.dtype)
        return compare(setting, self.target, self.prompts, ours, self._transformers(1))

    def quality(self) -> Quality:
        """Compare the target with itself as it is loaded without quantisation, on prompts and greedy texts."""
        config = self.alone.config
        loaded = load_model(self.matrix.target, config.dtype, self.target.device)  # type: ignore[arg-type]
        outputs = self.expected[GREEDY]
        texts = [[*prompt, *tokens] for prompt, tokens in zip(self.prompts, _tokens(outputs), strict=True)]
        return quality_of(self.target, loaded, texts, self.dtype, config.quantization or "")

    def noise_floor(self, batch_size: int) -> Comparison:
        """Compare plain batched decoding in ``transformers`` with its own batch 1."""
        outputs = self._transformers(batch_size)
        stop_ids = eos_token_ids(self.target)
        # generate() has one limit per batch, set by the longest prompt, so texts are compared up to that limit
        pairs = zip(self._transformers(1), outputs, strict=True)
        expected = [want if got[-1] in stop_ids else want[: len(got)] for want, got in pairs]
        setting = Setting("transformers", batch_size, dtype=self.dtype)
        return compare(setting, self.target, self.prompts, outputs, expected)

    def _reference(self, sampling: str, enforce_eager: bool) -> list[GenerationOutput]:
        """Return plain decoding one prompt at a time, with PyTorch's forwards if ``enforce_eager``."""
        if not enforce_eager or not self.alone.target.has_program:
            return self.expected[sampling]
        if sampling not in self._expected_eagerly:
            config = replace(self._alone_config, enforce_eager=True)
            engine = Engine(self.target, None, config, tokenizer=self.alone.tokenizer)
            self._expected_eagerly[sampling] = self._decode(engine, sampling)
        return self._expected_eagerly[sampling]

    def _decode(self, engine: Engine, sampling: str, limit: int | None = None) -> list[GenerationOutput]:
        first = replace(self.matrix.samplings[sampling], logprobs=True)
        prompts = self.prompts[:limit]
        seeds = [None if first.seed is None else first.seed + i for i in range(len(prompts))]
        outputs = engine.generate(prompts, [replace(first, seed=seed) for seed in seeds], progress=False)
        return [output.raise_for_error() for output in outputs]

    def _transformers(self, batch_size: int) -> list[list[int]]:
        if batch_size not in self._by_transformers:
            self._by_transformers[batch_size] = self._generate(batch_size)
        return self._by_transformers[batch_size]

    def _generate(self, batch_size: int) -> list[list[int]]:
        positions = self.alone.target.max_positions
        wanted = self.matrix.samplings[GREEDY].max_new_tokens
        outputs: list[list[int]] = []
        for start in range(0, len(self.prompts), batch_size):
            batch = self.prompts[start : start + batch_size]
            longest = max(map(len, batch))
            limit = wanted if positions is None else min(wanted, positions - longest + 1)
            if batch_size == 1:
                outputs.append(transformers_greedy(self.target, batch[0], limit))
            else:
                outputs += transformers_greedy_batch(self.target, batch, limit)
        return outputs


def run(matrix: Matrix, prompts: list[list[int]], progress: Callable[[str], None]) -> Report:
    """Compare everything; ``progress`` is called with a line of text before each part."""
    report = Report()
    for dtype in matrix.dtypes:
        progress(f"{dtype}: plain decoding, one prompt at a time")
        models = Models(matrix, dtype, prompts)
        for setting in matrix.settings():
            progress(f"{dtype}: {setting.method}, batch {setting.batch_size}, K {setting.num_draft_tokens}")
            report.comparisons += models.compare_all(setting)
        for setting in _controls(matrix):
            progress(f"{dtype}: determinism off, batch {setting.batch_size}")
            report.control += models.compare_all(setting)
        if GREEDY in matrix.samplings:
            progress(f"{dtype}: transformers")
            report.against_transformers.append(models.against_transformers())
            if matrix.config.quantization is not None:
                progress(f"{dtype}: the target as loaded, without quantisation")
                report.quality.append(models.quality())
            report.noise_floor += [models.noise_floor(b) for b in matrix.batch_sizes if b > 1]
        del models
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # frees memory for the models of the next dtype
    return report


def _expect_drafts(matrix: Matrix) -> None:
    """Raise ConfigError if a drafter cannot be made, or a setting for drafters has no effect on any of them."""
    drafts = matrix.drafts or (None,)
    tokenizers = draft_tokenizers_for(drafts, matrix.draft_tokenizer)
    for draft, own, tokenizer in zip(drafts, configs_for(drafts, matrix.config), tokenizers, strict=True):
        checked_draft(draft, own, tokenizer)


def _tokens(outputs: list[GenerationOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def _logprobs(outputs: list[GenerationOutput]) -> list[list[float]]:
    return [output.logprobs or [] for output in outputs]


def _controls(matrix: Matrix) -> list[Setting]:
    """Return the settings whose forwards have most rows: for every batch size, the last method at the largest K."""
    chosen: dict[int, Setting] = {}
    for setting in matrix.settings():
        kept = chosen.get(setting.batch_size)
        if kept is None or _most_draft_tokens(setting) > _most_draft_tokens(kept):
            chosen[setting.batch_size] = setting
    return [replace(setting, deterministic=False, enforce_eager=True) for setting in chosen.values()]


def _most_draft_tokens(setting: Setting) -> int:
    return EngineConfig(num_draft_tokens=setting.num_draft_tokens or 0).most_draft_tokens
