"""The engine of a model, kept between ``generate`` calls as long as the model's weights stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from threading import Lock, RLock
from typing import Any, NamedTuple, TypeVar

from torch import nn
from transformers import PreTrainedModel

from specdec_fast.config import EngineConfig, as_config
from specdec_fast.engine.engine import Engine
from specdec_fast.errors import ConfigError, UnsupportedModelError
from specdec_fast.model_watch import Watch

_PLACE = "_specdec_fast_engine"  # the attribute of a model that has its engine
_MOST_ROWS = 64  # of a step, unless the caller has a config; more rows are decoded as a window
_NOT_YOURS = ("device", "device_map", "dtype", "quantization")  # fields that would move or change the caller's model
_making = Lock()
_Result = TypeVar("_Result")


class Drafting(NamedTuple):
    """The drafter that a call asks for, and the tokenizers, if they are given: a draft model may have another one."""

    draft: Any
    tokenizer: Any = None  # the target's
    draft_tokenizer: Any = None

    def is_same(self, other: Drafting) -> bool:
        """Return whether a call asks for the same objects, or for the same name."""
        same_draft = self.draft is other.draft or (isinstance(self.draft, str) and self.draft == other.draft)
        same_target = self.tokenizer is other.tokenizer
        return same_draft and same_target and self.draft_tokenizer is other.draft_tokenizer


@dataclass
class _Kept:
    """An engine, what it was made of, and how its models were then."""

    engine: Engine
    drafting: Drafting
    config: EngineConfig  # that was asked for, but for ``max_batch_size``
    watches: list[Watch]
    states: list[str | None]  # what each watch said then: a model may have hooks, with which PyTorch runs it

    def serves(self, model: PreTrainedModel, drafting: Drafting, config: EngineConfig, num_rows: int) -> bool:
        """Return whether it is what a call asks for, and its models are as they were."""
        if self.engine.target.model is not model:  # a shallow copy of the model has its place
            return False
        if (
            not drafting.is_same(self.drafting)
            or not _are_same(config, self.config)
            or num_rows > self.engine.config.max_batch_size
        ):
            return False
        return [watch.change() for watch in self.watches] == self.states


class KeptEngine:
    """The place of one engine in the ``__dict__`` of its model, so that both are freed together.

    A dictionary with weak keys would keep them for ever, because an engine refers to its model. A copy of the model,
    and a pickled one, has an empty place, because an engine cannot be copied.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._kept: _Kept | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptEngine:
        return KeptEngine()

    def __copy__(self) -> KeptEngine:
        return KeptEngine()

    def __reduce__(self) -> tuple[type[KeptEngine], tuple[()]]:
        return KeptEngine, ()

    @classmethod
    def of(cls, model: PreTrainedModel) -> KeptEngine:
        """Return that of a model, empty at first."""
        with _making:
            return vars(model).setdefault(_PLACE, cls())

    def run(
        self,
        model: PreTrainedModel,
        drafting: Drafting,
        config: EngineConfig | None,
        num_draft_tokens: Any,
        num_rows: int,
        decode: Callable[[Engine], _Result],
    ) -> _Result:
        """Return what ``decode`` makes of the engine.

        The engine checks its models when a call begins, and refuses changes that the watches do not see (of numbers
        that its programs have copied). Then nothing has been decoded yet, and it is made again.
        """
        asked, num_rows = asked_config(config, num_draft_tokens, num_rows)
        engine, is_new = self._engine(model, drafting, asked, num_rows)
        try:
            return decode(engine)
        except UnsupportedModelError:
            if is_new:
                raise
        self._forget(engine)
        return decode(self._engine(model, drafting, asked, num_rows)[0])

    def _engine(
        self, model: PreTrainedModel, drafting: Drafting, config: EngineConfig, num_rows: int
    ) -> tuple[Engine, bool]:
        with self._lock:
            if self._kept is not None and self._kept.serves(model, drafting, config, num_rows):
                return self._kept.engine, False
            self._kept = None  # frees its memory, unless another thread is decoding
            draft = drafting.draft
            tokenizers = {"tokenizer": drafting.tokenizer, "draft_tokenizer": drafting.draft_tokenizer}
            config_of_rows = replace(config, max_batch_size=num_rows, device=model.device)
            engine = Engine(model, draft, config_of_rows, **tokenizers)
            modules = [model, draft] if isinstance(draft, nn.Module) else [model]
            watches = [Watch(module, ()) for module in modules]
            self._kept = _Kept(engine, drafting, config, watches, [watch.change() for watch in watches])
            return engine, True

    def _forget(self, engine: Engine) -> None:
        with self._lock:
            if self._kept is not None and self._kept.engine is engine:
                self._kept = None


def asked_config(config: EngineConfig | None, num_draft_tokens: Any, num_rows: int) -> tuple[EngineConfig, int]:
    """Return the config of a call with so many rows, and the rows of a step that its engine must have.

    Raises ConfigError if the config would move or change the model, or K is in both.
    """
    if config is not None:
        checked = as_config(config, {} if num_draft_tokens is None else {"num_draft_tokens": num_draft_tokens})
        for name in _NOT_YOURS:
            if (value := getattr(checked, name)) is not None:
                raise ConfigError(f"engine_config sets {name}={value!r}, but the model is loaded; unset it.")
        return checked, checked.max_batch_size
    checked = EngineConfig() if num_draft_tokens is None else EngineConfig(num_draft_tokens=num_draft_tokens)
    rows = min(_MOST_ROWS, 1 << max(0, num_rows - 1).bit_length())
    return checked, max(checked.max_batch_size, rows)


def _are_same(one: EngineConfig, other: EngineConfig) -> bool:
    return all(getattr(one, field.name) == getattr(other, field.name) for field in fields(EngineConfig))
