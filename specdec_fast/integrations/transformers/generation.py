"""``custom_generate`` for transformers' ``generate``, and ``generate`` for a folder in the layout of its hub."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from specdec_fast.config import EngineConfig
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import InvalidParamsError, NotYetSupportedError
from specdec_fast.integrations.transformers.arguments import (
    asked_draft_tokens,
    chosen_draft,
    dropped_arguments,
    expect_served,
    prompts_of,
)
from specdec_fast.integrations.transformers.kept_engines import Drafting, KeptEngine
from specdec_fast.integrations.transformers.processors import CallFacts, of_row, translated
from specdec_fast.integrations.transformers.rows import BatchRow
from specdec_fast.sampling_params import SamplingParams, eos_ids


def custom_generate(  # noqa: PLR0913, PLR0917  # the arguments of transformers, and names that it looks for
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    draft: Any = None,
    num_draft_tokens: Any = None,
    engine_config: EngineConfig | None = None,
    generator: torch.Generator | None = None,
    assistant_model: PreTrainedModel | None = None,
    streamer: Any = None,
    synced_gpus: bool = False,
    target_tokenizer: Any = None,
    draft_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode a padded batch with an engine: the argument ``custom_generate`` of transformers' ``generate``.

    ``generate`` prepares its arguments and calls this function, which returns what ``generate`` would. Greedy tokens
    are those of ``generate``. Sampled ones follow the same distribution, and with one seed they are the same with every
    drafter, but other ones than ``generate`` draws.

    Args:
        model: the target, in evaluation mode. Its engine is kept, and made again when its weights have moved.
        input_ids: ``[B, L]``, padded on any side as ``attention_mask`` says.
        logits_processor: processors, made by ``generate``. What ``SamplingParams`` has no field for is called in
            Python for each row; the result may depend on the arguments only.
        stopping_criteria: criteria, made by ``generate``. Those other than lengths and EOS are called after every token
            of each row, with ``[1, length]`` ids and no scores.
        generation_config: the config that ``generate`` has prepared.
        draft: as ``Engine`` takes it; None: ``assistant_model``, prompt lookup (``prompt_lookup_num_tokens``), the
            model's MTP layer (``use_mtp``), or plain decoding.
        num_draft_tokens: K; None: ``prompt_lookup_num_tokens``, ``num_assistant_tokens`` or the engine's default.
        engine_config: further settings; without it a step has as many rows as the batch, at most 64.
        generator: draws the seeds of rows that are sampled; None: torch's own generator, as ``torch.manual_seed`` set
            it.
        assistant_model: a draft model.
        streamer: receives each token when it is emitted for all rows.
        synced_gpus: must be False: no other process waits for steps of this one.
        target_tokenizer: the model's, for a draft model with another one; None: that in the folder from which the model
            was loaded. (``generate`` passes a callable neither ``tokenizer`` nor ``assistant_tokenizer``.)
        draft_tokenizer: the same of the draft model.
        **model_kwargs: arguments of the model's forward, of which only those for token ids are served.

    Returns:
        ``[B, L + T]`` ids, each row padded with ``pad_token_id`` to the longest; or, with ``return_dict_in_generate``,
        a ``GenerateDecoderOnlyOutput`` with ``sequences``, and ``scores`` and ``logits`` if asked for. These are zero
        where a row has ended. It has no ``past_key_values``.

    Raises:
        NotYetSupportedError: the call asks for something without a counterpart, which the message names.
        ConfigError: the call asks for several drafters, or ``engine_config`` does not fit the model.
        RequestError: a row cannot be decoded; a subclass says why. Nothing is returned for the other rows.
    """
    dropped = dropped_arguments(model)
    assistant_model = dropped.get("assistant_model") if assistant_model is None else assistant_model
    streamer = dropped.get("streamer") if streamer is None else streamer
    if synced_gpus or dropped.get("synced_gpus"):
        raise NotYetSupportedError(
            "generate was called with synced_gpus, but the engine does not step together with other processes; gather "
            "the weights in one process, and call it there with synced_gpus=False."
        )
    expect_served(model, generation_config, model_kwargs)
    drafter = chosen_draft(generation_config, draft, assistant_model)
    num_draft_tokens = asked_draft_tokens(generation_config, num_draft_tokens)
    batch = _Batch(input_ids, model_kwargs, logits_processor, stopping_criteria, generation_config)
    kept = KeptEngine.of(model)
    emitted = kept.run(
        model,
        Drafting(drafter, target_tokenizer, draft_tokenizer),
        engine_config,
        num_draft_tokens,
        len(input_ids),
        lambda engine: batch.decode(engine, generator, streamer),
    )
    return batch.output(emitted)


