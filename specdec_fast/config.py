"""Settings of an engine: :class:`EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from specdec_fast.errors import ConfigError
from specdec_fast.quantization.rounding import QUANTIZATIONS
from specdec_fast.request.prompt_options import PROMPT_KEYWORDS, unknown_keyword
from specdec_fast.sampling_params import as_plain
from specdec_fast.speculation_length import LengthPolicy, make_length_policy
from specdec_fast.trees.static import MOST_NODES, checked_choices

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # of transformers


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. None of them changes a token of the output.

    Attributes:
        method: the scheduler: ``"exspec"`` (a window of sequences, refilled as they end) or ``"eqspec"`` (fixed
            batches).
        max_batch_size: largest number of sequences in one step.
        num_draft_tokens: K, draft tokens per sequence and step; 0 decodes plainly. ``"auto"`` chooses K from 0 to 8
            every few steps, from measured costs and the acceptance so far; making the engine then takes about a second
            longer (dozens of forwards). An instance of LengthPolicy chooses K by a rule of its own; two engines must
            not share it.
        window_size: number of sequences that exspec keeps resident (they hold KV pages); None: twice
            ``max_batch_size``, or ``max_batch_size`` if ``max_wait_steps`` is 0.
        max_wait_steps: number of steps in a row for which exspec may pass a resident sequence over.
        kv_cache_tokens: KV positions in the pool (the draft model's pool gets as many); None: as many as a full window
            of each call's largest requests needs. Sequences take pages as they grow. If the pool is full, the youngest
            one gives up its pages and is prefilled again later, with the same tokens.
        memory_bytes: budget for weights, KV entries, recurrent states and the working memory of steps, on the device of
            the target; the interpreter and its libraries are not counted. ``max_batch_size``, ``num_draft_tokens``, the
            nodes of trees and ``max_prefill_tokens`` are then upper limits: the engine lowers them as far as it must,
            and takes the rest of the budget for KV positions, or exactly ``kv_cache_tokens``: with ``prefix_cache`` all
            of it, else no more than the resident sequences can have. A checkpoint that cannot fit is refused before it
            is loaded. None: no budget. See ``docs/planning.md``.
        page_size: KV positions per page. Prefixes are shared by whole pages; on a Hopper GPU, pages of 64 gain 1 to 3%
            of a step.
        prefix_cache: keep the KV entries of requests for later ones whose tokens begin alike, as long as no request
            needs their pages; these then compute the rest of their prompts only. No output changes. Without
            ``kv_cache_tokens`` the pool gets up to twice the positions that requests need. None: on in services
            (AsyncEngine, ``serve``, ``batch``, ``chat``, Ray), off in Engine. See ``docs/guide.md``.
        max_prefill_tokens: largest number of prompt tokens that a step prefills, so that the other sequences can decode
            while a long prompt is prefilled. None: a step prefills whole prompts, so that a batch ends soonest.
        tap_layers: the layers whose hidden states a drafter such as ``"eagle3:FOLDER"`` reads: l is the residual stream
            after l of the target's layers. None: those that its checkpoint names. Some tools count the first layer as
            0; with their numbers few draft tokens are accepted.
        draft_tree: what a drafter of trees, such as ``"eagle3:FOLDER"`` or ``"medusa:FOLDER"``, proposes. ``"chain"``;
            or a number of nodes, 1 to 64: the best tree of this size, with EAGLE-3 a new one in each step; or a static
            tree, a list of rank paths in Medusa's choices format, such as ``((0,), (0, 0), (1,))``, the likeliest
            first: where fewer nodes are allowed, the first ones. None: the drafter's own default. The engine refuses
            ``tap_layers`` and ``draft_tree`` if the drafter does not read them.
        dtype: dtype of the weights (a torch dtype or its name); None: the checkpoint's.
        quantization: how the weights of the target's linears are kept, rounded to nearest when the model is loaded,
            with a scale for every output and 32 inputs: ``"int8"`` or ``"int4"`` (the output layer has 8 bits). With
            ``"int8-a8"`` or ``"int4-a8"``, the rows that are multiplied with them are rounded to 8 bits as well, which
            is faster for several rows. ``"a8"`` rounds the rows that are multiplied with the codes of a checkpoint or
            a GGUF file. Outputs are those of plain decoding with these weights. None: as loaded. See
            ``docs/quantization.md``.
        draft_quantization: the same for a draft model. With another drafter, or none, the engine refuses it.
        device: the device; None: CUDA if there is a device, else the CPU.
        device_map: spreads the layers of a target given by name or folder over several devices of this process, as
            ``from_pretrained`` of transformers does: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``,
            ``"sequential"``, or a mapping from names of modules to devices, ``"cpu"`` among them. KV entries lie on the
            device of their layer. PyTorch then runs the forwards. It excludes ``device``, ``tp_size`` and
            ``quantization``. None: all of it on ``device``. See ``docs/scaling.md``.
        tp_size: number of processes over which the target is sharded by the tensor-parallel plan of transformers: this
            one, which schedules and drafts, and others on this machine that the engine starts and ends, each on a GPU
            of its own, or on its share of this process's threads of a CPU. The target is then given by name or folder.
            See ``docs/scaling.md``.
        backend: implementation of the ops: ``"auto"``, or one that ``specdec-fast doctor`` lists.
        deterministic: give every row the same bits in every batch and engine, in any dtype, at one number of threads.
            If PyTorch runs the forwards, this takes padding and more calls (``describe()`` says which). False avoids
            both; at a near-tie between two tokens, another batch may then emit another token.
        enforce_eager: run every forward as the model's own PyTorch code, operation by operation: for debugging, or for
            hooks that must see every forward. By default the engine compiles the forward to a program
            (``specdec_fast/program/``), with the weights that the model has then, and on a GPU records forwards of few
            rows as CUDA graphs (``specdec_fast/runner/graphs/graphs.py``).

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    method: str = "exspec"
    max_batch_size: int = 8
    num_draft_tokens: int | str | LengthPolicy = 5
    window_size: int | None = None
    max_wait_steps: int = 4
    kv_cache_tokens: int | None = None
    memory_bytes: int | None = None
    page_size: int = 16
    prefix_cache: bool | None = None
    max_prefill_tokens: int | None = None
    tap_layers: tuple[int, ...] | None = None
    draft_tree: str | int | tuple[tuple[int, ...], ...] | None = None
    dtype: torch.dtype | str | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    device: torch.device | str | None = None
    device_map: str | Mapping[str, Any] | None = field(default=None, hash=False)
    tp_size: int = 1
    backend: str = "auto"
    deterministic: bool = True
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, as_plain(getattr(self, each.name)))
        for name, kind in (("method", str), ("backend", str), ("deterministic", bool), ("enforce_eager", bool)):
            if not isinstance(getattr(self, name), kind):
                expected = "True or False" if kind is bool else "a string"
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected {expected}.")
        if self.prefix_cache is not None and not isinstance(self.prefix_cache, bool):
            raise ConfigError(f"prefix_cache={self.prefix_cache!r}: expected True, False or None.")
        for name, smallest in (("max_batch_size", 1), ("max_wait_steps", 0), ("page_size", 1), ("tp_size", 1)):
            expect_at_least(name, getattr(self, name), smallest)
        make_length_policy(self.num_draft_tokens)  # raises if the value is invalid
        for name in ("kv_cache_tokens", "memory_bytes", "max_prefill_tokens"):
            if getattr(self, name) is not None:
                expect_at_least(name, getattr(self, name), 1)
        for name in ("quantization", "draft_quantization"):
            if getattr(self, name) not in (None, *QUANTIZATIONS):
                names = ", ".join(QUANTIZATIONS)
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {names}, or None.")
        self._check_window()
        object.__setattr__(self, "tap_layers", _as_tap_layers(self.tap_layers))
        object.__setattr__(self, "draft_tree", _as_draft_tree(self.draft_tree))
        object.__setattr__(self, "dtype", _as_dtype(self.dtype))
        object.__setattr__(self, "device", _as_device(self.device))
        object.__setattr__(self, "device_map", self._checked_map())

    def _checked_map(self) -> str | dict[str, Any] | None:
        device_map = _as_device_map(self.device_map)
        if device_map is not None:
            others = {"device": self.device, "quantization": self.quantization}
            given = [f"{name}={value}" for name, value in others.items() if value is not None]
            if self.tp_size > 1:
                given.append(f"tp_size={self.tp_size}")
            if given:
                raise ConfigError(f"device_map and {given[0]} exclude each other; leave one of them out.")
        return device_map

    @property
    def most_draft_tokens(self) -> int:
        """The largest K that a sequence may get in a step."""
        return make_length_policy(self.num_draft_tokens).max_draft_tokens

    def for_service(self) -> EngineConfig:
        """Return the config with ``prefix_cache`` on, unless it says otherwise."""
        return replace(self, prefix_cache=True) if self.prefix_cache is None else self

    @property
    def num_resident(self) -> int:
        """``window_size``, or its default: twice ``max_batch_size``; once if ``max_wait_steps`` is 0."""
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
            if name in PROMPT_KEYWORDS:
                raise ConfigError(f"{name!r} belongs to prompts; pass it to generate or stream.")
            if name not in known:
                raise unknown_keyword(name, known)
        return cls(**keywords)


def as_config(config: EngineConfig | None, keywords: Mapping[str, Any]) -> EngineConfig:
    """Return a config unchanged, or make one from keywords. Raises ConfigError for both, or another kind of config."""
    if config is None:
        return EngineConfig.from_keywords(keywords)
    if keywords:
        raise ConfigError("pass either an EngineConfig or keywords, not both.")
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config is a {type(config).__name__}; expected an EngineConfig, or its fields as keywords.")
    return config


def expect_at_least(name: str, value: Any, smallest: int) -> None:
    """Raise a ConfigError that names the setting unless its value is an integer from ``smallest`` on."""
    if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value < 2**63:
        raise ConfigError(f"{name}={value!r}: expected an integer >= {smallest}.")


def expect_seconds(name: str, value: Any, or_zero: bool = False) -> None:
    """Raise a ConfigError that names the setting unless its value is a number above 0 (or 0, with ``or_zero``)."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and (value > 0 or (or_zero and value == 0))):
        raise ConfigError(f"{name}={value!r}: expected a number of seconds {'>= 0' if or_zero else '> 0'}.")


