"""Ray Data: an engine in every worker of ``Dataset.map_batches``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from os import PathLike
from typing import Any

import numpy as np

from specdec_fast.config import EngineConfig, as_config
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ConfigError, InvalidParamsError, InvalidPromptError, SpecDecError
from specdec_fast.request.prompt_options import PROMPT_KEYWORDS, PromptOptions
from specdec_fast.results import DecodingStats, GenerationOutput
from specdec_fast.sampling_params import SamplingParams, as_sampling_params

Batch = Any  # a dict of arrays, or a pyarrow.Table


class BatchGenerator:
    """A class for ``Dataset.map_batches``: every worker makes an engine once, and decodes batch after batch.

    A batch keeps its columns and gets those of the outputs (here with the default prefix):

    ======================== ======================================================================================
    ``output_text``          the text; null if no tokenizer is known
    ``output_token_ids``     the emitted ids
    ``output_finish_reason`` ``"stop"``, ``"length"`` or ``"error"``
    ``output_error``         why the row failed; empty if it did not. The other rows are not affected
    ``output_stats``         the fields of DecodingStats; ``sum_stats`` adds them up
    ``output_logprobs``      only if ``params`` asks for log-probabilities, or is a function
    ======================== ======================================================================================

    The outputs of a row depend on its prompt and its parameters alone, so a row that Ray computes again, because a
    worker has failed, gets the same tokens. Therefore a row that samples must have a seed: see ``params``.

    Args:
        target: a name or folder, as for ``Engine``; workers load it themselves.
        draft: a name or folder, the name of a drafter, or None, as for ``Engine``.
        config: an EngineConfig; its fields may be given as keywords instead. ``prefix_cache`` is on unless it is False.
        params: SamplingParams or a transformers GenerationConfig for all rows; None is greedy. Or a function that makes
            them from a row (a dict of its columns), for example ``lambda row: SamplingParams(temperature=0.8,
            seed=row["id"])``.
        tokenizer: as for ``Engine``.
        draft_tokenizer: as for ``Engine``.
        prompt_column: the column of the prompts: texts, lists of token ids, or lists of messages.
        output_prefix: with which the names of the columns begin that are added.
        **keywords: fields of EngineConfig, if ``config`` is None, and of PromptOptions.

    Raises:
        ConfigError: a column is missing, or has the name of one that is added; and what ``Engine`` raises.
        InvalidParamsError: ``params`` is none of these, or samples without a seed.
    """

    def __init__(
        self,
        target: str | PathLike[str],
        draft: str | PathLike[str] | None,
        config: EngineConfig | None = None,
        *,
        params: SamplingParams | Callable[[dict[str, Any]], SamplingParams] | Any = None,
        tokenizer: Any | None = None,
        draft_tokenizer: Any | None = None,
        prompt_column: str = "prompt",
        output_prefix: str = "output_",
        **keywords: Any,
    ) -> None:
        self._prompt_options = {name: keywords.pop(name) for name in PROMPT_KEYWORDS if name in keywords}
        PromptOptions.from_keywords(self._prompt_options)
        self._params = params if callable(params) else _checked(as_sampling_params(params))
        self._prompt_column = prompt_column
        self._prefix = output_prefix
        self._added = ["text", "token_ids", "finish_reason", "error", "stats"]
        if callable(self._params) or self._params.logprobs:
            self._added.append("logprobs")
        self.engine = Engine(
            target,
            draft,
            as_config(config, keywords).for_service(),
            tokenizer=tokenizer,
            draft_tokenizer=draft_tokenizer,
        )

    def __call__(self, batch: Batch) -> Batch:
        """Decode the rows of a batch, and return it with the columns of the outputs.

        Args:
            batch: a dict of arrays (``batch_format="numpy"``, Ray Data's default) or a ``pyarrow.Table``
                (``batch_format="pyarrow"``), which keeps the types of nested columns, such as lists of messages.
        """
        columns = self._columns_of(batch)
        requests: list[tuple[Any, SamplingParams] | str] = []  # or the reason why a row has none
        for i, prompt in enumerate(columns[self._prompt_column]):
            try:
                requests.append((_plain_prompt(prompt), self._params_of(columns, i)))
            except SpecDecError as error:
                requests.append(str(error))
        good = [request for request in requests if not isinstance(request, str)]
        outputs = iter(self._decode(good))
        rows = [self._failed(request) if isinstance(request, str) else self._row(next(outputs)) for request in requests]
        added = {name: [row[name] for row in rows] for name in self._added}
        if isinstance(batch, Mapping):
            return {**batch, **{f"{self._prefix}{name}": _array(values) for name, values in added.items()}}
        return _with_columns(batch, self._prefix, added)

    def _columns_of(self, batch: Batch) -> Mapping[str, Any]:
        """Return the columns as what can be iterated and indexed: of a table, those that are needed, as lists."""
        if not isinstance(batch, Mapping) and not hasattr(batch, "append_column"):
            raise ConfigError(
                f"the batch is a {type(batch).__name__}; expected a dict of arrays or a pyarrow.Table: "
                "map_batches(batch_format='numpy'), or 'pyarrow'."
            )
        names = list(batch) if isinstance(batch, Mapping) else batch.column_names
        if self._prompt_column not in names:
            raise ConfigError(
                f"no column {self._prompt_column!r} for the prompts; the rows have {', '.join(map(str, names))}. Pass "
                "prompt_column=..."
            )
        if taken := [name for name in self._added if f"{self._prefix}{name}" in names]:
            raise ConfigError(
                f"the rows have a column {self._prefix}{taken[0]} already; pass another output_prefix, so that the "
                "outputs do not replace it."
            )
        if isinstance(batch, Mapping):
            return batch
        needed = names if callable(self._params) else [self._prompt_column]
        return {name: batch.column(name).to_pylist() for name in needed}

    def _params_of(self, columns: Mapping[str, Any], index: int) -> SamplingParams:
        if not callable(self._params):
            return self._params
        return _checked(as_sampling_params(self._params({name: column[index] for name, column in columns.items()})))

    def _decode(self, requests: list[tuple[Any, SamplingParams]]) -> list[GenerationOutput]:
        if not requests:
            return []
        prompts, params = map(list, zip(*requests, strict=True))
        return self.engine.generate(prompts, params, progress=False, **self._prompt_options)

    def _row(self, output: GenerationOutput) -> dict[str, Any]:
        return {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "error": "" if output.error is None else str(output.error),  # not null: a file of nulls would have no type
            "stats": self._stats(output.stats),
            "logprobs": output.logprobs or [],
        }

    def _failed(self, reason: str) -> dict[str, Any]:
        return {
            "text": None if self.engine.tokenizer is None else "",
            "token_ids": [],
            "finish_reason": "error",
            "error": reason,
            "stats": self._stats(DecodingStats()),
            "logprobs": [],
        }

    def _stats(self, stats: DecodingStats) -> dict[str, Any]:
        """Return the fields; the list has the same length in every row, so that every block has the same type."""
        counts = stats.accepted_per_position
        missing = max(0, self.engine.core.drafting.length_policy.max_draft_tokens - len(counts))
        return {**asdict(stats), "accepted_per_position": [*counts, *[0] * missing]}


def sum_stats(rows: Iterable[Mapping[str, Any]], output_prefix: str = "output_") -> DecodingStats:
    """Return the statistics of all rows together.

    Args:
        rows: dicts with the column ``output_stats``: ``dataset.take_all()`` or ``dataset.iter_rows()``, for example. A
            dataset that is neither materialized nor read from files would be decoded again.
        output_prefix: as for ``BatchGenerator``.
    """
    total = DecodingStats()
    for row in rows:
        counts = {field.name: row[f"{output_prefix}stats"][field.name] for field in fields(DecodingStats)}
        each_position = [int(count) for count in counts.pop("accepted_per_position")]
        total.add(DecodingStats(**{name: int(n) for name, n in counts.items()}, accepted_per_position=each_position))
    return total


def _checked(params: SamplingParams) -> SamplingParams:
    """Raise InvalidParamsError for parameters with which a row has not one output, always the same."""
    if params.n != 1:
        raise InvalidParamsError(
            f"n={params.n}: a row has one output; expected 1. Repeat the row (flat_map), with another seed each."
        )
    if params.temperature > 0 and params.seed is None:
        raise InvalidParamsError(
            "the rows sample without a seed, so a row that Ray computes again would get other tokens; give each row "
            "its own: params=lambda row: SamplingParams(..., seed=row['id'])."
        )
    return params


def _plain_prompt(value: Any) -> Any:
    """Return a prompt of a column as ``Engine.generate`` expects one.

    Arrow gives every message of a column the same keys, and null to those that it did not have; these are left out.
    """
    value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise InvalidPromptError(
            f"the prompt is a {type(value).__name__}; expected a text, a list of token ids, or a list of messages."
        )
    return [
        {key: part for key, part in item.items() if part is not None or key == "content"}
        if isinstance(item, Mapping)
        else item
        for item in value
    ]


def _array(values: list[Any]) -> np.ndarray:
    """Return a column whose lists stay lists: NumPy would make a matrix of those of equal length."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _with_columns(table: Any, prefix: str, added: Mapping[str, list[Any]]) -> Any:
    """Return a table with more columns, whose types do not depend on what the rows hold."""
    import pyarrow as pa

    counts = [(field.name, pa.int64()) for field in fields(DecodingStats) if field.name != "accepted_per_position"]
    types = {
        "text": pa.string(),
        "token_ids": pa.list_(pa.int64()),
        "finish_reason": pa.string(),
        "error": pa.string(),
        "stats": pa.struct([*counts, ("accepted_per_position", pa.list_(pa.int64()))]),
        "logprobs": pa.list_(pa.float64()),
    }
    for name, values in added.items():
        table = table.append_column(f"{prefix}{name}", pa.array(values, types[name]))
    return table