def generate(*args: Any, model: PreTrainedModel, **kwargs: Any) -> Tensor | GenerateDecoderOnlyOutput:
    """Serve ``model.generate(custom_generate="FOLDER")``: the function of ``custom_generate/generate.py``.

    Arguments are those of ``generate`` and ``custom_generate``. ``stop_strings`` with ``tokenizer`` are served here,
    which ``generate`` refuses together with a callable. So is an ``assistant_model`` with an ``assistant_tokenizer``.
    """
    tokenizer = kwargs.pop("tokenizer", None)
    if (assistant_tokenizer := kwargs.pop("assistant_tokenizer", None)) is not None:
        kwargs |= {"target_tokenizer": tokenizer, "draft_tokenizer": assistant_tokenizer}
    config = kwargs.get("generation_config")
    strings = kwargs.get("stop_strings") or getattr(config, "stop_strings", None)
    if tokenizer is not None and strings:
        kwargs.pop("stop_strings", None)
        if config is not None:
            kwargs["generation_config"] = copy.deepcopy(config)
            kwargs["generation_config"].stop_strings = None
        criteria = kwargs.get("stopping_criteria") or ()
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])
    # Not model.generate, which may be this function: from_pretrained puts it there for a folder with custom_generate/.
    return type(model).generate(model, *args, **kwargs, custom_generate=custom_generate)


