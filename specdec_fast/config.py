"""Settings of an engine: :class:`EngineConfig`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from specdec_fast.errors import ConfigError
from specdec_fast.sampling_params import SamplingParams, as_plain
from specdec_fast.speculation_length import LengthPolicy, make_length_policy

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class EngineConfig:
    """How an engine decodes. Nothing here changes which tokens come out.

    Attributes:
        method: scheduler: ``"exspec"`` (sliding window of sequences, refilled as they end) or ``"eqspec"`` (fixed
            batches in lockstep).
        max_batch_size: sequences in one step at most.
        num_draft_tokens: K, draft tokens per sequence and step; 0 decodes plainly. ``"auto"`` chooses K of 0 to 8 for
            every sequence, again and again, from costs measured here and from what was accepted of it so far; the
            engine then takes about a second longer to make (dozens of forwards, however long they take). Or a
            LengthPolicy of the caller's own, which then serves one engine.
        window_size: sequences that exspec keeps resident; None takes twice ``max_batch_size``.
        max_wait_steps: how many steps in a row exspec may pass a resident sequence over.
        kv_cache_tokens: KV positions in the pool (the draft model's pool gets as many); None makes room for a full
            window of each call's largest requests.
        page_size: KV positions per page.
        max_prefill_tokens: prompt tokens that a step prefills at most, so that a long prompt does not keep the other
            sequences waiting; they decode meanwhile. None: all prompts that join, which makes a batch end soonest.
        dtype: of the weights (a torch dtype or its name); None takes the checkpoint's.
        device: where to run; None takes CUDA where there is one, else the CPU.
        backend: implementation of the ops: ``"auto"``, or one that ``specdec-fast doctor`` lists.
        deterministic: give every row the same bits in every batch and engine, in any dtype, at one number of threads.
            Where PyTorch runs forwards, that takes padding and more calls (``describe()`` tells which way).
            False saves them; near-ties between tokens may then fall differently in different batches.
        enforce_eager: run every forward as the model's own PyTorch code, operation by operation: for debugging, or for
            hooks that must see every forward. By default, on the CPU, a forward is written down when an engine is made,
            with the weights that the model has then, and runs as one call (``specdec_fast/program/``); on a GPU
            forwards of few rows are recorded as CUDA graphs (``specdec_fast/cuda_graphs/graphs.py``).

    Raises:
        ConfigError: a value is out of range; the message names it.

    """

    method: str = "exspec"
    max_batch_size: int = 8
    num_draft_tokens: int | str | LengthPolicy = 5
    window_size: int | None = None
    max_wait_steps: int = 4
    kv_cache_tokens: int | None = None
    page_size: int = 16
    max_prefill_tokens: int | None = None
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    backend: str = "auto"
    deterministic: bool = True
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, as_plain(getattr(self, field.name)))
        for name, kind in (("method", str), ("backend", str), ("deterministic", bool), ("enforce_eager", bool)):
            if not isinstance(getattr(self, name), kind):
                expected = "True or False" if kind is bool else "a string"
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected {expected}.")
        for name, smallest in (("max_batch_size", 1), ("max_wait_steps", 0), ("page_size", 1)):
            _expect_at_least(name, getattr(self, name), smallest)
        make_length_policy(self.num_draft_tokens)  # raises what is wrong with it
        for name in ("kv_cache_tokens", "max_prefill_tokens"):
            if getattr(self, name) is not None:
                _expect_at_least(name, getattr(self, name), 1)
        self._check_window()
        object.__setattr__(self, "dtype", _as_dtype(self.dtype))
        object.__setattr__(self, "device", _as_device(self.device))

    @property
    def most_draft_tokens(self) -> int:
        """The largest K that a sequence may get in a step."""
        return make_length_policy(self.num_draft_tokens).max_draft_tokens

    @property
    def num_resident(self) -> int:
        """``window_size``, or its default: twice a batch, one batch where nobody may be passed over."""
        if self.window_size is not None:
            return self.window_size
        return self.max_batch_size * min(2, self.max_wait_steps + 1)

    def _check_window(self) -> None:
        largest = self.max_batch_size * (self.max_wait_steps + 1)
        window = self.num_resident
        if not isinstance(window, int) or isinstance(window, bool) or not self.max_batch_size <= window <= largest:
            raise ConfigError(
                f"window_size={window!r}: expected {self.max_batch_size} (max_batch_size) to {largest}; in a larger "
                f"window some sequence would have to wait more than max_wait_steps={self.max_wait_steps} steps."
            )

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> EngineConfig:
        """Build a config from keyword arguments.

        Raises:
            ConfigError: a keyword is unknown; the message lists the known ones.

        """
        known = [f.name for f in fields(cls)]
        for name in keywords:
            if name not in known and name in {f.name for f in fields(SamplingParams)}:
                raise ConfigError(f"{name!r} belongs to a request; pass params=SamplingParams({name}=...).")
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise ConfigError(f"unknown keyword {name!r}.{hint} Known: {', '.join(known)}.")
        return cls(**keywords)


def as_config(config: EngineConfig | None, keywords: Mapping[str, Any]) -> EngineConfig:
    """Take a config as it is, or make one of keywords.

    Raises:
        ConfigError: both are given, or the config is none.

    """
    if config is None:
        return EngineConfig.from_keywords(keywords)
    if keywords:
        raise ConfigError("pass either an EngineConfig or keywords, not both.")
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config is a {type(config).__name__}; expected an EngineConfig, or its fields as keywords.")
    return config


def _expect_at_least(name: str, value: Any, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value < 2**63:
        raise ConfigError(f"{name}={value!r}: expected an integer >= {smallest}.")


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in _DTYPES.values()):
        return dtype
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(_DTYPES)}, a torch dtype of these, or None.")


def _as_device(value: torch.device | str | None) -> torch.device | None:
    if value is None:
        return None
    try:
        device = torch.device(value)
    except Exception as error:  # other types, and numbers beyond any device's
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device={value!r}: expected cpu, cuda, cuda:1 or the like ({reason}).") from None
    if device.type == "meta":
        raise ConfigError(f"device={value!r} keeps no numbers; expected cpu, cuda, cuda:1 or the like.")
    return device