def _as_tap_layers(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if (
        not isinstance(value, (list, tuple))
        or not value
        or not all(type(layer) is int and layer >= 0 for layer in value)
    ):
        raise ConfigError(f"tap_layers={value!r}: expected numbers of layers, such as (2, 16, 29), or None.")
    return tuple(value)


def _as_draft_tree(value: Any) -> str | int | tuple[tuple[int, ...], ...] | None:
    if value is None or value == "chain":
        return value
    if type(value) is int:
        if not 1 <= value <= MOST_NODES:
            raise ConfigError(f"draft_tree={value}: expected a number of nodes from 1 to {MOST_NODES}.")
        return value
    return checked_choices(value, "draft_tree")


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in _DTYPES.values()):
        return dtype
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(_DTYPES)}, a torch dtype of these, or None.")


def _as_device(value: torch.device | str | None, setting: str = "device") -> torch.device | None:
    if value is None:
        return None
    try:
        device = torch.device(value)
    except Exception as error:  # torch raises several types, for other types and for indices out of range
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{setting}={value!r}: expected cpu, cuda, cuda:1 or the like ({reason}).") from None
    if device.type == "meta":
        raise ConfigError(f"{setting}={value!r} stores no values; expected cpu, cuda, cuda:1 or the like.")
    return device


def _as_device_map(value: Any) -> str | dict[str, Any] | None:
    if value is None or (isinstance(value, str) and value in _MAPS):
        return value
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"device_map={value!r}: expected one of {', '.join(_MAPS)}, or a mapping from names of modules to devices."
        )
    return {name: _as_mapped(name, device) for name, device in value.items()}


def _as_mapped(name: str, device: Any) -> int | str:
    if (type(device) is int and device >= 0) or device == "disk":  # a GPU by its number; loading refuses the disk
        return device
    if device is None or isinstance(device, int):
        raise ConfigError(
            f"device_map[{name!r}]={device!r}: expected cpu, cuda, cuda:1 or the like, or a GPU's number."
        )
    return str(_as_device(device, f"device_map[{name!r}]"))