class _Batch:
    """The rows of one call, and what its processors and criteria ask of each."""

    def __init__(
        self, input_ids: Tensor, model_kwargs: dict[str, Any], processors: Any, criteria: Any, config: GenerationConfig
    ) -> None:
        self._input_ids = input_ids
        self._config = config
        self._prompts = prompts_of(input_ids, model_kwargs)
        self._is_dict = bool(config.return_dict_in_generate)
        self._keeps_scores = self._is_dict and bool(config.output_scores or config.output_logits)
        width = input_ids.shape[1]
        max_new_tokens = min(each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)) - width
        stop_ids = frozenset(
            token for each in criteria if isinstance(each, EosTokenCriteria) for token in eos_ids(each.eos_token_id)
        )
        self._criteria = [each for each in criteria if not isinstance(each, (MaxLengthCriteria, EosTokenCriteria))]
        pad = config._pad_token_tensor
        self._pad = None if pad is None else int(pad)
        if self._pad is None and len(input_ids) > 1 and (stop_ids or self._criteria):
            raise InvalidParamsError("rows of the batch may end at different lengths; pass pad_token_id.")
        call = CallFacts(width, max_new_tokens, stop_ids, bool(config.do_sample))
        values: dict[str, Any] = {}
        if self._keeps_scores:
            translated(processors, call)  # for its checks
            self._processors = list(processors)
        else:
            values, self._processors = translated(processors, call)
        if config.do_sample:
            values = {"temperature": 1.0} | values
        self._params = SamplingParams(
            max_new_tokens=max_new_tokens, stop_token_ids=tuple(stop_ids), ignore_eos=True, **values
        )
        self._rows: list[BatchRow] = []

    def decode(self, engine: Engine, generator: torch.Generator | None, streamer: Any) -> list[list[int]]:
        """Return the tokens that each row emits; the first error of a row is raised."""
        self._rows = self._new_rows()
        builder = engine.request_builder()
        seeds = self._seeds(generator)
        sequences = []
        for i, row in enumerate(self._rows):
            params = replace(self._params, logits_processors=(row,)) if row.processes else self._params
            sequence = builder.build(i, row.prompt, params, seed=seeds[i])
            sequence.stop_strings = row if row.watches else None
            sequences.append(sequence)
        columns = _Columns(len(sequences), self._pad, streamer)
        with closing(engine.decode(sequences, engine.shared.call(ends_only=streamer is None))) as outputs:
            for output in outputs:
                if output.request.error is not None:
                    raise output.request.error
                columns.put(output.request.index, output.token_ids, output.finish_reason is not None)
        if streamer is not None:
            streamer.end()
        return [sequence.emitted_ids for sequence in sequences]

    def output(self, emitted: list[list[int]]) -> Tensor | GenerateDecoderOnlyOutput:
        """Return what ``generate`` returns of tokens."""
        length = max(map(len, emitted))
        padded = [[*tokens, *[self._pad] * (length - len(tokens))] for tokens in emitted]
        tokens = torch.tensor(padded, dtype=self._input_ids.dtype, device=self._input_ids.device)
        sequences = torch.cat([self._input_ids, tokens], dim=1)
        if not self._is_dict:
            return sequences
        wants_scores = self._keeps_scores and self._config.output_scores
        wants_logits = self._keeps_scores and self._config.output_logits
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._by_step(length, lambda kept: kept.processed) if wants_scores else None,
            logits=self._by_step(length, lambda kept: kept.logits) if wants_logits else None,
        )

    def _new_rows(self) -> list[BatchRow]:
        device = self._input_ids.device
        given = self._input_ids.tolist()
        return [
            BatchRow(given[i], prompt, of_row(self._processors, i), self._criteria, self._keeps_scores, device)
            for i, prompt in enumerate(self._prompts)
        ]

    def _seeds(self, generator: torch.Generator | None) -> list[int | None]:
        """Return the seed of each row; None: the engine draws it from torch's generator, if the row is sampled."""
        if generator is None or not self._config.do_sample:
            return [None] * len(self._prompts)
        drawn = torch.randint(2**63 - 1, (len(self._prompts),), generator=generator, device=generator.device)
        return drawn.tolist()

    def _by_step(self, length: int, part: Callable[[Any], Tensor]) -> tuple[Tensor, ...]:
        """Return ``[B, vocab_size]`` per step, of one part of the scores."""
        none = torch.zeros_like(part(next(row.scores[0] for row in self._rows)))
        steps = []
        for i in range(length):
            steps.append(torch.stack([part(row.scores[i]) if i < len(row.scores) else none for row in self._rows]))
        return tuple(steps)


class _Columns:
    """Puts the tokens of all rows into a streamer, one ``[B]`` tensor per position, as ``generate`` does."""

    def __init__(self, num_rows: int, pad: int | None, streamer: Any) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._has_ended = [False] * num_rows
        self._pad = pad
        self._streamer = streamer
        self._num_put = 0

    def put(self, row: int, tokens: list[int], has_ended: bool) -> None:
        """Add the tokens that one row has emitted, and put what is then known of all rows."""
        if self._streamer is None:
            return
        self._tokens[row] += tokens
        self._has_ended[row] = has_ended
        while self._is_known(self._num_put):
            column = [own[self._num_put] if self._num_put < len(own) else self._pad for own in self._tokens]
            self._streamer.put(torch.tensor(column, device="cpu"))
            self._num_put += 1

    def _is_known(self, place: int) -> bool:
        lengths = list(map(len, self._tokens))
        reached = all(place < length or ended for length, ended in zip(lengths, self._has_ended, strict=True))
        return reached and place < max(lengths)
